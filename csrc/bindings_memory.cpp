// Python face of where experts come from and go to: files, slabs in host memory, and the arenas of devices.
#include <algorithm>
#include <string>

#include "bindings_transfer.hpp"
#include "transfer/crc32c.hpp"
#include "transfer/file_source.hpp"
#include "transfer/pinned_slabs.hpp"
#include "transfer/shared.hpp"

namespace finemoe::bindings {

namespace {

using namespace finemoe::transfer;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

std::byte* pointer(std::uintptr_t address) {
    return reinterpret_cast<std::byte*>(address);  // a number is what Python knows of memory
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

struct CpuArena : PyArena {};
struct CudaArena : PyArena {};

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
}

void bind_arenas(py::module_& m) {
    py::class_<PyArena>(m, "Arena");
    py::class_<CpuArena, PyArena>(m, "CpuArena")
        .def(py::init([](std::uintptr_t address, int slots, std::int64_t slab_bytes, py::object keep_alive) {
                 return CpuArena{{-1, {pointer(address), slots, slab_bytes}, std::move(keep_alive)}};
             }),
             py::arg("address"), py::arg("slots"), py::arg("slab_bytes"), py::arg("keep_alive"));
    py::class_<CudaArena, PyArena>(m, "CudaArena")
        .def(py::init([](int device, std::uintptr_t address, int slots, std::int64_t slab_bytes,
                         py::object keep_alive) {
                 if (const std::string problem = cuda_problem(device); !problem.empty()) {
                     throw SourceError("CudaArena: " + problem);
                 }
                 return CudaArena{{device, {pointer(address), slots, slab_bytes}, std::move(keep_alive)}};
             }),
             py::arg("device"), py::arg("address"), py::arg("slots"), py::arg("slab_bytes"),
             py::arg("keep_alive"));
    m.def("cuda_problem", &cuda_problem, py::arg("device") = 0,
          "Why that CUDA device cannot be used, with the remedy; empty where it can.");
    py::class_<PinnedSlabs>(m, "PinnedSlabs")
        .def(py::init([](int experts, std::int64_t slab_bytes, std::optional<std::int64_t> limit_bytes) {
                 const auto runtime = cuda_problem(0).empty() ? cuda_runtime() : nullptr;
                 return std::make_unique<PinnedSlabs>(runtime, experts, slab_bytes, limit_bytes.value_or(-1));
             }),
             py::arg("experts"), py::arg("slab_bytes"), py::arg("limit_bytes") = py::none(), NoGil())
        .def_property_readonly(
            "address", [](const PinnedSlabs& s) { return reinterpret_cast<std::uintptr_t>(s.address()); })
        .def_property_readonly("experts", &PinnedSlabs::experts)
        .def_property_readonly("stride", &PinnedSlabs::stride)
        .def_property_readonly("pinned_bytes", &PinnedSlabs::pinned_bytes)
        .def_property_readonly("warning", &PinnedSlabs::warning)
        .def_property_readonly("slabs", [](const py::object& self) {
            const auto& slabs = self.cast<const PinnedSlabs&>();
            return py::array_t<std::uint8_t>({static_cast<py::ssize_t>(slabs.experts()), slabs.stride()},
                                             reinterpret_cast<const std::uint8_t*>(slabs.address()), self);
        });
}

}  // namespace

void bind_memory(py::module_& m) {
    bind_sources(m);
    bind_arenas(m);
}

}  // namespace finemoe::bindings
