// Python face of the transfer engine. Whatever waits releases the GIL, and looks for signals every 100 ms.
#include "bindings_transfer.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "transfer/cpu_copier.hpp"
#include "transfer/cuda_copier.hpp"
#include "transfer/engine.hpp"
#include "transfer/source.hpp"

namespace finemoe::bindings {

namespace {

using namespace finemoe::transfer;
using NoGil = py::call_guard<py::gil_scoped_release>;

void poll_signals() {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
    }
}

std::unique_ptr<Copier> make_copier(const py::handle& given, const std::shared_ptr<Source>& source,
                                    std::int64_t slab_bytes, int slots, std::int64_t chunk_bytes) {
    if (!py::isinstance<PyArena>(given)) {
        throw SourceError("TransferEngine: " + std::string(py::repr(given)) + " is no arena.");
    }
    const auto& [device, arena, keep_alive] = given.cast<const PyArena&>();
    if (arena.address == nullptr || arena.slab_bytes != slab_bytes || arena.slots < slots) {
        throw SourceError("TransferEngine: an arena has " + std::to_string(arena.slots) + " slots of " +
                          std::to_string(arena.slab_bytes) + " bytes; the core needs " +
                          std::to_string(slots) + " of " + std::to_string(slab_bytes) + ".");
    }
    if (device < 0) {
        return std::make_unique<CpuCopier>(source, arena);
    }
    return std::make_unique<CudaCopier>(cuda_runtime(), device, source, arena,
                                        std::min(chunk_bytes, slab_bytes));
}

class PyEngine {
  public:
    PyEngine(const py::object& core, const std::shared_ptr<Source>& source, const py::list& arenas,
             std::int64_t chunk_bytes, std::optional<double> bandwidth, double watchdog_s)
        : core_(core), arenas_(arenas) {
        Core& policy = core.cast<Core&>();
        const CoreConfig& c = policy.config();
        if (source->slab_bytes() != c.expert_bytes || source->experts() != c.total_experts()) {
            throw SourceError("TransferEngine: the source has " + std::to_string(source->experts()) +
                              " experts of " + std::to_string(source->slab_bytes()) + " bytes, the core " +
                              std::to_string(c.total_experts()) + " of " + std::to_string(c.expert_bytes) +
                              ".");
        }
        if (bandwidth && !(*bandwidth > 0.0)) {
            throw SourceError("TransferEngine: a bandwidth limit must be more than 0 bytes per second.");
        }
        std::vector<std::unique_ptr<Copier>> copiers;
        for (const py::handle arena : arenas) {
            const int g = static_cast<int>(copiers.size());
            const int slots = g < c.devices ? std::min(c.slots_per_device, c.owned(g)) : 0;
            copiers.push_back(make_copier(arena, source, c.expert_bytes, slots, chunk_bytes));
        }
        engine_ = std::make_shared<Engine>(policy, std::move(copiers),
                                           EngineSettings{chunk_bytes, bandwidth.value_or(0.0), watchdog_s});
        running().insert(this);
    }
    ~PyEngine() {
        running().erase(this);
        const py::gil_scoped_release release;  // a worker may be asking the user's policy
        engine_->close();
    }
    PyEngine(const PyEngine&) = delete;
    PyEngine& operator=(const PyEngine&) = delete;

    Engine& operator*() { return *engine_; }
    Engine* operator->() { return engine_.get(); }

    // Before the interpreter ends: no worker may ask a policy after that.
    static void close_all() {
        // Owned here as well: without the GIL another thread may drop an engine. Given up with the GIL again.
        std::vector<std::shared_ptr<Engine>> all;
        for (const PyEngine* engine : running()) {
            all.push_back(engine->engine_);
        }
        const py::gil_scoped_release release;
        for (const auto& engine : all) {
            engine->close();
        }
    }

  private:
    static std::set<PyEngine*>& running() {
        static std::set<PyEngine*> engines;  // under the GIL
        return engines;
    }

    py::object core_;
    py::list arenas_;
    std::shared_ptr<Engine> engine_;
};

py::dict statistics(PyEngine& engine) {
    py::list devices;
    for (const DeviceStatistics& d : engine->device_statistics()) {
        py::dict figures;
        figures["loads"] = d.loads;
        figures["pauses"] = d.pauses;
        figures["failures"] = d.failures;
        figures["bytes"] = d.bytes;
        figures["busy_s"] = d.busy_s;
        figures["limited_s"] = d.limited_s;
        devices.append(figures);
    }
    const SearchStatistics searches = engine->search_statistics();
    py::dict out;
    out["devices"] = devices;
    out["searches"] = searches.searches;
    out["search_s"] = searches.busy_s;
    return out;
}

void bind_errors() {
    static const py::object input_error = py::module_::import("finemoe.errors").attr("InputError");
    static const py::object transfer_error = py::module_::import("finemoe.errors").attr("TransferError");
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) {
                std::rethrow_exception(p);
            }
        } catch (const SourceError& e) {
            py::set_error(input_error, e.what());
        } catch (const TransferError& e) {
            py::set_error(transfer_error, e.what());
        }
    });
}

void bind_engine(py::module_& m) {
    py::class_<PyEngine>(m, "TransferEngine")
        .def(py::init<const py::object&, const std::shared_ptr<Source>&, const py::list&, std::int64_t,
                      std::optional<double>, double>(),
             py::arg("core"), py::arg("source"), py::arg("arenas"), py::arg("chunk_bytes") = 1 << 20,
             py::arg("bandwidth_limit_bytes_per_s") = py::none(), py::arg("watchdog_s") = 120.0,
             py::keep_alive<1, 3>())
        .def(
            "preload",
            [](PyEngine& e, const std::vector<ExpertId>& experts) { e->preload(experts, poll_signals); },
            py::arg("experts"), NoGil())
        .def(
            "start", [](PyEngine& e) { e->start(); }, NoGil())
        .def(
            "close", [](PyEngine& e) { e->close(); }, NoGil())
        .def("now", [](PyEngine& e) { return e->now(); })
        .def(
            "notify", [](PyEngine& e, std::uint64_t mask) { e->notify(mask); }, py::arg("mask"), NoGil())
        .def(
            "check", [](PyEngine& e) { e->check(); }, NoGil())
        .def(
            "wait_chunk", [](PyEngine& e) { return e->wait_chunk(poll_signals); }, NoGil())
        .def(
            "wait_ready", [](PyEngine& e) { return e->wait_ready(poll_signals); }, NoGil())
        .def(
            "wait_search",
            [](PyEngine& e, std::int64_t ticket) { return e->wait_search(ticket, poll_signals); },
            py::arg("ticket"), NoGil())
        .def(
            "wait_prefetches", [](PyEngine& e) { return e->wait_prefetches(poll_signals); }, NoGil())
        .def(
            "drain", [](PyEngine& e) { e->drain(poll_signals); }, NoGil())
        .def(
            "record_compute",
            [](PyEngine& e, int device, std::uintptr_t stream) { e->record_compute(device, stream); },
            py::arg("device"), py::arg("stream"), NoGil())
        .def("statistics", &statistics);
    py::module_::import("atexit").attr("register")(py::cpp_function(&PyEngine::close_all));
}

}  // namespace

void bind_transfer(py::module_& m) {
    bind_errors();
    bind_memory(m);
    bind_engine(m);
}

}  // namespace finemoe::bindings
