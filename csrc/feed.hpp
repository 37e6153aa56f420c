// Recorded routing, played into the core: holds whole requests and forms the rows and unions of one step.
// The core sees a layer only when its gate is played.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "core.hpp"

namespace finemoe {

// One request's routing (traces/routing.py: RequestRouting).
struct RequestRouting {
    std::int64_t iterations = 0;
    std::vector<std::uint16_t> gate;     // f16 [n, L, J]
    std::vector<std::uint16_t> experts;  // ascending per (iteration, layer)
    std::vector<std::int32_t> token_counts;
    std::vector<std::int64_t> offsets;                      // [n · L + 1]
    std::vector<std::uint16_t> embedding;                   // f16 [n, h] or empty
    std::map<int, std::vector<std::uint16_t>> speculation;  // distance → f16 [n, L, J]
};

class Feed {
  public:
    // Throws CoreError for a size out of range; so do the others for what does not fit together.
    Feed(int layers, int experts, int embedding_width);

    void add(std::int64_t request, RequestRouting routing);
    void remove(std::int64_t request);

    // The next step plays, per row, one iteration of one request.
    void select(std::span<const std::int64_t> requests, std::span<const std::int64_t> iterations,
                std::span<const std::int32_t> tokens, Phase phase);

    std::uint64_t begin_iteration(Core& core, double time_s);
    std::uint64_t gate(Core& core, int layer, double time_s);
    // What `layer` predicts for `target`; every selected request must have rows for that distance.
    std::uint64_t speculation(Core& core, int layer, int target, double time_s);

    int layers() const { return layers_; }
    int experts() const { return experts_; }
    // [L, J]: tokens per expert of the selected step
    std::vector<std::int32_t> token_counts() const;
    // Tells the core what `count` iterations from `step` on will require: of each request its iteration
    // `from`, from + 1, … as long as it lasts.
    std::uint64_t foresee(Core& core, std::int64_t step, std::span<const std::int64_t> requests,
                          std::span<const std::int64_t> from, int count, double time_s);

  private:
    using Shared = std::shared_ptr<const RequestRouting>;
    struct Selected {
        Shared routing;
        std::int64_t iteration = 0;
    };
    void copy_row(const std::vector<std::uint16_t>& values, std::int64_t iteration, int layer);
    void collect_row_counts(int layer);
    const Shared& routing(std::int64_t request) const;

    int layers_, experts_, width_;
    std::unordered_map<std::int64_t, Shared> requests_;
    std::vector<Selected> selected_;
    std::vector<Row> rows_;
    std::vector<std::int32_t> counts_;
    std::vector<std::uint16_t> buffer_;
    std::vector<int> required_, required_counts_;
    std::vector<std::int32_t> row_counts_;
    mutable std::mutex mutex_;
};

}  // namespace finemoe
