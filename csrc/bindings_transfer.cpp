// Python face of the transfer engine. Whatever waits releases the GIL, and looks for signals every 100 ms.
#include <algorithm>
#include <set>
#include <string>

#include "bindings.hpp"
#include "transfer/cpu_copier.hpp"
#include "transfer/crc32c.hpp"
#include "transfer/engine.hpp"
#include "transfer/file_source.hpp"

namespace finemoe::bindings {

namespace {

using namespace finemoe::transfer;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

std::byte* pointer(std::uintptr_t address) {
    return reinterpret_cast<std::byte*>(address);  // a number is what Python knows of memory
}

void poll_signals() {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
    }
}

template <typename T>
std::vector<T> values(const Array<T>& array) {
    return {array.data(), array.data() + array.size()};
}

std::shared_ptr<FileSource> make_file_source(
    const std::vector<std::string>& paths, const Array<std::int32_t>& file, const Array<std::int64_t>& offset,
    const Array<std::int64_t>& length, const Array<std::int64_t>& place,
    const std::optional<Array<std::uint32_t>>& checksums, bool direct, std::int64_t slab_bytes) {
    if (file.ndim() != 2 || file.shape(1) != length.size()) {
        throw SourceError("FileSource: file must be [experts, pieces] and length [pieces].");
    }
    Pieces pieces{paths,
                  static_cast<int>(file.shape(0)),
                  values(file),
                  values(offset),
                  values(length),
                  values(place),
                  checksums ? values(*checksums) : std::vector<std::uint32_t>{},
                  slab_bytes,
                  direct};
    if (checksums && checksums->size() != file.shape(0)) {
        throw SourceError("FileSource: there must be one checksum per expert.");
    }
    const py::gil_scoped_release release;
    return std::make_shared<FileSource>(std::move(pieces));
}

// A whole slab into a writable buffer of at least as many bytes.
void read_slab(Source& source, ExpertId expert, const py::buffer& buffer) {
    const py::buffer_info info = buffer.request(true);
    if (expert < 0 || expert >= source.experts() || info.size * info.itemsize < source.slab_bytes()) {
        throw SourceError("read: expert " + std::to_string(expert) + " of " +
                          std::to_string(source.experts()) + " into a buffer of " +
                          std::to_string(info.size * info.itemsize) + " bytes; a slab has " +
                          std::to_string(source.slab_bytes()) + ".");
    }
    const py::gil_scoped_release release;
    try {
        source.read(expert, 0, source.slab_bytes(), static_cast<std::byte*>(info.ptr));
    } catch (const CopyError& error) {
        throw TransferError(error.what());
    }
}

std::uint32_t checksum(const py::buffer& buffer, std::uint32_t start) {
    const py::buffer_info info = buffer.request();
    const std::span bytes(static_cast<const std::byte*>(info.ptr),
                          static_cast<std::size_t>(info.size * info.itemsize));
    const py::gil_scoped_release release;
    return crc32c(bytes, start);
}

// Slots of one device in memory that Python owns.
struct CpuArena {
    Arena arena;
    py::object keep_alive;
};

std::unique_ptr<Copier> make_copier(const py::handle& given, const std::shared_ptr<Source>& source,
                                    std::int64_t slab_bytes, int slots) {
    if (!py::isinstance<CpuArena>(given)) {
        throw SourceError("TransferEngine: " + std::string(py::repr(given)) + " is no arena.");
    }
    const Arena& arena = given.cast<const CpuArena&>().arena;
    if (arena.address == nullptr || arena.slab_bytes != slab_bytes || arena.slots < slots) {
        throw SourceError("TransferEngine: an arena has " + std::to_string(arena.slots) + " slots of " +
                          std::to_string(arena.slab_bytes) + " bytes; the core needs " +
                          std::to_string(slots) + " of " + std::to_string(slab_bytes) + ".");
    }
    return std::make_unique<CpuCopier>(source, arena);
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
            copiers.push_back(make_copier(arena, source, c.expert_bytes, slots));
        }
        engine_ = std::make_unique<Engine>(policy, std::move(copiers),
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
        const std::set<PyEngine*> all = running();
        const py::gil_scoped_release release;
        for (PyEngine* engine : all) {
            engine->engine_->close();
        }
    }

  private:
    static std::set<PyEngine*>& running() {
        static std::set<PyEngine*> engines;  // under the GIL
        return engines;
    }

    py::object core_;
    py::list arenas_;
    std::unique_ptr<Engine> engine_;
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

void bind_sources(py::module_& m) {
    m.def("crc32c", &checksum, py::arg("buffer"), py::arg("start") = 0,
          "CRC-32C of a buffer's bytes; `start`: the checksum of what comes before them.");

    py::class_<Source, std::shared_ptr<Source>>(m, "Source")
        .def_property_readonly("experts", &Source::experts)
        .def_property_readonly("slab_bytes", &Source::slab_bytes)
        .def("read", &read_slab, py::arg("expert"), py::arg("buffer"),
             "Reads an expert's slab into a writable buffer; no engine may be loading that expert.");
    py::class_<FileSource, Source, std::shared_ptr<FileSource>>(m, "FileSource")
        .def(py::init(&make_file_source), py::arg("paths"), py::arg("file"), py::arg("offset"),
             py::arg("length"), py::arg("place"), py::arg("checksums") = py::none(),
             py::arg("direct") = false, py::arg("slab_bytes") = 0)
        .def_property_readonly("verified", &FileSource::verified);
    py::class_<HostSource, Source, std::shared_ptr<HostSource>>(m, "HostSource")
        .def(py::init([](std::uintptr_t address, int experts, std::int64_t slab_bytes, const py::object&,
                         std::int64_t stride) {
                 return std::make_shared<HostSource>(pointer(address), experts, slab_bytes,
                                                     stride == 0 ? slab_bytes : stride);
             }),
             py::arg("address"), py::arg("experts"), py::arg("slab_bytes"), py::arg("keep_alive"),
             py::arg("stride") = 0, py::keep_alive<1, 5>());
    py::class_<CpuArena>(m, "CpuArena")
        .def(py::init([](std::uintptr_t address, int slots, std::int64_t slab_bytes, py::object keep_alive) {
                 return CpuArena{{pointer(address), slots, slab_bytes}, std::move(keep_alive)};
             }),
             py::arg("address"), py::arg("slots"), py::arg("slab_bytes"), py::arg("keep_alive"));
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
    bind_sources(m);
    bind_engine(m);
}

}  // namespace finemoe::bindings
