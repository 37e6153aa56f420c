// The oracle's prefetch: the next expert that will be missing, as soon as a worse one may leave for it.
#include <algorithm>

#include "core.hpp"

namespace finemoe {

ExpertId Core::oracle_choice(int g, ExpertId& evicts) const {
    const Device& d = devices_[static_cast<std::size_t>(g)];
    const std::int64_t now = step();
    ExpertId wanted = kNone;
    std::int64_t needed = std::max(now + 1, foresight_.first());
    for (; needed < foresight_.end() && wanted == kNone; ++needed) {
        for (const ExpertId e : foresight_.required(needed)) {
            if (config_.device_of(e) == g && experts_[static_cast<std::size_t>(e)].status == Status::absent &&
                (wanted == kNone || e < wanted)) {
                wanted = e;
            }
        }
    }
    --needed;
    if (wanted == kNone || free_slot(d) >= 0) {
        return wanted;
    }
    std::int64_t furthest = -1;
    for (const ExpertId id : d.slots) {
        const Expert& e = experts_[static_cast<std::size_t>(id)];
        if (e.status == Status::resident && !e.pinned) {
            const std::int64_t use = foresight_.next_use(id, needed);
            if (use > furthest || (use == furthest && id < evicts)) {
                furthest = use;
                evicts = id;
            }
        }
    }
    if (evicts == kNone || furthest == needed || foresight_.next_use(evicts, now + 1) <= needed) {
        evicts = kNone;  // the right victim is still needed before: wait for it
        return kNone;
    }
    return wanted;
}

}  // namespace finemoe
