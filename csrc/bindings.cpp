// Python face of the core. Every call that takes the core's mutex releases the GIL first.
#include "bindings.hpp"

#include <string>

namespace finemoe::bindings {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Commands are made for every layer and load: interned names, and tuples filled by hand.
PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

py::object filled(std::initializer_list<PyObject*> items) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(items.size()));
    Py_ssize_t i = 0;
    for (PyObject* item : items) {
        PyTuple_SET_ITEM(tuple, i++, item);  // takes the reference over
    }
    return py::reinterpret_steal<py::object>(tuple);
}

py::object command_tuple(const Command& c) {
    static PyObject *const search = name("Search"), *const load = name("Load"),
                           *const wait_search = name("WaitSearch"), *const preempt = name("PreemptPrefetch"),
                           *const abort = name("Abort");
    static PyObject* const search_kinds[] = {name("semantic"), name("trajectory"), name("update")};
    static PyObject* const load_kinds[] = {name("demand"), name("prefetch")};
    const auto number = [](std::int64_t n) { return PyLong_FromLongLong(n); };
    const auto shared = [](PyObject* object) { return Py_NewRef(object); };
    switch (c.kind) {
        case RecordKind::search:
            return filled({shared(search), number(c.ticket),
                           shared(search_kinds[static_cast<int>(c.search_kind)]), number(c.layer),
                           number(c.target), number(c.work), PyBool_FromLong(c.blocking ? 1 : 0)});
        case RecordKind::wait_search:
            return filled({shared(wait_search), number(c.ticket)});
        case RecordKind::preempt_prefetch:
            return filled({shared(preempt), number(c.device)});
        case RecordKind::load:
            return filled({shared(load), number(c.expert), number(c.device), number(c.slot), number(c.offset),
                           number(c.bytes), shared(load_kinds[static_cast<int>(c.load_kind)]),
                           number(c.evicts)});
        default:
            return filled({shared(abort), number(c.expert)});
    }
}

py::list command_list(const std::vector<Command>& commands) {
    py::list out(commands.size());
    for (std::size_t i = 0; i < commands.size(); ++i) {
        PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), command_tuple(commands[i]).release().ptr());
    }
    return out;
}

template <typename Take>
py::list drained(Take&& take) {
    thread_local std::vector<Command> commands;
    {
        const py::gil_scoped_release release;
        take(commands);
    }
    return command_list(commands);
}

Row make_row(const py::tuple& row) {  // (request, phase, tokens, has_embedding)
    if (row.size() != 4) {
        throw CoreError("begin_iteration: a row is (request, phase, tokens, has_embedding)");
    }
    const auto phase = row[1].cast<std::string>();
    return {row[0].cast<std::int64_t>(),
            named<Phase>({{"prefill", Phase::prefill}, {"decode", Phase::decode}}, phase, "phase"),
            row[2].cast<int>(), row[3].cast<bool>()};
}

py::dict counters_dict(const Counters& c) {
    py::dict d;
    d["demand_loads"] = c.demand_loads;
    d["prefetch_loads"] = c.prefetch_loads;
    d["demand_bytes"] = c.demand_bytes;
    d["prefetch_bytes"] = c.prefetch_bytes;
    d["useful_bytes"] = c.useful_bytes;
    d["wasted_bytes"] = c.wasted_bytes;
    d["evictions"] = c.evictions;
    d["preemptions"] = c.preemptions;
    d["dropped"] = c.dropped;
    d["failed_prefetches"] = c.failed_prefetches;
    d["searches"] = c.searches;
    d["late_searches"] = c.late_searches;
    d["skipped_updates"] = c.skipped_updates;
    d["unused_bytes"] = c.unused_bytes;
    return d;
}

py::array layer_array(const std::vector<std::int64_t>& values, int layers) {
    py::array_t<std::int64_t> out({2, layers});
    std::copy(values.begin(), values.end(), out.mutable_data());
    return out;
}

}  // namespace

std::vector<std::uint16_t> to_halves(const py::object& values, py::ssize_t width) {
    if (values.is_none()) {
        return {};
    }
    const auto array = py::array::ensure(values, py::array::c_style);
    if (!array) {
        throw CoreError("not an array of numbers");
    }
    if (width > 0 && (array.ndim() == 0 || array.shape(array.ndim() - 1) != width)) {
        throw CoreError("the rows of an array are not " + std::to_string(width) + " wide");
    }
    const auto n = static_cast<std::size_t>(array.size());
    if (array.dtype().kind() == 'f' && array.itemsize() == 2 && array.dtype().byteorder() != '>') {
        const auto* data = static_cast<const std::uint16_t*>(array.data());
        return {data, data + n};
    }
    const auto floats = py::array_t<float, py::array::c_style | py::array::forcecast>::ensure(array);
    if (!floats) {
        throw CoreError("not an array of numbers");
    }
    std::vector<std::uint16_t> out(n);
    std::transform(floats.data(), floats.data() + n, out.begin(), float_to_half);
    return out;
}

