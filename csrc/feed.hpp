// Recorded routing, played into the core: holds whole requests and forms the rows and unions of one step.
// The core sees a layer only when its gate is played.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "core.hpp"

namespace finemoe {

// One request's routing (traces/routing.py: RequestRouting), not owned.
struct RequestRoutingView {
    std::int64_t iterations = 0;
    std::span<const std::uint16_t> gate;     // f16 [n, L, J]
    std::span<const std::uint16_t> experts;  // ascending per (iteration, layer)
    std::span<const std::int32_t> token_counts;
    std::span<const std::int64_t> offsets;     // [n · L + 1]
    std::span<const std::uint16_t> embedding;  // f16 [n, h] or empty
    std::shared_ptr<const void> owner;
};

class Feed {
  public:
    Feed(int layers, int experts, int embedding_width);

    // Throws CoreError where the arrays do not fit together.
    void add(std::int64_t request, RequestRoutingView view);
    void remove(std::int64_t request);

    // The next step plays, per row, one iteration of one request.
    void select(std::span<const std::int64_t> requests, std::span<const std::int64_t> iterations,
                std::span<const std::int32_t> tokens, Phase phase);

    std::uint64_t begin_iteration(Core& core, double time_s);
    std::uint64_t gate(Core& core, int layer, double time_s);

    // [L, J]: tokens per expert of the selected step
    const std::vector<std::int32_t>& token_counts() const { return counts_; }
    // Tells the core what `count` iterations from `step` on will require: of each request its iteration
    // `from`, from + 1, … as long as it lasts.
    std::uint64_t foresee(Core& core, std::int64_t step, std::span<const std::int64_t> requests,
                          std::span<const std::int64_t> from, int count, double time_s);

  private:
    struct Selected {
        const RequestRoutingView* view = nullptr;
        std::int64_t iteration = 0;
    };
    const RequestRoutingView& routing(std::int64_t request) const;

    int layers_, experts_, width_;
    std::unordered_map<std::int64_t, RequestRoutingView> requests_;
    std::vector<Selected> selected_;
    std::vector<Row> rows_;
    std::vector<std::int32_t> counts_;
    std::vector<std::uint16_t> buffer_;
    std::vector<int> required_, required_counts_;
};

}  // namespace finemoe
