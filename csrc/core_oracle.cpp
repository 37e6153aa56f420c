// The oracle's prefetch: the next expert that will be missing, in exchange for one that is needed later than
// it.
#include <algorithm>

#include "core.hpp"

namespace finemoe {

ExpertId Core::oracle_choice(int g, ExpertId& evicts) const {
    const Device& d = devices_[static_cast<std::size_t>(g)];
    const std::int64_t now = step();
    for (std::int64_t s = std::max(now + 1, foresight_.first()); s < foresight_.end(); ++s) {
        ExpertId wanted = kNone;
        for (const ExpertId e : foresight_.required(s)) {
            const bool missing = experts_[static_cast<std::size_t>(e)].status == Status::absent;
            if (missing && config_.device_of(e) == g && (wanted == kNone || e < wanted)) {
                wanted = e;
            }
        }
        if (wanted == kNone) {
            continue;
        }
        if (free_slot(d) < 0) {
            evicts = victim(d);
            if (evicts == kNone || foresight_.next_use(evicts, now + 1) <= s) {
                evicts = kNone;
                return kNone;
            }
        }
        return wanted;
    }
    return kNone;
}

}  // namespace finemoe
