// Who may be evicted: one cache for all layers, or a quota of experts for each (rule 7).
#include <algorithm>
#include <utility>

#include "core.hpp"

namespace finemoe {

EvictionView Core::view(ExpertId id) const {
    const Expert& e = at(id);
    return {id,           e.p,         e.frequency,       e.stamp,
            layer_of(id), layer_now_,  config_.layers,    config_.experts,
            step(),       &foresight_, activation_.get(), user_.get(),
            e.privileged};
}

template <typename Allowed>
ExpertId Core::victim_if(const Device& d, Allowed&& allowed) {
    ExpertId best = kNone;
    EvictionKey best_key;
    for (const ExpertId id : d.slots) {
        if (id == kNone) {
            continue;
        }
        const Expert& e = at(id);
        if (e.status != Status::resident || e.pinned || e.kept || !allowed(id)) {
            continue;
        }
        const EvictionKey key = key_of(id);
        if (best == kNone || key < best_key) {
            best = id;
            best_key = key;
        }
    }
    return best;
}

ExpertId Core::victim(const Device& d) {
    return victim_if(d, [](ExpertId) { return true; });
}

// A layer that has its quota gives one of its own for what it demands.
ExpertId Core::quota_victim(const Device& d, ExpertId wanted) {
    const int layer = layer_of(wanted);
    if (settled_of(layer) < config_.layer_quota) {
        return kNone;
    }
    return victim_if(d, [&](ExpertId e) { return layer_of(e) == layer && settled(e); });
}

// What nobody would miss: prefetches that were not used when they should have been, and what is beyond its
// layer's quota.
ExpertId Core::spare_victim(const Device& d) {
    const std::int64_t began = iteration_ * config_.layers;  // gates before this iteration's first
    return victim_if(d, [&](ExpertId id) {
        const Expert& e = at(id);
        return e.spare || (e.unused && (layer_of(id) <= layer_now_ || e.stamp < began));
    });
}

// With a quota a prefetch takes the place of a spare expert, never of anything else.
ExpertId Core::prefetch_victim(const Device& d) {
    return config_.layer_quota > 0 ? spare_victim(d) : victim(d);
}

// A key of the user's that raises ends the run.
EvictionKey Core::key_of(ExpertId e) {
    try {
        return eviction_->key(view(e));
    } catch (...) {
        aborted_ = true;
        throw;
    }
}

// Half of a device's slots, at most, hold experts that were hit there.
void Core::privilege(ExpertId id) {
    const Device& d = device_of(id);
    const std::size_t most = d.slots.size() / 2;
    at(id).privileged = most > 0;
    std::size_t privileged = 0;
    ExpertId oldest = kNone;
    for (const ExpertId e : d.slots) {
        if (e == kNone || !at(e).privileged) {
            continue;
        }
        ++privileged;
        if (e != id && (oldest == kNone || std::pair(at(e).stamp, e) < std::pair(at(oldest).stamp, oldest))) {
            oldest = e;
        }
    }
    if (privileged > most) {
        at(oldest).privileged = false;
    }
}

// With a quota: used, or demanded while it loads; prefetches that nobody required yet are staged beside
// these.
bool Core::settled(ExpertId id) const {
    const Expert& e = at(id);
    return (e.status == Status::resident && !e.unused && !e.spare) ||
           (e.status == Status::loading && e.pinned);
}

int Core::settled_of(int layer) const {
    int count = 0;
    for (ExpertId e = layer * config_.experts; e < (layer + 1) * config_.experts; ++e) {
        count += settled(e) ? 1 : 0;
    }
    return count;
}

// The layer is done: it keeps as many experts as its quota allows, the others stay until their slots are
// wanted.
void Core::trim_layer() {
    for (int over = settled_of(layer_now_) - config_.layer_quota; over > 0; --over) {
        ExpertId best = kNone;
        for (const Device& d : devices_) {
            const ExpertId id =
                victim_if(d, [&](ExpertId e) { return layer_of(e) == layer_now_ && settled(e); });
            if (id != kNone && (best == kNone || key_of(id) < key_of(best))) {
                best = id;
            }
        }
        if (best == kNone) {
            return;
        }
        at(best).spare = true;
    }
}

}  // namespace finemoe
