// The expert whose next use lies furthest ahead goes (Belady's MIN); never used again is furthest.
#include "rules/eviction.hpp"
#include "rules/foresight.hpp"

namespace finemoe {
namespace {

class BeladyEviction final : public EvictionRule {
  public:
    EvictionKey key(const EvictionView& v) const override {
        return {0.0, 0.0, -v.foresight->next_use(v.expert, v.step + 1), v.expert};
    }
};

}  // namespace

std::unique_ptr<EvictionRule> make_belady_eviction() { return std::make_unique<BeladyEviction>(); }

}  // namespace finemoe
