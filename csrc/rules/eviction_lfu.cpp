// Least frequently required first; of equals the least recently required.
#include "rules/eviction.hpp"

namespace finemoe {
namespace {

class LfuEviction final : public EvictionRule {
  public:
    EvictionKey key(const EvictionView& v) const override {
        return {v.frequency, static_cast<double>(v.stamp), 0, v.expert};
    }
};

}  // namespace

std::unique_ptr<EvictionRule> make_lfu_eviction() { return std::make_unique<LfuEviction>(); }

}  // namespace finemoe
