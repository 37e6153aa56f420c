// What runs the tickets of a predictor, in ticket order. No locks: its owner runs it from one place.
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
    std::vector<float> gates;  // [L, B, J] gate rows, or rows of activation matrices

    int batch() const { return static_cast<int>(rows.size()); }
    const float* gate_row(int experts, int layer, int row) const {
        return gates.data() + (static_cast<std::ptrdiff_t>(layer) * batch() + row) * experts;
    }
};

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

class SearchEngine {
  public:
    SearchEngine(const CoreConfig& config, MapStore::Norms norms);
    virtual ~SearchEngine() = default;

    virtual SearchResult run(const SearchRequest& request) = 0;
    const CoreConfig& config() const { return config_; }
    MapStore& store() { return store_; }
    const MapStore& store() const { return store_; }
    StoreContents contents() const;

  protected:
    // `map_`: all layers of one row, as they are stored.
    void assemble_map(const IterationRows& iteration, int row);
    // result.predicted: of each row's map the rows of the targets.
    void copy_targets(SearchResult& result, int batch) const;

    const CoreConfig config_;
    MapStore store_;
    std::vector<float> map_;  // the one being added, [L, J]
};

// The engine of a predictor: expert maps, or activation matrices.
std::unique_ptr<SearchEngine> make_search_engine(const CoreConfig& config);

}  // namespace finemoe
