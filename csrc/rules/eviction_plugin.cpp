// The user's own key, smallest first; of equals the least recently required.
#include <cmath>

#include "rules/eviction.hpp"
#include "rules/user_policy.hpp"

namespace finemoe {
namespace {

class PluginEviction final : public EvictionRule {
  public:
    EvictionKey key(const EvictionView& v) const override {
        const double value = v.user->eviction_key(v);
        if (std::isnan(value)) {
            throw CoreError("the policy's eviction_key is not a number");
        }
        return {value, 0.0, v.stamp, v.expert};
    }
};

}  // namespace

std::unique_ptr<EvictionRule> make_plugin_eviction() { return std::make_unique<PluginEviction>(); }

}  // namespace finemoe
