// Slots, victims and loads: what each device does next, and what the world reports of it (rules 2, 5, 6, 7).
#include <algorithm>
#include <utility>

#include "core.hpp"

namespace finemoe {

void Core::emit(const Command& command) { emitted_.push_back(command); }

// Ends every event: each idle device gets its next load; then commands are logged and put into their
// outboxes.
std::uint64_t Core::settle(double time_s) {
    if (!aborted_) {
        for (int g = 0; g < config_.devices; ++g) {
            pump(g);
        }
    }
    for (const Command& c : emitted_) {
        if (log_.on) {
            log_.add(
                c, time_s, iteration_,
                c.kind == RecordKind::wait ? std::span<const ExpertId>(chunk_) : std::span<const ExpertId>{},
                c.kind == RecordKind::abort ? abort_reason_ : std::string_view{});
        }
        switch (c.kind) {
            case RecordKind::search:
                search_outbox_.push_back(c);
                break;
            case RecordKind::load:
            case RecordKind::preempt_prefetch:
                device_outbox_[static_cast<std::size_t>(c.device)].push_back(c);
                break;
            case RecordKind::wait:
                break;  // the mask says when the wait is over
            default:
                forward_outbox_.push_back(c);
        }
    }
    emitted_.clear();
    std::uint64_t mask = (forward_outbox_.empty() ? 0 : kForwardPending) |
                         (search_outbox_.empty() ? 0 : kSearchPending) |
                         (chunk_missing_ == 0 ? kChunkReady : 0) | (chunk_.empty() ? 0 : kChunkOpen) |
                         (rest_.empty() ? 0 : kMoreChunks) | (next_layer_open() ? kPrefetchOpen : 0);
    for (std::size_t g = 0; g < device_outbox_.size(); ++g) {
        mask |= device_outbox_[g].empty() ? 0 : std::uint64_t{1} << (kDeviceShift + g);
    }
    return mask;
}

void Core::pump(int g) {
    if (device(g).loading != kNone) {
        return;
    }
    if (!start_demand(g) && !(config_.preempt_scope == PreemptScope::all && demand_anywhere())) {
        start_prefetch(g);
    }
}

bool Core::demand_anywhere() const {
    return std::any_of(devices_.begin(), devices_.end(), [&](const Device& d) {
        return !d.demand.empty() ||
               (d.loading != kNone && experts_[static_cast<std::size_t>(d.loading)].pinned);
    });
}

bool Core::start_demand(int g) {
    Device& d = device(g);
    if (d.demand.empty()) {
        return false;
    }
    const ExpertId e = d.demand.front();
    if (at(e).status == Status::partial) {
        d.demand.erase(d.demand.begin());
        start_load(g, e, LoadKind::demand, at(e).slot, d.partial_bytes, kNone);
        return true;
    }
    ExpertId evicts = config_.layer_quota > 0 ? quota_victim(d, e) : kNone;
    int slot = evicts != kNone ? at(evicts).slot : free_slot(d);
    if (slot < 0) {
        evicts = config_.layer_quota > 0 ? spare_victim(d) : kNone;
        evicts = evicts != kNone ? evicts : victim(d);
        if (evicts != kNone) {
            slot = at(evicts).slot;
        } else if (d.partial != kNone && !at(d.partial).pinned) {
            slot = at(d.partial).slot;
            drop_partial(d);
        } else {
            return true;  // a slot comes free when what is asked to pause has paused
        }
    }
    d.demand.erase(d.demand.begin());
    start_load(g, e, LoadKind::demand, slot, 0, evicts);
    return true;
}

void Core::start_prefetch(int g) {
    Device& d = device(g);
    if (d.partial != kNone) {
        start_load(g, d.partial, LoadKind::prefetch, at(d.partial).slot, d.partial_bytes, kNone);
        return;
    }
    ExpertId chosen = kNone, evicts = kNone;
    if (config_.predictor == PredictorKind::oracle) {
        chosen = oracle_choice(g, evicts);
    } else {
        chosen = next_queued(d);
    }
    if (chosen == kNone) {
        return;
    }
    int slot = free_slot(d);
    if (slot < 0) {
        if (evicts == kNone) {
            evicts = prefetch_victim(d);
        }
        if (evicts == kNone) {
            return;
        }
        slot = at(evicts).slot;
    }
    std::erase_if(d.queue, [&](const QueueEntry& entry) { return entry.expert == chosen; });
    at(chosen).stamp = gates_;
    start_load(g, chosen, LoadKind::prefetch, slot, 0, evicts);
}

// The queue entry with the largest priority; of equals the lowest id.
ExpertId Core::next_queued(const Device& d) const {
    ExpertId chosen = kNone;
    std::pair<double, double> best;
    for (const QueueEntry& entry : d.queue) {
        const int layer = layer_of(entry.expert), ahead = layer - layer_now_;
        const double p = static_cast<double>(entry.p);
        std::pair<double, double> priority{0.0, 0.0};
        switch (config_.priority) {
            case Priority::distance:
                priority.first = p / ahead;
                break;
            case Priority::depth:
                priority.first = p * (1.0 - static_cast<double>(ahead) / config_.layers);
                break;
            case Priority::layer:
                priority = {-static_cast<double>(layer), p};
                break;
        }
        if (chosen == kNone || priority > best || (priority == best && entry.expert < chosen)) {
            best = priority;
            chosen = entry.expert;
        }
    }
    return chosen;
}

// Whether anything is still being prefetched for the next layer.
bool Core::next_layer_open() const {
    if (!config_.prefetch_blocks) {
        return false;
    }
    const auto next = [&](ExpertId e) { return layer_of(e) == layer_now_ + 1; };
    return std::any_of(devices_.begin(), devices_.end(), [&](const Device& d) {
        return d.loading != kNone &&
               (next(d.loading) || std::any_of(d.queue.begin(), d.queue.end(),
                                               [&](const QueueEntry& entry) { return next(entry.expert); }));
    });
}

int Core::free_slot(const Device& d) const {
    const auto it = std::find(d.slots.begin(), d.slots.end(), kNone);
    return it == d.slots.end() ? -1 : static_cast<int>(it - d.slots.begin());
}

void Core::start_load(int g, ExpertId e, LoadKind kind, int slot, std::int64_t offset, ExpertId evicts) {
    Device& d = device(g);
    if (evicts != kNone) {
        evict(evicts);
    }
    if (d.partial == e) {
        d.partial = kNone;
    } else {
        d.loading_queued_in = iteration_;
    }
    d.slots[static_cast<std::size_t>(slot)] = e;
    d.loading = e;
    d.loading_kind = kind;
    d.loading_offset = offset;
    d.asked_to_pause = false;
    at(e).status = Status::loading;
    at(e).slot = slot;
    Command c;
    c.kind = RecordKind::load;
    c.load_kind = kind;
    c.expert = e;
    c.device = g;
    c.slot = slot;
    c.offset = offset;
    c.bytes = config_.expert_bytes - offset;
    c.evicts = evicts;
    emit(c);
}

void Core::evict(ExpertId id) {
    Expert& e = at(id);
    ++counters_.evictions;
    counters_.wasted_bytes += e.unused ? config_.expert_bytes : 0;
    e.unused = false;
    e.privileged = false;
    e.spare = false;
    became_absent(id);
    if (config_.frequency == FrequencyRule::residency) {
        e.frequency = 1.0;
    }
}

void Core::drop_partial(Device& d) {
    Expert& e = at(d.partial);
    counters_.wasted_bytes += d.partial_bytes;
    ++counters_.dropped;
    d.slots[static_cast<std::size_t>(e.slot)] = kNone;
    became_absent(d.partial);
    d.partial = kNone;
}

void Core::demand(ExpertId e) {
    auto& list = device_of(e).demand;
    list.insert(std::lower_bound(list.begin(), list.end(), e), e);
}

ExpertId Core::in_flight(ExpertId e, const char* event) const {
    require(e >= 0 && e < config_.total_experts(), std::string(event) + ": no such expert");
    require(devices_[static_cast<std::size_t>(config_.device_of(e))].loading == e,
            std::string(event) + ": expert " + std::to_string(e) + " is not in flight");
    return e;
}

std::uint64_t Core::loaded(ExpertId id, double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    Device& d = device_of(in_flight(id, "loaded"));
    Record logged = record(RecordKind::loaded, time_s);
    logged.expert = id;
    log_.add(logged);
    Expert& e = at(id);
    const bool prefetch = d.loading_kind == LoadKind::prefetch;
    (prefetch ? counters_.prefetch_loads : counters_.demand_loads) += 1;
    (prefetch ? counters_.prefetch_bytes : counters_.demand_bytes) += config_.expert_bytes - d.loading_offset;
    d.loading = kNone;
    d.asked_to_pause = false;
    e.status = Status::resident;
    e.unused = prefetch && !e.pinned;
    counters_.useful_bytes += prefetch && e.pinned ? config_.expert_bytes : 0;
    e.failures = 0;
    chunk_missing_ -= e.pinned ? 1 : 0;
    return settle(time_s);
}

std::uint64_t Core::loaded_all(std::span<const ExpertId> experts, double time_s) {
    std::uint64_t mask = 0;
    for (const ExpertId e : experts) {
        mask = loaded(e, time_s);
    }
    return mask;
}

std::uint64_t Core::paused(ExpertId id, std::int64_t bytes_done, double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    Device& d = device_of(in_flight(id, "paused"));
    require(d.asked_to_pause, "paused: the load was not asked to pause");
    require(bytes_done >= d.loading_offset && bytes_done < config_.expert_bytes,
            "paused: bytes_done lies outside the load");
    Record logged = record(RecordKind::paused, time_s);
    logged.expert = id;
    logged.bytes = bytes_done;
    log_.add(logged);
    Expert& e = at(id);
    counters_.prefetch_bytes += bytes_done - d.loading_offset;
    d.loading = kNone;
    d.asked_to_pause = false;
    e.status = Status::partial;
    d.partial = id;
    d.partial_bytes = bytes_done;
    if (e.pinned) {  // required since it was asked to pause: what there is of it is useful, the rest is
                     // demanded
        counters_.useful_bytes += bytes_done;
        demand(id);
    } else if (layer_of(id) <= layer_now_ || !open_ || d.loading_queued_in != iteration_) {
        drop_partial(d);
    }
    return settle(time_s);
}

std::uint64_t Core::load_failed(ExpertId id, const std::string& reason, double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    Device& d = device_of(in_flight(id, "load_failed"));
    Record logged = record(RecordKind::load_failed, time_s);
    logged.expert = id;
    log_.add(logged, [&](LogColumns& c) {
        c.reason.values.insert(c.reason.values.end(), reason.begin(), reason.end());
    });
    Expert& e = at(id);
    counters_.wasted_bytes += d.loading_kind == LoadKind::prefetch ? d.loading_offset : 0;
    d.loading = kNone;
    d.asked_to_pause = false;
    d.slots[static_cast<std::size_t>(e.slot)] = kNone;
    became_absent(id);
    if (!e.pinned) {
        ++counters_.failed_prefetches;
    } else if (++e.failures < 3) {
        demand(id);
    } else {
        aborted_ = true;
        Command c;
        c.kind = RecordKind::abort;
        c.expert = id;
        abort_reason_ = reason;
        emit(c);
    }
    return settle(time_s);
}

}  // namespace finemoe
