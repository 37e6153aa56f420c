// Eviction priority 1 / (p · freq), largest first (paper §4.4): the smallest p · freq goes.
#include <algorithm>

#include "rules/eviction.hpp"

namespace finemoe {
namespace {

class FineMoEEviction final : public EvictionRule {
  public:
    EvictionKey key(const EvictionView& v) const override {
        const double p = static_cast<double>(std::max(v.probability, 1e-6F));
        const int ahead = v.layer > v.layer_now ? v.layer - v.layer_now : v.layer - v.layer_now + v.layers;
        return {p * v.frequency, v.frequency, -ahead, v.expert};
    }
};

}  // namespace

std::unique_ptr<EvictionRule> make_finemoe_eviction() { return std::make_unique<FineMoEEviction>(); }

}  // namespace finemoe
