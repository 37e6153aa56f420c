// Events: what each may be, and what it changes. Validation comes first, so that a rejected event changes
// nothing.
#include <algorithm>
#include <set>
#include <utility>

#include "core.hpp"
#include "f16.hpp"

namespace finemoe {

std::uint64_t Core::seed_store(const StoreContents& s, double time_s) {
    const std::scoped_lock locks(work_mutex_, mutex_);
    require_running();
    const auto width = static_cast<std::size_t>(config_.embedding_width);
    const auto map_size = static_cast<std::size_t>(config_.total_experts());
    const std::size_t n = s.written.size();
    require(iteration_ < 0 && stored_ == 0, "seed_store comes once, before the first iteration");
    require(n <= static_cast<std::size_t>(config_.store_capacity),
            "seed_store: more maps than the store holds");
    require(s.maps.size() == n * map_size, "seed_store: maps are not [n, L, J]");
    require(s.embeddings.empty() || s.embeddings.size() == n * width,
            "seed_store: embeddings are not [n, h]");
    check_probabilities(s.maps, s.maps.size());
    require(std::all_of(s.embeddings.begin(), s.embeddings.end(),
                        [](std::uint16_t h) { return (h & 0x7FFFU) <= kHalfOne; }),
            "seed_store: a unit embedding has a value beyond 1");
    std::vector<std::int64_t> ages = s.written;
    std::sort(ages.begin(), ages.end());
    require(ages.empty() || (ages.front() >= 0 && ages.back() < std::int64_t{1} << 62 &&
                             std::adjacent_find(ages.begin(), ages.end()) == ages.end()),
            "seed_store: ages are negative or not all different");
    std::vector<float> map(map_size), unit(width);
    for (std::size_t i = 0; i < n; ++i) {
        std::transform(s.maps.begin() + static_cast<std::ptrdiff_t>(i * map_size),
                       s.maps.begin() + static_cast<std::ptrdiff_t>((i + 1) * map_size), map.begin(),
                       half_to_float);
        std::fill(unit.begin(), unit.end(), 0.0F);
        if (!s.embeddings.empty()) {
            std::transform(s.embeddings.begin() + static_cast<std::ptrdiff_t>(i * width),
                           s.embeddings.begin() + static_cast<std::ptrdiff_t>((i + 1) * width), unit.begin(),
                           half_to_float);
        }
        engine_->store().restore(static_cast<int>(i), map.data(), unit, s.written[i]);
    }
    stored_ = static_cast<int>(n);
    log_.add(record(RecordKind::seed_store, time_s), [&](LogColumns& c) {
        c.requests.values.insert(c.requests.values.end(), s.written.begin(), s.written.end());
        c.values.values.insert(c.values.values.end(), s.maps.begin(), s.maps.end());
        c.values.values.insert(c.values.values.end(), s.embeddings.begin(), s.embeddings.end());
    });
    return settle(time_s);
}

std::uint64_t Core::preload(std::span<const ExpertId> experts, double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    require(iteration_ < 0 && !preloaded_, "preload comes once, before the first iteration");
    std::vector<std::size_t> count(devices_.size());
    ExpertId last = kNone;
    for (const ExpertId e : experts) {
        require(e > last && e < config_.total_experts(), "preload: experts are not ascending ids");
        last = e;
        ++count[static_cast<std::size_t>(config_.device_of(e))];
    }
    for (int g = 0; g < config_.devices; ++g) {
        const auto owned = static_cast<std::size_t>(config_.owned(g));
        const std::size_t wanted = count[static_cast<std::size_t>(g)], slots = device(g).slots.size();
        require(wanted < slots || (wanted == slots && wanted == owned),
                "preload: device " + std::to_string(g) + " has no slot left for the experts not preloaded");
    }
    preloaded_ = true;
    for (const ExpertId e : experts) {
        Device& d = device_of(e);
        at(e).slot = static_cast<int>(d.kept);
        at(e).status = Status::resident;
        at(e).kept = true;
        d.slots[d.kept++] = e;
    }
    log_.add(record(RecordKind::preload, time_s), [&](LogColumns& c) {
        c.experts.values.insert(c.experts.values.end(), experts.begin(), experts.end());
    });
    return settle(time_s);
}

std::uint64_t Core::begin_iteration(std::vector<Row> rows, std::span<const std::uint16_t> embeddings,
                                    double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    require(!open_, "begin_iteration: the previous iteration has not ended");
    require(!rows.empty(), "begin_iteration: no rows");
    const auto width = static_cast<std::size_t>(config_.embedding_width);
    require(embeddings.empty() || embeddings.size() == rows.size() * width,
            "begin_iteration: embeddings are not [rows, embedding_width]");
    require(std::all_of(embeddings.begin(), embeddings.end(), half_is_finite),
            "begin_iteration: embedding not finite");
    for (const Row& row : rows) {
        require(row.tokens > 0, "begin_iteration: a row has no tokens");
        require(row.phase == rows.front().phase, "begin_iteration: a step is either prefills or decodes");
    }
    ++iteration_;
    layer_now_ = -1;
    open_ = true;
    phase_ = rows.front().phase;
    if (iteration_ == log_iterations_) {
        log_.on = false;  // events from here on are not logged; what came before replays by itself
    }
    auto fresh = std::make_shared<IterationRows>();
    fresh->index = iteration_;
    if (config_.predictor == PredictorKind::map || config_.predictor == PredictorKind::activation) {
        fresh->gates.resize(static_cast<std::size_t>(config_.total_experts()) * rows.size());
    }
    fresh->units.assign(embeddings.size(), 0.0F);
    int embedded = 0;
    const Record logged = record(RecordKind::begin_iteration, time_s);
    const std::vector<Row> as_given = log_.on ? rows : std::vector<Row>{};
    for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].has_embedding =
            rows[r].has_embedding && !embeddings.empty() &&
            unit_embedding(embeddings.subspan(r * width, width), fresh->units.data() + r * width);
        embedded += rows[r].has_embedding ? 1 : 0;
    }
    fresh->rows = std::move(rows);
    rows_ = std::move(fresh);
    log_.add(logged, [&](LogColumns& c) {
        for (const Row& row : as_given) {
            c.requests.values.push_back(row.request);
            c.tokens.values.push_back(row.tokens);
            c.phases.values.push_back(
                static_cast<std::uint8_t>(static_cast<int>(row.phase) + (row.has_embedding ? 2 : 0)));
        }
        c.values.values.insert(c.values.values.end(), embeddings.begin(), embeddings.end());
    });
    if (config_.predictor == PredictorKind::map && config_.semantic && stored_ > 0 && embedded > 0) {
        issue_search(SearchKind::semantic, -1, std::min(config_.prefetch_distance, config_.layers) - 1, -1,
                     static_cast<std::int64_t>(embedded) * stored_ * config_.embedding_work);
    }
    if (config_.popular_start) {
        queue_popular();
    }
    if (config_.predictor == PredictorKind::plugin) {
        std::vector<std::uint16_t> units(embedded > 0 ? rows_->units.size() : 0);
        std::transform(rows_->units.begin(), rows_->units.begin() + static_cast<std::ptrdiff_t>(units.size()),
                       units.begin(), float_to_half);
        ask_user([&] { return user_->begin_iteration(rows_->rows, units); });
    }
    return settle(time_s);
}

