// The core's configuration by keyword, its choices by name.
#include "bindings.hpp"

namespace finemoe::bindings {

namespace {

// Takes the option out, so that what is left is unknown.
template <typename T>
T option(py::kwargs& given, const char* name) {
    if (!given.contains(name)) {
        throw CoreError("the option " + std::string(name) + " is missing");
    }
    return given.attr("pop")(name).cast<T>();
}

template <typename T>
T choice(py::kwargs& given, const char* name, const std::map<std::string, T>& names) {
    return named<T>(names, option<std::string>(given, name), name);
}

CoreConfig make_config(py::kwargs given) {
    CoreConfig c;
    c.layers = option<int>(given, "layers");
    c.experts = option<int>(given, "experts");
    c.top_k = option<int>(given, "top_k");
    c.devices = option<int>(given, "devices");
    c.slots_per_device = option<int>(given, "slots_per_device");
    c.expert_bytes = option<std::int64_t>(given, "expert_bytes");
    c.predictor = choice<PredictorKind>(given, "predictor",
                                        {{"none", PredictorKind::none},
                                         {"map", PredictorKind::map},
                                         {"speculate", PredictorKind::speculate},
                                         {"activation", PredictorKind::activation},
                                         {"oracle", PredictorKind::oracle},
                                         {"plugin", PredictorKind::plugin}});
    c.semantic = option<bool>(given, "semantic");
    c.trajectory = option<bool>(given, "trajectory");
    c.targets =
        choice<Targets>(given, "targets", {{"distance", Targets::distance}, {"later", Targets::later}});
    c.popular_start = option<bool>(given, "popular_start");
    c.selector = choice<Selector>(
        given, "selector",
        {{"delta", Selector::delta}, {"top_k", Selector::top_k}, {"positive", Selector::positive}});
    c.priority = choice<Priority>(
        given, "priority",
        {{"distance", Priority::distance}, {"depth", Priority::depth}, {"layer", Priority::layer}});
    c.prefetch_distance = option<int>(given, "prefetch_distance");
    c.store_capacity = option<int>(given, "store_capacity");
    c.embedding_width = option<int>(given, "embedding_width");
    c.embedding_work = option<std::int64_t>(given, "embedding_work");
    c.eviction = choice<EvictionKind>(given, "eviction",
                                      {{"finemoe", EvictionKind::finemoe},
                                       {"lru", EvictionKind::lru},
                                       {"lfu", EvictionKind::lfu},
                                       {"lfru", EvictionKind::lfru},
                                       {"activation", EvictionKind::activation},
                                       {"belady", EvictionKind::belady},
                                       {"plugin", EvictionKind::plugin}});
    c.frequency = choice<FrequencyRule>(
        given, "frequency", {{"run", FrequencyRule::run}, {"residency", FrequencyRule::residency}});
    c.frequency_decay = option<double>(given, "frequency_decay");
    c.rank_prefill_by_tokens = option<bool>(given, "rank_prefill_by_tokens");
    c.load_shape =
        choice<LoadShape>(given, "load_shape", {{"expert", LoadShape::expert}, {"layer", LoadShape::layer}});
    c.layer_quota = option<int>(given, "layer_quota");
    c.search_blocks = option<bool>(given, "search_blocks");
    c.prefetch_blocks = option<bool>(given, "prefetch_blocks");
    c.preempt_scope = choice<PreemptScope>(given, "preempt_scope",
                                           {{"device", PreemptScope::device}, {"all", PreemptScope::all}});
    for (const auto& [name, value] : given) {
        throw CoreError("the core has no option " + std::string(py::str(name)));
    }
    c.validate();
    return c;
}

}  // namespace

void bind_config(py::module_& m) {
    py::class_<CoreConfig>(m, "CoreConfig")
        .def(py::init(&make_config))
        .def_readonly("layers", &CoreConfig::layers)
        .def_readonly("experts", &CoreConfig::experts)
        .def_readonly("devices", &CoreConfig::devices)
        .def_readonly("expert_bytes", &CoreConfig::expert_bytes);
}

}  // namespace finemoe::bindings
