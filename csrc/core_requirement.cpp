// A layer's requirement: looked up whole against one cache state, then served in chunks that fit (rules 1, 3,
// 4, 6).
#include <algorithm>

#include "core.hpp"

namespace finemoe {

void Core::require_experts(std::span<const int> activated) {
    const ExpertId base = layer_now_ * config_.experts;
    rest_.clear();
    if (config_.load_shape == LoadShape::layer) {
        for (int j = 0; j < config_.experts; ++j) {
            rest_.push_back(base + j);
        }
    } else {
        for (const int j : activated) {
            rest_.push_back(base + j);
        }
    }
    count_hits(activated);
    for (const ExpertId id : rest_) {
        Expert& e = at(id);
        e.required = true;
        e.spare = false;
        e.frequency += 1.0;
        e.stamp = gates_;
        if (e.status == Status::resident) {
            e.pinned = true;
            counters_.useful_bytes += e.unused ? config_.expert_bytes : 0;
            e.unused = false;
            if (config_.eviction == EvictionKind::lfru) {
                privilege(id);
            }
        } else if (e.status == Status::loading) {  // late: it keeps loading and is waited for
            e.pinned = true;
        }
    }
    purge_queues();
    form_chunk();
}

void Core::count_hits(std::span<const int> activated) {
    const auto cell = static_cast<std::size_t>((phase_ == Phase::prefill ? 0 : config_.layers) + layer_now_);
    std::int64_t hits = 0, late = 0;
    for (const int j : activated) {
        const Status status = at(layer_now_ * config_.experts + j).status;
        hits += status == Status::resident ? 1 : 0;
        late += status == Status::loading ? 1 : 0;
    }
    const auto count = static_cast<std::int64_t>(activated.size());
    layer_counts_.activated[cell] += count;
    layer_counts_.hits[cell] += hits;
    layer_counts_.late[cell] += late;
    activated_ += count;
    hits_ += hits;
    late_ += late;
}

// Entries of this layer and before have had their chance; the required ones are demanded by the chunk.
void Core::purge_queues() {
    for (Device& d : devices_) {
        const auto past = std::remove_if(d.queue.begin(), d.queue.end(), [&](const QueueEntry& entry) {
            if (layer_of(entry.expert) > layer_now_) {
                return false;
            }
            counters_.dropped += at(entry.expert).required ? 0 : 1;
            return true;
        });
        d.queue.erase(past, d.queue.end());
    }
}

// The next members of `rest` that fit beside what is pinned, all devices together.
void Core::form_chunk() {
    chunk_.clear();
    chunk_missing_ = 0;
    std::vector<std::size_t> room(devices_.size());
    for (std::size_t g = 0; g < devices_.size(); ++g) {
        room[g] = devices_[g].slots.size() - devices_[g].kept;
    }
    for (const ExpertId e : rest_) {
        if (at(e).pinned && !at(e).kept) {
            --room[static_cast<std::size_t>(config_.device_of(e))];
        }
    }
    std::vector<ExpertId> later;
    bool any_demand = false;
    for (const ExpertId e : rest_) {
        auto& left = room[static_cast<std::size_t>(config_.device_of(e))];
        if (!at(e).pinned && left == 0) {
            later.push_back(e);
            continue;
        }
        left -= at(e).pinned ? 0U : 1U;
        at(e).pinned = true;
        chunk_.push_back(e);
        if (at(e).status != Status::resident) {
            ++chunk_missing_;
            if (at(e).status != Status::loading) {
                demand(e);
                any_demand = true;
            }
        }
    }
    rest_ = std::move(later);
    for (int g = 0; g < config_.devices; ++g) {
        Device& d = device(g);
        const bool wanted = config_.preempt_scope == PreemptScope::all ? any_demand : !d.demand.empty();
        if (wanted && d.loading != kNone && !d.asked_to_pause && !at(d.loading).pinned) {
            d.asked_to_pause = true;
            ++counters_.preemptions;
            Command c;
            c.kind = RecordKind::preempt_prefetch;
            c.device = g;
            emit(c);
        }
    }
    Command wait;
    wait.kind = RecordKind::wait;
    wait.layer = layer_now_;
    emit(wait);
}

void Core::finish_chunk_member(ExpertId e) {
    at(e).pinned = false;
    at(e).required = false;
    chunk_.erase(std::find(chunk_.begin(), chunk_.end(), e));
}

}  // namespace finemoe
