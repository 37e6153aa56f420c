#include "rules/eviction.hpp"

namespace finemoe {

std::unique_ptr<EvictionRule> make_eviction(EvictionKind kind) {
    switch (kind) {
        case EvictionKind::finemoe:
            return make_finemoe_eviction();
        case EvictionKind::lru:
            return make_lru_eviction();
        case EvictionKind::lfu:
            return make_lfu_eviction();
        case EvictionKind::lfru:
            return make_lfru_eviction();
        case EvictionKind::activation:
            return make_activation_eviction();
        case EvictionKind::plugin:
            return make_plugin_eviction();
        case EvictionKind::belady:
            return make_belady_eviction();
    }
    throw CoreError("unknown eviction rule");
}

}  // namespace finemoe