std::uint64_t Core::gate(int layer, std::span<const std::uint16_t> probabilities,
                         std::span<const int> experts, std::span<const int> token_counts, double time_s,
                         std::span<const std::int32_t> row_counts) {
    const std::scoped_lock lock(mutex_);
    require_running();
    require(open_ && layer == layer_now_ + 1 && layer < config_.layers, "gate: not the next layer");
    require(chunk_.empty() && rest_.empty(), "gate: the previous layer is not computed");
    require(!experts.empty() && experts.size() == token_counts.size(),
            "gate: one token count per expert, at least one");
    const int rows = rows_->batch();
    check_probabilities(probabilities,
                        static_cast<std::size_t>(rows) * static_cast<std::size_t>(config_.experts));
    for (std::size_t i = 0; i < experts.size(); ++i) {
        require(experts[i] >= 0 && experts[i] < config_.experts && (i == 0 || experts[i] > experts[i - 1]),
                "gate: experts are not ascending numbers below J");
        require(token_counts[i] > 0, "gate: an expert without tokens");
    }
    check_row_counts(row_counts, experts, token_counts);
    layer_now_ = layer;
    ++gates_;
    foresight_.advance(step());
    if (config_.predictor == PredictorKind::map) {
        std::transform(probabilities.begin(), probabilities.end(),
                       rows_->gates.begin() + static_cast<std::ptrdiff_t>(layer) * rows * config_.experts,
                       half_to_float);
    }
    if (activation_ != nullptr) {
        count_tokens(row_counts);
    }
    log_.add(record(RecordKind::gate, time_s), [&](LogColumns& c) {
        c.experts.values.insert(c.experts.values.end(), experts.begin(), experts.end());
        c.token_counts.values.insert(c.token_counts.values.end(), token_counts.begin(), token_counts.end());
        c.token_counts.values.insert(c.token_counts.values.end(), row_counts.begin(), row_counts.end());
        c.values.values.insert(c.values.values.end(), probabilities.begin(), probabilities.end());
    });
    require_experts(experts);
    const bool later = config_.targets == Targets::later;
    const bool searches = (config_.predictor == PredictorKind::map && config_.trajectory) ||
                          config_.predictor == PredictorKind::activation;
    if (searches && stored_ > 0 && layer + (later ? 1 : config_.prefetch_distance) < config_.layers) {
        issue_search(SearchKind::trajectory, layer,
                     later ? config_.layers - 1 : layer + config_.prefetch_distance, -1,
                     static_cast<std::int64_t>(rows) * stored_ * config_.experts);
    }
    if (config_.predictor == PredictorKind::plugin) {
        ask_user([&] { return user_->gate(layer, probabilities, row_counts); });
    }
    return settle(time_s);
}

