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

constexpr int kBatch = 2;

CoreConfig small() {
    CoreConfig c;
    c.layers = 6;
    c.experts = 8;
    c.top_k = 2;
    c.devices = 2;
    c.slots_per_device = 6;
    c.expert_bytes = 64;
    c.prefetch_distance = 2;
    c.store_capacity = 12;
    c.embedding_width = 8;
    c.embedding_work = 8;
    return c;
}

CoreConfig maps() {
    CoreConfig c = small();
    c.predictor = PredictorKind::map;
    c.semantic = c.trajectory = true;
    c.eviction = EvictionKind::finemoe;
    return c;
}

std::vector<Scenario> scenarios() {
    std::vector<Scenario> all{{"finemoe", maps()}, {"lru", small()}};
    Scenario s{"finemoe, two slots, all devices pause", maps()};
    s.config.slots_per_device = 2;
    s.config.preempt_scope = PreemptScope::all;
    s.config.rank_prefill_by_tokens = true;
    s.config.frequency = FrequencyRule::residency;
    s.config.frequency_decay = 0.9;
    all.push_back(s);
    s = {"finemoe, one slot, as ready", maps(), true};
    s.config.slots_per_device = 1;
    all.push_back(s);
    s = {"searches block", maps()};
    s.config.search_blocks = true;
    s.config.eviction = EvictionKind::lfu;
    all.push_back(s);
    s = {"lfu, as ready", small(), true};
    s.config.eviction = EvictionKind::lfu;
    all.push_back(s);
    s = {"whole layers", small()};
    s.config.load_shape = LoadShape::layer;
    all.push_back(s);
    s = {"no-offload", small()};
    s.config.slots_per_device = 24;
    s.preload.resize(48);
    std::iota(s.preload.begin(), s.preload.end(), 0);
    all.push_back(s);
    s = {"static", small()};
    s.preload = {0, 3, 6, 9, 17, 20, 41};
    all.push_back(s);
    s = {"lfru", small()};
    s.config.eviction = EvictionKind::lfru;
    all.push_back(s);
    s = {"moe-infinity", small()};
    s.config.predictor = PredictorKind::activation;
    s.config.eviction = EvictionKind::activation;
    s.config.targets = Targets::later;
    s.config.selector = Selector::positive;
    s.config.priority = Priority::depth;
    s.config.popular_start = s.config.search_blocks = true;
    all.push_back(s);
    s = {"hit-count, failing loads", small(), true, 0.1};
    s.config.predictor = PredictorKind::activation;
    s.config.selector = Selector::top_k;
    all.push_back(s);
    s = {"mixtral-offloading", small()};
    s.config.predictor = PredictorKind::speculate;
    s.config.layer_quota = 1;
    s.config.prefetch_blocks = true;
    all.push_back(s);
    s = {"promoe", small(), true};
    s.config.predictor = PredictorKind::speculate;
    s.config.priority = Priority::layer;
    all.push_back(s);
    s = {"speculate", small()};
    s.config.predictor = PredictorKind::speculate;
    all.push_back(s);
    s = {"oracle", small(), true};
    s.config.predictor = PredictorKind::oracle;
    s.config.eviction = EvictionKind::belady;
    all.push_back(s);
    all.push_back({"failing loads", maps(), false, 0.2});
    all.push_back({"failing loads, as ready", maps(), true, 0.2});
    all.push_back({"a lost expert", maps(), false, 0.0, 11});
    return all;
}

// What one layer of one iteration requires. Requests stay with their topic for some iterations.
struct Routing {
    std::vector<std::uint16_t> probabilities;  // f16 [kBatch, J]
    std::vector<int> experts, token_counts;
    std::vector<std::int32_t> row_counts;  // [kBatch, J]
};

Routing route(const CoreConfig& c, std::uint64_t seed, std::int64_t iteration, int layer, bool prefill) {
    std::mt19937_64 random(seed * 1000003 + static_cast<std::uint64_t>(iteration * c.layers + layer));
    Routing routing;
    std::vector<int> tokens(static_cast<std::size_t>(c.experts));
    for (int row = 0; row < kBatch; ++row) {
        const auto topic = static_cast<std::uint64_t>(iteration / 5 + 17 * row);
        std::vector<float> p(static_cast<std::size_t>(c.experts));
        for (float& value : p) {
            value = std::uniform_real_distribution(0.05F, 1.0F)(random);
        }
        p[(topic * 5 + static_cast<std::uint64_t>(layer)) % p.size()] += 1.0F;
        const float sum = std::accumulate(p.begin(), p.end(), 0.0F);
        std::vector<int> order(p.size());
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int a, int b) {
            return p[static_cast<std::size_t>(a)] > p[static_cast<std::size_t>(b)];
        });
        std::vector<std::int32_t> of_row(p.size());
        for (int i = 0; i < (prefill ? 3 * c.top_k : c.top_k); ++i) {
            ++tokens[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])];
            ++of_row[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])];
        }
        routing.row_counts.insert(routing.row_counts.end(), of_row.begin(), of_row.end());
        for (const float value : p) {
            routing.probabilities.push_back(float_to_half(value / sum));
        }
    }
    for (int j = 0; j < c.experts; ++j) {
        if (tokens[static_cast<std::size_t>(j)] > 0) {
            routing.experts.push_back(j);
            routing.token_counts.push_back(tokens[static_cast<std::size_t>(j)]);
        }
    }
    return routing;
}

class ForwardPass {
  public:
    ForwardPass(World& world, const Scenario& scenario, std::uint64_t seed)
        : world_(world), scenario_(scenario), c_(scenario.config), seed_(seed), random_(seed) {}

    // False where the core gave up an expert, as one scenario wants it to.
    bool iterate(std::int64_t iteration) {
        const bool prefill = iteration % 7 == 0;
        if (c_.predictor == PredictorKind::oracle) {
            foresee(iteration);
        }
        std::vector<std::uint16_t> embeddings;
        std::vector<Row> rows;
        for (int row = 0; row < kBatch; ++row) {
            rows.push_back(
                {row, prefill ? Phase::prefill : Phase::decode, prefill ? 3 : 1, random_() % 8 != 0});
            for (int i = 0; i < c_.embedding_width; ++i) {
                embeddings.push_back(float_to_half(std::uniform_real_distribution(-1.0F, 1.0F)(random_)));
            }
        }
        if (!act([&] { return world_.core.begin_iteration(rows, embeddings); })) {
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
        const bool last = iteration % 7 == 6;
        return act([&] {
            return world_.core.end_iteration(
                0.0, last ? std::vector<std::int64_t>{0, 1} : std::vector<std::int64_t>{});
        });
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

    void foresee(std::int64_t iteration) {
        std::vector<std::vector<ExpertId>> required;
        for (std::int64_t i = iteration; i < iteration + 2; ++i) {
            for (int layer = 0; layer < c_.layers; ++layer) {
                required.emplace_back();
                for (const int j : route(c_, seed_, i, layer, i % 7 == 0).experts) {
                    required.back().push_back(layer * c_.experts + j);
                }
            }
        }
        act([&] { return world_.core.foresight(iteration * c_.layers, required); });
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
