// Least frequent recently used: experts that were hit while resident are privileged, up to half of a device's
// slots, and go last, least recently required first; of the others the least frequently required goes.
#include "rules/eviction.hpp"

namespace finemoe {
namespace {

class LfruEviction final : public EvictionRule {
  public:
    EvictionKey key(const EvictionView& v) const override {
        return {v.privileged ? 1.0 : 0.0, v.privileged ? 0.0 : v.frequency, v.stamp, v.expert};
    }
};

}  // namespace

std::unique_ptr<EvictionRule> make_lfru_eviction() { return std::make_unique<LfruEviction>(); }

}  // namespace finemoe
