// Search over expert maps: semantic, trajectory, and the redundancy rule of updates.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "search/search_engine.hpp"

namespace finemoe {

// B rows with their f16 gate rows [B, L, J] and embeddings [B, h] (empty: none).
std::shared_ptr<const IterationRows> make_iteration(std::span<const std::uint16_t> gates,
                                                    std::span<const std::uint16_t> embeddings,
                                                    std::size_t batch, const CoreConfig& config);

class Searcher final : public SearchEngine {
  public:
    explicit Searcher(const CoreConfig& config);

    SearchResult run(const SearchRequest& request) override;

    // Adds one iteration by the redundancy rule: f16 gate rows [L, J] and embedding [h], empty: none.
    void add(std::span<const std::uint16_t> gates, std::span<const std::uint16_t> embedding);

  private:
    void follow(const std::shared_ptr<const IterationRows>& iteration, int layer);
    SearchResult semantic(const SearchRequest& request);
    SearchResult trajectory(const SearchRequest& request);
    void update(const SearchRequest& request);
    int most_redundant(std::size_t row, bool embedded);
    std::span<const float> unit_of(const IterationRows& iteration, int row) const;
    struct ByFeature {
        std::shared_ptr<const IterationRows> of;
        std::size_t groups = 0, width = 0, batch = 0, rows = 0;
        std::vector<float> values;
        void arrange(const std::shared_ptr<const IterationRows>& iteration, const float* given,
                     int group_count, int group_width);
    };
    void refresh(const ByFeature& by_feature, std::size_t first, int place, std::span<const float> stored,
                 std::vector<FloatBlocks>& sums);
    void gather(const IterationRows& iteration, int layer);
    void gather_units(const std::shared_ptr<const IterationRows>& iteration, int first);
    static constexpr std::size_t kTile = 16;
    static BlockMatrix::Start start_of(int layer) {
        return layer == 0 ? BlockMatrix::Start::fresh : BlockMatrix::Start::sums;
    }

    // Running sums of the iteration being followed: per row, the dot product of its layers so far with every
    // map.
    std::shared_ptr<const IterationRows> followed_;
    int layers_done_ = 0;
    std::vector<FloatBlocks> sums_;
    std::vector<double> squares_;  // per row, of the same layers
    // The iteration whose embeddings have been compared with every stored one, and with which results.
    std::shared_ptr<const IterationRows> compared_;
    std::vector<FloatBlocks> similarities_;
    ByFeature followed_rows_, compared_rows_;  // of updates
    FloatBlocks redundancy_, tops_;
    std::vector<const float*> queries_;  // of the rows that are scored together, with where their sums go
    std::vector<float*> into_;
    std::vector<Best> best_;
};

}  // namespace finemoe
