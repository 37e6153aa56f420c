// Names, settings, events and commands of the policy core (docs/core.md).
#pragma once

#include <compare>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace finemoe {

using ExpertId = std::int32_t;  // layer * J + j
inline constexpr ExpertId kNone = -1;

// A rule of the core was broken by its caller: the event is rejected and changes nothing.
struct CoreError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class PredictorKind : std::uint8_t { none, map, speculate, activation, oracle, plugin };
enum class Targets : std::uint8_t { distance, later };
enum class Selector : std::uint8_t { delta, top_k, positive };
enum class Priority : std::uint8_t { distance, depth, layer };
enum class EvictionKind : std::uint8_t { finemoe, lru, lfu, lfru, activation, belady, plugin };
enum class FrequencyRule : std::uint8_t { run, residency };
enum class LoadShape : std::uint8_t { expert, layer };
enum class PreemptScope : std::uint8_t { device, all };
enum class Phase : std::uint8_t { prefill, decode };
enum class LoadKind : std::uint8_t { demand, prefetch };
enum class SearchKind : std::uint8_t { semantic, trajectory, update };

struct CoreConfig {
    int layers = 0;
    int experts = 0;
    int top_k = 0;
    int devices = 1;
    int slots_per_device = 0;
    std::int64_t expert_bytes = 0;
    PredictorKind predictor = PredictorKind::none;
    bool semantic = false;
    bool trajectory = false;
    Targets targets = Targets::distance;
    bool popular_start = false;
    Selector selector = Selector::delta;
    Priority priority = Priority::distance;
    int prefetch_distance = 1;
    int store_capacity = 1;
    int embedding_width = 0;
    std::int64_t embedding_work = 0;
    EvictionKind eviction = EvictionKind::lru;
    FrequencyRule frequency = FrequencyRule::run;
    double frequency_decay = 1.0;
    bool rank_prefill_by_tokens = false;
    LoadShape load_shape = LoadShape::expert;
    int layer_quota = 0;
    bool search_blocks = false;
    bool prefetch_blocks = false;
    PreemptScope preempt_scope = PreemptScope::device;

    int total_experts() const { return layers * experts; }
    int device_of(ExpertId expert) const { return expert % devices; }
    // Experts that live on a device.
    int owned(int device) const { return (total_experts() - device + devices - 1) / devices; }
    // Whether gates come with each row's tokens per expert.
    bool row_counts() const {
        return predictor == PredictorKind::activation || predictor == PredictorKind::plugin ||
               eviction == EvictionKind::activation;
    }
    // Throws CoreError naming the setting and its value.
    void validate() const;
};

// One request's part of an iteration.
struct Row {
    std::int64_t request = 0;
    Phase phase = Phase::decode;
    int tokens = 1;
    bool has_embedding = false;
};

enum class RecordKind : std::uint8_t {
    seed_store,
    preload,
    begin_iteration,
    gate,
    speculation,
    search_done,
    loaded,
    paused,
    load_failed,
    computed,
    end_iteration,
    foresight,
    // commands from here on
    search,
    wait_search,
    preempt_prefetch,
    wait,
    load,
    abort,
};

// The experts of a Wait are the core's current chunk, the reason of an Abort its abort_reason.
struct Command {
    RecordKind kind = RecordKind::wait;
    SearchKind search_kind = SearchKind::semantic;
    LoadKind load_kind = LoadKind::demand;
    bool blocking = false;
    int layer = -1;
    int target = -1;
    int device = -1;
    int slot = -1;
    ExpertId expert = kNone;
    ExpertId evicts = kNone;
    std::int64_t ticket = -1;
    std::int64_t work = -1;
    std::int64_t offset = -1;
    std::int64_t bytes = -1;
};

// What an event returns.
inline constexpr std::uint64_t kForwardPending = 1;  // the forward outbox has commands
inline constexpr std::uint64_t kSearchPending = 2;   // the search outbox has
inline constexpr std::uint64_t kChunkReady = 4;      // every expert of the current chunk is resident
inline constexpr std::uint64_t kChunkOpen = 8;       // the current chunk has experts to compute
inline constexpr std::uint64_t kMoreChunks = 16;     // the layer goes on after it
inline constexpr std::uint64_t kPrefetchOpen = 32;   // a prefetch of the next layer is under way
inline constexpr int kDeviceShift = 6;               // bit 6 + g: the outbox of device g has commands
inline constexpr int kMaxDevices = 57;

// Sums over phases and layers, and the bytes that demand loads moved: what a world notes per iteration.
struct Totals {
    std::int64_t activated = 0, hits = 0, late = 0, demand_bytes = 0;
};

// Totals since the run began.
struct Counters {
    std::int64_t demand_loads = 0, prefetch_loads = 0;  // completed
    std::int64_t demand_bytes = 0, prefetch_bytes = 0;  // moved
    std::int64_t useful_bytes = 0, wasted_bytes = 0;    // of the prefetch bytes
    std::int64_t evictions = 0, preemptions = 0, dropped = 0, failed_prefetches = 0;
    std::int64_t unused_bytes = 0;  // of the prefetch bytes: not required so far, whole or in part
    std::int64_t searches = 0, late_searches = 0, skipped_updates = 0;
};

}  // namespace finemoe
