// The log as NumPy columns, and the feed.
#include "bindings.hpp"
#include "feed.hpp"

namespace finemoe::bindings {

namespace {

template <typename T>
py::array own(std::vector<T> values) {
    auto* kept = new std::vector<T>(std::move(values));
    const py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<T>*>(p); });
    return py::array_t<T>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

template <typename T, typename Get>
py::array column(const std::vector<Record>& records, Get get) {
    py::array_t<T> out(static_cast<py::ssize_t>(records.size()));
    T* data = out.mutable_data();
    for (std::size_t i = 0; i < records.size(); ++i) {
        data[i] = static_cast<T>(get(records[i]));
    }
    return out;
}

template <typename T>
py::tuple list_column(ListColumn<T> c) {
    return py::make_tuple(own(std::move(c.values)), own(std::move(c.ends)));
}

// A copy of an array that must have this type already (native byte order, contiguous).
template <typename T>
std::vector<T> copy_of(const py::array& array, const char* name) {
    if (array.itemsize() != sizeof(T) || (array.flags() & py::array::c_style) == 0 ||
        array.dtype().byteorder() == '>') {
        throw CoreError(std::string(name) + ": wrong type or not contiguous");
    }
    const auto* data = static_cast<const T*>(array.data());
    return {data, data + array.size()};
}

}  // namespace

py::dict log_columns(LogColumns c) {
    py::dict d;
    d["kind"] = column<std::uint8_t>(c.records, [](const Record& r) { return static_cast<int>(r.kind); });
    d["detail"] = column<std::uint8_t>(c.records, [](const Record& r) { return r.detail; });
    d["blocking"] = column<bool>(c.records, [](const Record& r) { return r.blocking; });
    d["iteration"] = column<std::int32_t>(c.records, [](const Record& r) { return r.iteration; });
    d["layer"] = column<std::int32_t>(c.records, [](const Record& r) { return r.layer; });
    d["target"] = column<std::int32_t>(c.records, [](const Record& r) { return r.target; });
    d["expert"] = column<std::int32_t>(c.records, [](const Record& r) { return r.expert; });
    d["device"] = column<std::int32_t>(c.records, [](const Record& r) { return r.device; });
    d["slot"] = column<std::int32_t>(c.records, [](const Record& r) { return r.slot; });
    d["evicts"] = column<std::int32_t>(c.records, [](const Record& r) { return r.evicts; });
    d["ticket"] = column<std::int64_t>(c.records, [](const Record& r) { return r.ticket; });
    d["offset"] = column<std::int64_t>(c.records, [](const Record& r) { return r.offset; });
    d["bytes"] = column<std::int64_t>(c.records, [](const Record& r) { return r.bytes; });
    d["work"] = column<std::int64_t>(c.records, [](const Record& r) { return r.work; });
    d["time_s"] = column<double>(c.records, [](const Record& r) { return r.time_s; });
    d["experts"] = list_column(std::move(c.experts));
    d["token_counts"] = list_column(std::move(c.token_counts));
    d["requests"] = list_column(std::move(c.requests));
    d["tokens"] = list_column(std::move(c.tokens));
    d["phases"] = list_column(std::move(c.phases));
    d["values"] = list_column(std::move(c.values));
    d["reason"] = py::make_tuple(py::bytes(c.reason.values.data(), c.reason.values.size()),
                                 own(std::move(c.reason.ends)));
    return d;
}

void bind_feed(py::module_& m) {
    py::class_<Feed>(m, "Feed")
        .def(py::init<int, int, int>(), py::arg("layers"), py::arg("experts"), py::arg("embedding_width"))
        .def(
            "add",
            [](Feed& feed, std::int64_t request, const py::array& gate, const py::array& experts,
               const py::array& token_counts, const py::array& offsets,
               const std::optional<py::array>& embedding, const std::map<int, py::array>& speculation) {
                RequestRouting routing;
                routing.iterations = gate.ndim() > 0 ? gate.shape(0) : 0;
                routing.gate = copy_of<std::uint16_t>(gate, "gate");
                routing.experts = copy_of<std::uint16_t>(experts, "experts");
                routing.token_counts = copy_of<std::int32_t>(token_counts, "token_counts");
                routing.offsets = copy_of<std::int64_t>(offsets, "offsets");
                if (embedding) {
                    routing.embedding = copy_of<std::uint16_t>(*embedding, "embedding");
                }
                for (const auto& [distance, rows] : speculation) {
                    routing.speculation[distance] = copy_of<std::uint16_t>(rows, "speculation");
                }
                const py::gil_scoped_release release;
                feed.add(request, std::move(routing));
            },
            py::arg("request"), py::arg("gate"), py::arg("experts"), py::arg("token_counts"),
            py::arg("offsets"), py::arg("embedding"), py::arg("speculation") = std::map<int, py::array>{})
        .def("remove", &Feed::remove, py::arg("request"), py::call_guard<py::gil_scoped_release>())
        .def(
            "select",
            [](Feed& feed, const std::vector<std::int64_t>& requests,
               const std::vector<std::int64_t>& iterations, const std::vector<std::int32_t>& tokens,
               bool prefill) {
                const py::gil_scoped_release release;
                feed.select(requests, iterations, tokens, prefill ? Phase::prefill : Phase::decode);
            },
            py::arg("requests"), py::arg("iterations"), py::arg("tokens"), py::arg("prefill"))
        .def("begin_iteration", &Feed::begin_iteration, py::arg("core"), py::arg("time_s") = 0.0,
             py::call_guard<py::gil_scoped_release>())
        .def("gate", &Feed::gate, py::arg("core"), py::arg("layer"), py::arg("time_s") = 0.0,
             py::call_guard<py::gil_scoped_release>())
        .def("speculation", &Feed::speculation, py::arg("core"), py::arg("layer"), py::arg("target"),
             py::arg("time_s") = 0.0, py::call_guard<py::gil_scoped_release>())
        .def("token_counts",
             [](const Feed& feed) {
                 const auto counts = feed.token_counts();
                 py::array_t<std::int32_t> out({feed.layers(), feed.experts()});
                 std::copy(counts.begin(), counts.end(), out.mutable_data());
                 return out;
             })
        .def(
            "foresee",
            [](Feed& feed, Core& core, std::int64_t step, const std::vector<std::int64_t>& requests,
               const std::vector<std::int64_t>& from, int count,
               double time_s) { return feed.foresee(core, step, requests, from, count, time_s); },
            py::arg("core"), py::arg("step"), py::arg("requests"), py::arg("from_iteration"),
            py::arg("count"), py::arg("time_s") = 0.0, py::call_guard<py::gil_scoped_release>());
}

}  // namespace finemoe::bindings
