// MoE-Infinity: the expert with the smallest share of its layer's tokens in the requests being served goes,
// deeper layers first.
#include "rules/activation.hpp"
#include "rules/eviction.hpp"

namespace finemoe {
namespace {

class ActivationEviction final : public EvictionRule {
  public:
    EvictionKey key(const EvictionView& v) const override {
        const double shallow = 1.0 - static_cast<double>(v.layer) / v.layers;
        return {(v.activation->share(v.expert) + 1e-6) * shallow, 0.0, v.stamp, v.expert};
    }
};

}  // namespace

std::unique_ptr<EvictionRule> make_activation_eviction() { return std::make_unique<ActivationEviction>(); }

}  // namespace finemoe
