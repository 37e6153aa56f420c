// The core between threads: a forward pass against copiers, a search worker and an onlooker, in every kind of
// system. Ends with 0 when every invariant held. Usage: core_stress [ITERATIONS] [SEED]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "f16.hpp"
#include "stress_world.hpp"

namespace finemoe::stress {

namespace {

class ForwardPass {
  public:
    ForwardPass(World& world, const Scenario& scenario, std::uint64_t seed)
        : world_(world), scenario_(scenario), c_(scenario.config), seed_(seed), random_(seed) {}

    // False where the core gave up an expert, as one scenario wants it to.
    bool iterate(std::int64_t iteration) {
        const bool prefill = is_prefill(iteration);
        if (c_.predictor == PredictorKind::oracle) {
            act([&] { return world_.core.foresight(iteration * c_.layers, foreseen(c_, seed_, iteration)); });
        }
        const Opening opening = open_iteration(c_, iteration, random_);
        if (!act([&] { return world_.core.begin_iteration(opening.rows, opening.embeddings); })) {
            return false;
        }
        for (int layer = 0; layer < c_.layers; ++layer) {
            const Routing r = route(c_, seed_, iteration, layer, prefill);
            dawdle(random_);
            const auto row_counts = c_.row_counts() ? r.row_counts : std::vector<std::int32_t>{};
            if (!act([&] {
                    return world_.core.gate(layer, r.probabilities, r.experts, r.token_counts, 0.0,
                                            row_counts);
                })) {
                return false;
            }
            activated_ += static_cast<std::int64_t>(r.experts.size());
            left_ =
                c_.load_shape == LoadShape::layer ? static_cast<std::size_t>(c_.experts) : r.experts.size();
            if (!compute(layer)) {
                return false;
            }
        }
        return act([&] { return world_.core.end_iteration(0.0, finished(iteration)); });
    }

    std::int64_t activated() const { return activated_; }

  private:
    // Runs an event and takes in what the core has for the forward pass.
    template <typename Event>
    bool act(Event event) {
        try {
            mask_ = event();
        } catch (const CoreError& error) {
            world_.check(scenario_.lost_expert != kNone, error.what());
            return false;
        }
        world_.deliver(mask_);
        return take();
    }

    bool take() {
        std::vector<Command> commands;
        world_.core.take_forward(commands);
        for (const Command& command : commands) {
            if (command.kind == RecordKind::abort) {
                world_.check(command.expert == scenario_.lost_expert,
                             "Abort of an expert that can be loaded");
                return false;
            }
            while (!world_.search_is_done(command.ticket)) {
                std::this_thread::yield();
            }
        }
        return true;
    }

    // The layer's chunks, whole or as their experts arrive.
    bool compute(int layer) {
        if (c_.predictor == PredictorKind::speculate && layer + 1 < c_.layers) {
            const Routing guess = route(c_, seed_ + 1, 0, layer + 1, false);
            if (!act([&] { return world_.core.speculation(layer, layer + 1, guess.probabilities); })) {
                return false;
            }
        }
        while ((mask_ & kChunkOpen) != 0) {
            std::vector<ExpertId> ready = world_.core.chunk_ready();
            // The masks of other threads' events may be about an earlier chunk: ask the core instead.
            const bool more = (mask_ & kMoreChunks) != 0;
            const bool whole = (mask_ & kChunkReady) != 0 || (!more && ready.size() == left_);
            if (!whole && (ready.empty() || !(scenario_.as_ready || more))) {
                while (!world_.forward.take()) {
                    std::this_thread::yield();
                }
                if (!take()) {
                    return false;
                }
                continue;
            }
            if (scenario_.as_ready && random_() % 2 == 0) {
                ready.resize(1 + random_() % ready.size());
            }
            for (int pass = 0; pass < 2; ++pass) {
                for (const ExpertId e : ready) {
                    world_.check(e / c_.experts == layer, "a chunk holds an expert of another layer");
                    world_.read_weights(e);
                }
                dawdle(random_);
            }
            left_ -= ready.size();
            const bool rest = whole && !scenario_.as_ready;
            if (!act([&] {
                    return rest ? world_.core.computed_chunk() : world_.core.computed(layer, ready);
                })) {
                return false;
            }
        }
        return true;
    }

    World& world_;
    const Scenario& scenario_;
    const CoreConfig& c_;
    const std::uint64_t seed_;
    std::mt19937_64 random_;
    std::uint64_t mask_ = 0;  // of the forward pass's own last event
    std::size_t left_ = 0;    // of the layer's requirement, to be computed
    std::int64_t activated_ = 0;
};

void run(const Scenario& scenario, std::int64_t iterations, std::uint64_t seed) {
    World world(scenario, seed);
    ForwardPass forward(world, scenario, seed);
    bool running = true;
    for (std::int64_t i = 0; i < iterations && running; ++i) {
        running = forward.iterate(i);
    }
    world.check(running == (scenario.lost_expert == kNone), "the run ended too early or too late");
    if (!running) {
        world.close();
        return;
    }
    world.finish();
    world.check(world.core.totals().activated == forward.activated(), "activated experts are miscounted");
    const Counters n = world.core.counters();
    std::printf("%-40s demand %6lld  prefetch %6lld  preempted %5lld  searches %5lld  late %5lld\n",
                scenario.name.c_str(), static_cast<long long>(n.demand_loads),
                static_cast<long long>(n.prefetch_loads), static_cast<long long>(n.preemptions),
                static_cast<long long>(n.searches), static_cast<long long>(n.late_searches));
}

}  // namespace

}  // namespace finemoe::stress

int main(int argc, char** argv) {
    const std::int64_t iterations = argc > 1 ? std::atoll(argv[1]) : 300;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const auto all = finemoe::stress::scenarios();
    for (const auto& scenario : all) {
        finemoe::stress::run(scenario, iterations, seed);
    }
    std::printf("core_stress: %zu scenarios, %lld iterations each, all invariants held\n", all.size(),
                static_cast<long long>(iterations));
    return 0;
}
