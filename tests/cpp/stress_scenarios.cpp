#include "stress_scenarios.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "f16.hpp"

namespace finemoe::stress {

namespace {

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

}  // namespace

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

bool is_prefill(std::int64_t iteration) { return iteration % 7 == 0; }

std::vector<std::int64_t> finished(std::int64_t iteration) {
    return iteration % 7 == 6 ? std::vector<std::int64_t>{0, 1} : std::vector<std::int64_t>{};
}

Opening open_iteration(const CoreConfig& c, std::int64_t iteration, std::mt19937_64& random) {
    const bool prefill = is_prefill(iteration);
    Opening opening;
    for (int row = 0; row < kBatch; ++row) {
        opening.rows.push_back(
            {row, prefill ? Phase::prefill : Phase::decode, prefill ? 3 : 1, random() % 8 != 0});
        for (int i = 0; i < c.embedding_width; ++i) {
            opening.embeddings.push_back(float_to_half(std::uniform_real_distribution(-1.0F, 1.0F)(random)));
        }
    }
    return opening;
}

std::vector<std::vector<ExpertId>> foreseen(const CoreConfig& c, std::uint64_t seed, std::int64_t iteration) {
    std::vector<std::vector<ExpertId>> required;
    for (std::int64_t i = iteration; i < iteration + 2; ++i) {
        for (int layer = 0; layer < c.layers; ++layer) {
            required.emplace_back();
            for (const int j : route(c, seed, i, layer, is_prefill(i)).experts) {
                required.back().push_back(layer * c.experts + j);
            }
        }
    }
    return required;
}

void fail(const std::string& scenario, const std::string& problem) {
    std::fprintf(stderr, "stress: %s: %s\n", scenario.c_str(), problem.c_str());
    std::_Exit(1);
}

void dawdle(std::mt19937_64& random) {
    const auto choice = random() % 16;
    if (choice == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
    } else if (choice < 6) {
        std::this_thread::yield();
    }
}

}  // namespace finemoe::stress
