// Systems and routing that the stress tests run: every kind of predictor, eviction and timing, on a small
// model.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "types.hpp"

namespace finemoe::stress {

inline constexpr int kBatch = 2;

struct Scenario {
    std::string name;
    CoreConfig config;
    bool as_ready = false;         // compute what is there while the rest of the chunk loads
    double failure_rate = 0.0;     // of loads; never three in a row of one expert
    ExpertId lost_expert = kNone;  // its loads always fail: the run ends with Abort
    std::vector<ExpertId> preload = {};
};

// Prints what is broken and ends the process.
[[noreturn]] void fail(const std::string& scenario, const std::string& problem);

// What one layer of one iteration requires. Requests stay with their topic for some iterations.
struct Routing {
    std::vector<std::uint16_t> probabilities;  // f16 [kBatch, J]
    std::vector<int> experts, token_counts;
    std::vector<std::int32_t> row_counts;  // [kBatch, J]
};

Routing route(const CoreConfig& c, std::uint64_t seed, std::int64_t iteration, int layer, bool prefill);

// What opens an iteration: one row per request, some without an embedding.
struct Opening {
    std::vector<Row> rows;
    std::vector<std::uint16_t> embeddings;  // f16 [kBatch, h]
};

bool is_prefill(std::int64_t iteration);
Opening open_iteration(const CoreConfig& c, std::int64_t iteration, std::mt19937_64& random);
// Requests that end with it.
std::vector<std::int64_t> finished(std::int64_t iteration);
// What this iteration and the next will require, per step.
std::vector<std::vector<ExpertId>> foreseen(const CoreConfig& c, std::uint64_t seed, std::int64_t iteration);

std::vector<Scenario> scenarios();

// Lets the other threads go first, for a random while.
void dawdle(std::mt19937_64& random);

}  // namespace finemoe::stress
