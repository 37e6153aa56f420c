// Least recently required first; experts of one gate event are equally recent, the lower id goes.
#include "rules/eviction.hpp"

namespace finemoe {
namespace {

class LruEviction final : public EvictionRule {
  public:
    EvictionKey key(const EvictionView& v) const override {
        return {static_cast<double>(v.stamp), 0.0, 0, v.expert};
    }
};

}  // namespace

std::unique_ptr<EvictionRule> make_lru_eviction() { return std::make_unique<LruEviction>(); }

}  // namespace finemoe
