// A policy of the user's own: what the core asks it, inside its events (predictor or eviction `plugin`).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "rules/eviction.hpp"
#include "types.hpp"

namespace finemoe {

// Layer → what its J experts are worth prefetching: 0 not at all.
using UserPredictions = std::map<int, std::vector<float>>;

class UserPolicy {
  public:
    virtual ~UserPolicy() = default;
    // units: unit embeddings, f16 [B, h], 0 for a row without one; empty where no row has one
    virtual UserPredictions begin_iteration(const std::vector<Row>& rows,
                                            std::span<const std::uint16_t> units) = 0;
    // probabilities f16 [B, J], row_counts [B, J]
    virtual UserPredictions gate(int layer, std::span<const std::uint16_t> probabilities,
                                 std::span<const std::int32_t> row_counts) = 0;
    virtual void end_iteration(const std::vector<std::int64_t>& finished) = 0;
    virtual double eviction_key(const EvictionView& view) = 0;
};

}  // namespace finemoe
