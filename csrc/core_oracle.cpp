// The oracle's prefetch: the next expert that will be missing, in exchange for one that is needed later than
// it.
#include <algorithm>

#include "core.hpp"

namespace finemoe {

ExpertId Core::oracle_choice(int g, ExpertId& evicts) {
    Device& d = device(g);
    const std::int64_t now = step();
    for (std::int64_t s = std::max({now + 1, foresight_.first(), d.oracle_from}); s < foresight_.end(); ++s) {
        ExpertId wanted = kNone;
        for (const ExpertId e : foresight_.required(s)) {
            const bool missing = at(e).status == Status::absent;
            if (missing && config_.device_of(e) == g && (wanted == kNone || e < wanted)) {
                wanted = e;
            }
        }
        d.oracle_from = s;
        if (wanted == kNone) {
            continue;
        }
        if (free_slot(d) < 0) {
            evicts = prefetch_victim(d);
            if (evicts == kNone || foresight_.next_use(evicts, now + 1) <= s) {
                evicts = kNone;
                return kNone;
            }
        }
        return wanted;
    }
    return kNone;
}

// The scan above goes on where it was; what leaves the device takes it back to its next use.
void Core::became_absent(ExpertId e) {
    at(e).status = Status::absent;
    at(e).slot = -1;
    if (config_.predictor == PredictorKind::oracle) {
        Device& d = device_of(e);
        d.oracle_from = std::min(d.oracle_from, foresight_.next_use(e, step() + 1));
    }
}

}  // namespace finemoe
