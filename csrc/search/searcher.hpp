// Semantic and trajectory search, and store updates, in ticket order. No locks: its owner runs it from one
// place.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "search/map_store.hpp"
#include "types.hpp"

namespace finemoe {

// What an iteration has shown so far. Written by events, one layer at a time; a search reads only the layers
// up to its own, which are never written again.
struct IterationRows {
    std::int64_t index = 0;
    std::vector<Row> rows;
    std::vector<float> units;  // [B, h] unit embeddings
    std::vector<float> gates;  // [L, B, J]

    int batch() const { return static_cast<int>(rows.size()); }
};

// One row with its f16 gate rows [L, J] and embedding [h] (empty: none).
std::shared_ptr<const IterationRows> make_iteration(std::span<const std::uint16_t> gates,
                                                    std::span<const std::uint16_t> embedding);

struct SearchRequest {
    std::int64_t ticket = 0;
    SearchKind kind = SearchKind::semantic;
    int layer = -1;
    int target = -1;
    int row = -1;  // update only
    std::shared_ptr<const IterationRows> iteration;
};

// Per row: the best map's rows for targets first … first + n − 1, and the score. Rows without a result have
// score < −1.
inline constexpr float kNoScore = -2.0F;
struct SearchResult {
    int first_target = 0;
    int targets = 0;
    std::vector<float> scores;     // [B]
    std::vector<int> maps;         // [B] place in the store, −1: none
    std::vector<float> predicted;  // [targets, B, J]
};

// A store filled before the run: maps [n, L, J] and unit embeddings [n, h] as f16, ages [n].
struct StoreContents {
    std::vector<std::uint16_t> maps, embeddings;
    std::vector<std::int64_t> written;
};

class Searcher {
  public:
    explicit Searcher(const CoreConfig& config);

    SearchResult run(const SearchRequest& request);
    const CoreConfig& config() const { return config_; }
    MapStore& store() { return store_; }
    const MapStore& store() const { return store_; }

    // Adds one iteration by the redundancy rule: f16 gate rows [L, J] and embedding [h], empty: none.
    void add(std::span<const std::uint16_t> gates, std::span<const std::uint16_t> embedding);
    StoreContents contents() const;

  private:
    void follow(const std::shared_ptr<const IterationRows>& iteration, int layer);
    void copy_targets(SearchResult& result, int batch) const;
    SearchResult semantic(const SearchRequest& request);
    SearchResult trajectory(const SearchRequest& request);
    void update(const SearchRequest& request);
    int most_redundant(const float* sums, float query_inverse, std::span<const float> unit_embedding);
    std::span<const float> unit_of(const IterationRows& iteration, int row) const;
    void refresh_sums(int place, const float* map);
    void add_squares(const float* gate_row, int row);

    const CoreConfig config_;
    MapStore store_;
    // Running sums of the iteration being followed: per row, the dot product of its layers so far with every
    // map.
    std::shared_ptr<const IterationRows> followed_;
    int layers_done_ = 0;
    std::vector<FloatBlocks> sums_;
    std::vector<double> squares_;  // per row, of the same layers
    FloatBlocks scratch_, redundancy_, tops_;
};

}  // namespace finemoe
