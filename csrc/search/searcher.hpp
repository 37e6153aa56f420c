// Search over expert maps: semantic, trajectory, and the redundancy rule of updates.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "search/search_engine.hpp"

namespace finemoe {

// One row with its f16 gate rows [L, J] and embedding [h] (empty: none).
std::shared_ptr<const IterationRows> make_iteration(std::span<const std::uint16_t> gates,
                                                    std::span<const std::uint16_t> embedding);

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
    int most_redundant(const float* sums, float query_inverse, std::span<const float> unit_embedding);
    std::span<const float> unit_of(const IterationRows& iteration, int row) const;
    void refresh_sums(int place, const float* map);
    void gather(const IterationRows& iteration, int layer);
    void add_squares(const float* gate_row, int row);

    // Running sums of the iteration being followed: per row, the dot product of its layers so far with every
    // map.
    std::shared_ptr<const IterationRows> followed_;
    int layers_done_ = 0;
    std::vector<FloatBlocks> sums_;
    std::vector<double> squares_;  // per row, of the same layers
    FloatBlocks scratch_, redundancy_, tops_;
    std::vector<const float*> queries_;  // of the rows that are scored together, with where their sums go
    std::vector<float*> into_;
    std::vector<Best> best_;
};

}  // namespace finemoe