py::array halves_array(const std::vector<std::uint16_t>& values, std::vector<py::ssize_t> shape) {
    static const auto* const half = new py::dtype("float16");  // made once; outlives the interpreter's end
    py::array out(*half, std::move(shape));
    std::copy(values.begin(), values.end(), static_cast<std::uint16_t*>(out.mutable_data()));
    return out;
}

}  // namespace finemoe::bindings

PYBIND11_MODULE(_core, m) {
    using namespace finemoe;
    using namespace finemoe::bindings;
    m.doc() = "The policy core and the routing feed (csrc/). Use it through finemoe.policy.core.";

    static const py::object core_error = py::module_::import("finemoe.errors").attr("CoreError");
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) {
                std::rethrow_exception(p);
            }
        } catch (const CoreError& e) {
            py::set_error(core_error, e.what());
        }
    });

    m.attr("FORWARD_PENDING") = kForwardPending;
    m.attr("SEARCH_PENDING") = kSearchPending;
    m.attr("CHUNK_READY") = kChunkReady;
    m.attr("CHUNK_OPEN") = kChunkOpen;
    m.attr("MORE_CHUNKS") = kMoreChunks;
    m.attr("PREFETCH_OPEN") = kPrefetchOpen;
    m.attr("DEVICE_SHIFT") = kDeviceShift;

    bind_config(m);

    py::class_<Core>(m, "Core")
        .def(py::init([](const CoreConfig& config, std::int64_t log_iterations, const py::object& policy) {
                 return std::make_unique<Core>(config, log_iterations, make_policy(policy));
             }),
             py::arg("config"), py::arg("log_iterations") = 0, py::arg("policy") = py::none())
        .def(
            "seed_store",
            [](Core& core, const py::object& maps, const py::object& embeddings,
               std::vector<std::int64_t> written, double time_s) {
                const StoreContents contents{to_halves(maps), to_halves(embeddings), std::move(written)};
                const py::gil_scoped_release release;
                return core.seed_store(contents, time_s);
            },
            py::arg("maps"), py::arg("embeddings"), py::arg("written"), py::arg("time_s") = 0.0)
        .def(
            "preload",
            [](Core& core, const std::vector<ExpertId>& experts, double time_s) {
                return core.preload(experts, time_s);
            },
            py::arg("experts"), py::arg("time_s") = 0.0, NoGil())
        .def(
            "begin_iteration",
            [](Core& core, const std::vector<py::tuple>& rows, const py::object& embeddings, double time_s) {
                std::vector<Row> made;
                for (const auto& row : rows) {
                    made.push_back(make_row(row));
                }
                const auto halves = to_halves(embeddings);
                const py::gil_scoped_release release;
                return core.begin_iteration(std::move(made), halves, time_s);
            },
            py::arg("rows"), py::arg("embeddings") = py::none(), py::arg("time_s") = 0.0)
        .def(
            "gate",
            [](Core& core, int layer, const py::object& probabilities, const std::vector<int>& experts,
               const std::vector<int>& token_counts, double time_s, const py::object& row_counts) {
                const auto halves = to_halves(probabilities, core.config().experts);
                std::vector<std::int32_t> rows;
                if (!row_counts.is_none()) {
                    const auto array =
                        row_counts
                            .cast<py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>>();
                    if (array.ndim() != 2 || array.shape(1) != core.config().experts) {
                        throw CoreError("gate: row counts are not [rows, J]");
                    }
                    rows.assign(array.data(), array.data() + array.size());
                }
                const py::gil_scoped_release release;
                return core.gate(layer, halves, experts, token_counts, time_s, rows);
            },
            py::arg("layer"), py::arg("probabilities"), py::arg("experts"), py::arg("token_counts"),
            py::arg("time_s") = 0.0, py::arg("row_counts") = py::none())
        .def(
            "speculation",
            [](Core& core, int layer, int target, const py::object& probabilities, double time_s) {
                const auto halves = to_halves(probabilities, core.config().experts);
                const py::gil_scoped_release release;
                return core.speculation(layer, target, halves, time_s);
            },
            py::arg("layer"), py::arg("target"), py::arg("probabilities"), py::arg("time_s") = 0.0)
        .def("search_done", &Core::search_done, py::arg("ticket"), py::arg("time_s") = 0.0, NoGil())
        .def("loaded", &Core::loaded, py::arg("expert"), py::arg("time_s") = 0.0, NoGil())
        .def(
            "loaded_all",
            [](Core& core, const std::vector<ExpertId>& experts, double time_s) {
                return core.loaded_all(experts, time_s);
            },
            py::arg("experts"), py::arg("time_s") = 0.0, NoGil())
        .def("paused", &Core::paused, py::arg("expert"), py::arg("bytes_done"), py::arg("time_s") = 0.0,
             NoGil())
        .def("load_failed", &Core::load_failed, py::arg("expert"), py::arg("reason"), py::arg("time_s") = 0.0,
             NoGil())
        .def(
            "computed",
            [](Core& core, int layer, const std::vector<ExpertId>& experts, double time_s) {
                return core.computed(layer, experts, time_s);
            },
            py::arg("layer"), py::arg("experts"), py::arg("time_s") = 0.0, NoGil())
        .def("computed_chunk", &Core::computed_chunk, py::arg("time_s") = 0.0, NoGil())
        .def("end_iteration", &Core::end_iteration, py::arg("time_s") = 0.0,
             py::arg("finished") = std::vector<std::int64_t>{}, NoGil())
        .def("foresight", &Core::foresight, py::arg("step"), py::arg("required"), py::arg("time_s") = 0.0,
             NoGil())
        .def(
            "take_device",
            [](Core& core, int g) { return drained([&](auto& into) { core.take_device(g, into); }); },
            py::arg("device"))
        .def("take_devices", [](Core& core) { return drained([&](auto& into) { core.take_devices(into); }); })
        .def("take_searches",
             [](Core& core) { return drained([&](auto& into) { core.take_searches(into); }); })
        .def("abort_reason", &Core::abort_reason, NoGil())
        .def("take_forward", [](Core& core) { return drained([&](auto& into) { core.take_forward(into); }); })
        .def("run_searches", &Core::run_searches, py::arg("ticket"), NoGil())
        .def("search_abandoned", &Core::search_abandoned, py::arg("ticket"), NoGil())
        .def("chunk_ready", &Core::chunk_ready, NoGil())
        .def("chunk_slots",
             [](Core& core) {
                 std::vector<Placed> placed;
                 {
                     const py::gil_scoped_release release;
                     placed = core.chunk_slots();
                 }
                 const auto n = static_cast<py::ssize_t>(placed.size());
                 py::array_t<std::int32_t> experts(n), slots(n);
                 for (py::ssize_t i = 0; i < n; ++i) {
                     experts.mutable_at(i) = placed[static_cast<std::size_t>(i)].expert;
                     slots.mutable_at(i) = placed[static_cast<std::size_t>(i)].slot;
                 }
                 return py::make_tuple(experts, slots);
             })
        .def("chunk_resident", &Core::chunk_resident, NoGil())
        .def("prefetch_open", &Core::prefetch_open, NoGil())
        .def("idle", &Core::idle, NoGil())
        .def("slot", &Core::slot, py::arg("expert"), NoGil())
        .def("residents", &Core::residents, py::arg("device"), NoGil())
        .def("store_contents",
             [](Core& core) {
                 StoreContents s;
                 {
                     const py::gil_scoped_release release;
                     s = core.store_contents();
                 }
                 return store_tuple(s, core.config());
             })
        .def("counters", [](Core& core) { return counters_dict(core.counters()); })
        .def_property_readonly("row_counts", [](const Core& core) { return core.config().row_counts(); })
        .def("totals",
             [](Core& core) {
                 const Totals t = core.totals();
                 return py::make_tuple(t.activated, t.hits, t.late, t.demand_bytes);
             })
        .def("layer_counts",
             [](Core& core) {
                 const LayerCounts counts = core.layer_counts();
                 py::dict d;
                 d["activated"] = layer_array(counts.activated, core.config().layers);
                 d["hits"] = layer_array(counts.hits, core.config().layers);
                 d["late"] = layer_array(counts.late, core.config().layers);
                 return d;
             })
        .def("take_log", [](Core& core) { return log_columns(core.take_log()); });

    bind_feed(m);
    bind_plugin(m);
    bind_search(m);
    bind_synthetic(m);
    bind_transfer(m);
}