std::uint64_t Core::computed(int layer, std::span<const ExpertId> experts, double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    require(open_ && layer == layer_now_, "computed: not the current layer");
    std::vector<ExpertId> sorted(experts.begin(), experts.end());
    std::sort(sorted.begin(), sorted.end());
    require(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "computed: an expert twice");
    for (const ExpertId e : experts) {
        require(
            std::find(chunk_.begin(), chunk_.end(), e) != chunk_.end() && at(e).status == Status::resident,
            "computed: expert " + std::to_string(e) + " is not a resident, uncomputed member of the chunk");
    }
    Record logged = record(RecordKind::computed, time_s);
    logged.layer = layer;
    log_.add(logged, [&](LogColumns& c) {
        c.experts.values.insert(c.experts.values.end(), experts.begin(), experts.end());
    });
    for (const ExpertId e : experts) {
        finish_chunk_member(e);
    }
    if (chunk_.empty() && !rest_.empty()) {
        form_chunk();
    } else if (chunk_.empty() && config_.layer_quota > 0) {
        trim_layer();
    }
    return settle(time_s);
}

std::uint64_t Core::computed_chunk(double time_s) {
    std::vector<ExpertId> chunk;
    int layer = -1;
    {
        const std::scoped_lock lock(mutex_);
        chunk = chunk_;
        layer = layer_now_;
    }
    return computed(layer, chunk, time_s);
}

std::uint64_t Core::end_iteration(double time_s, const std::vector<std::int64_t>& finished) {
    const std::scoped_lock lock(mutex_);
    require_running();
    require(open_ && layer_now_ == config_.layers - 1 && chunk_.empty() && rest_.empty(),
            "end_iteration: the last layer is not computed");
    const std::set<std::int64_t> done(finished.begin(), finished.end());
    require(done.size() == finished.size(), "end_iteration: a request finished twice");
    log_.add(record(RecordKind::end_iteration, time_s), [&](LogColumns& c) {
        c.requests.values.insert(c.requests.values.end(), finished.begin(), finished.end());
    });
    open_ = false;
    for (Device& d : devices_) {
        counters_.dropped += static_cast<std::int64_t>(d.queue.size());
        d.queue.clear();
    }
    for (Ticket& ticket : tickets_) {
        if (ticket.request.kind != SearchKind::update && !ticket.abandoned) {
            ticket.abandoned = true;
            ++counters_.late_searches;
        }
    }
    if (config_.frequency_decay < 1.0) {
        for (Expert& e : experts_) {
            e.frequency *= config_.frequency_decay;
        }
    }
    for (int r = 0; r < rows_->batch(); ++r) {
        const Row& row = rows_->rows[static_cast<std::size_t>(r)];
        const bool map = config_.predictor == PredictorKind::map;
        if (map || (config_.predictor == PredictorKind::activation && done.contains(row.request))) {
            const std::int64_t embedding_work = map && row.has_embedding ? config_.embedding_work : 0;
            issue_search(SearchKind::update, config_.layers - 1, -1, r,
                         stored_ * (embedding_work + config_.total_experts()));
        }
    }
    for (const std::int64_t request : finished) {
        if (activation_ != nullptr) {
            activation_->forget(request);
        }
    }
    if (config_.predictor == PredictorKind::plugin) {
        ask_user([&] {
            user_->end_iteration(finished);
            return UserPredictions{};
        });
    }
    return settle(time_s);
}

std::uint64_t Core::foresight(std::int64_t step, const std::vector<std::vector<ExpertId>>& required,
                              double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    require(config_.predictor == PredictorKind::oracle || config_.eviction == EvictionKind::belady,
            "foresight: only belady and oracle may know the future");
    require(step >= 0 && step > this->step(), "foresight: the step is past");
    require(step <= std::max(foresight_.end(), this->step() + 1),
            "foresight: steps are missing before this one");
    for (const auto& ids : required) {
        for (const ExpertId e : ids) {
            require(e >= 0 && e < config_.total_experts(), "foresight: no such expert");
        }
    }
    Record logged = record(RecordKind::foresight, time_s);
    logged.ticket = step;
    log_.add(logged, [&](LogColumns& c) {
        for (const auto& ids : required) {
            c.experts.values.insert(c.experts.values.end(), ids.begin(), ids.end());
            c.token_counts.values.push_back(static_cast<std::int32_t>(ids.size()));
        }
    });
    foresight_.tell(step, required);
    for (Device& d : devices_) {
        d.oracle_from = std::min(d.oracle_from, step);
    }
    return settle(time_s);
}

}  // namespace finemoe
