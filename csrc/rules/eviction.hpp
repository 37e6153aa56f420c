// An eviction rule orders the residents that may go: the smallest key is the victim. One file per rule.
#pragma once

#include <compare>
#include <memory>

#include "types.hpp"

namespace finemoe {

class Activation;
class Foresight;
class UserPolicy;

struct EvictionKey {
    double first = 0.0;
    double second = 0.0;
    std::int64_t third = 0;
    ExpertId expert = kNone;
    auto operator<=>(const EvictionKey&) const = default;
};

// What a rule may look at, for one expert at one moment.
struct EvictionView {
    ExpertId expert = kNone;
    float probability = 0.0F;  // in the last search that targeted its layer
    double frequency = 1.0;
    std::int64_t stamp = 0;  // number of the last gate that required it (or when its prefetch began)
    int layer = 0;
    int layer_now = -1;
    int layers = 0;
    int experts = 0;        // of a layer
    std::int64_t step = 0;  // the current one
    const Foresight* foresight = nullptr;
    const Activation* activation = nullptr;
    UserPolicy* user = nullptr;
    bool privileged = false;  // lfru
};

class EvictionRule {
  public:
    virtual ~EvictionRule() = default;
    virtual EvictionKey key(const EvictionView& view) const = 0;
};

std::unique_ptr<EvictionRule> make_finemoe_eviction();
std::unique_ptr<EvictionRule> make_lru_eviction();
std::unique_ptr<EvictionRule> make_lfu_eviction();
std::unique_ptr<EvictionRule> make_lfru_eviction();
std::unique_ptr<EvictionRule> make_activation_eviction();
std::unique_ptr<EvictionRule> make_belady_eviction();
std::unique_ptr<EvictionRule> make_plugin_eviction();
std::unique_ptr<EvictionRule> make_eviction(EvictionKind kind);

}  // namespace finemoe
