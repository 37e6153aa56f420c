// The map store with its searches, and the δ rule, on their own: for filling a store, tests and benchmarks.
#include <algorithm>
#include <mutex>

#include "bindings.hpp"
#include "search/activation_searcher.hpp"
#include "search/searcher.hpp"
#include "search/select.hpp"

namespace finemoe::bindings {

namespace {

// A searcher has no lock of its own; from Python several threads may reach it.
struct LockedSearcher {
    explicit LockedSearcher(const CoreConfig& config) : engine(make_search_engine(config)) {}

    template <typename Engine>
    Engine& as() {
        auto* found = dynamic_cast<Engine*>(engine.get());
        if (found == nullptr) {
            throw CoreError("the searcher is of another predictor");
        }
        return *found;
    }

    std::unique_ptr<SearchEngine> engine;
    std::mutex mutex;
};

using Results = std::vector<std::vector<std::pair<int, float>>>;

// One iteration's searches for B rows: the semantic one (with embeddings), then the trajectory search after
// each layer that has a target. Returns (place, score) of each search and row; place −1: none.
Results search_rows(LockedSearcher& locked, std::size_t rows, std::span<const std::uint16_t> gates,
                    std::span<const std::uint16_t> embeddings) {
    Searcher& searcher = locked.as<Searcher>();
    const CoreConfig& config = searcher.config();
    if (rows < 1 || gates.size() != rows * static_cast<std::size_t>(config.total_experts()) ||
        (!embeddings.empty() &&
         embeddings.size() != rows * static_cast<std::size_t>(config.embedding_width))) {
        throw CoreError("search: gate is not [L, J] of each row or embedding not [h] of each");
    }
    const py::gil_scoped_release release;
    const std::scoped_lock lock(locked.mutex);
    const auto iteration = make_iteration(gates, embeddings, rows, config);
    Results found;
    const auto run = [&](SearchKind kind, int layer, int target) {
        const SearchResult r = searcher.run(SearchRequest{0, kind, layer, target, -1, iteration});
        found.emplace_back();
        for (std::size_t i = 0; i < rows; ++i) {
            found.back().emplace_back(r.maps[i], r.scores[i]);
        }
    };
    if (searcher.store().size() == 0) {
        return found;
    }
    const int distance = std::min(config.prefetch_distance, config.layers);
    if (config.semantic && std::any_of(iteration->rows.begin(), iteration->rows.end(),
                                       [](const Row& row) { return row.has_embedding; })) {
        run(SearchKind::semantic, -1, distance - 1);
    }
    for (int l = 0; config.trajectory && l + distance < config.layers; ++l) {
        run(SearchKind::trajectory, l, l + distance);
    }
    return found;
}

std::vector<std::pair<int, float>> search_iteration(LockedSearcher& locked, const py::object& gate,
                                                    const py::object& embedding) {
    std::vector<std::pair<int, float>> found;
    for (const auto& rows : search_rows(locked, 1, to_halves(gate), to_halves(embedding))) {
        found.push_back(rows.front());
    }
    return found;
}

Results search_batch(LockedSearcher& locked, const py::array& gates, const py::object& embeddings) {
    const auto rows = gates.ndim() == 3 ? static_cast<std::size_t>(gates.shape(0)) : 0U;
    return search_rows(locked, rows, to_halves(gates), to_halves(embeddings));
}

void fill(LockedSearcher& locked, const py::object& gate, const py::object& embedding) {
    Searcher& searcher = locked.as<Searcher>();
    const auto gates = to_halves(gate);
    const auto raw = to_halves(embedding);
    const auto map = static_cast<std::size_t>(searcher.config().total_experts());
    const auto width = static_cast<std::size_t>(searcher.config().embedding_width);
    const std::size_t n = gates.size() / map;
    if (gates.size() != n * map || (!raw.empty() && raw.size() != n * width)) {
        throw CoreError("fill: gate is not [n, L, J] or embedding not [n, h]");
    }
    const py::gil_scoped_release release;
    const std::scoped_lock lock(locked.mutex);
    for (std::size_t i = 0; i < n; ++i) {
        const std::span<const std::uint16_t> one =
            raw.empty() ? std::span<const std::uint16_t>{} : std::span(raw).subspan(i * width, width);
        searcher.add(std::span(gates).subspan(i * map, map), one);
    }
}

void fill_counts(LockedSearcher& locked, const py::array_t<std::int64_t, py::array::c_style>& counts) {
    ActivationSearcher& searcher = locked.as<ActivationSearcher>();
    if (counts.size() != searcher.config().total_experts()) {
        throw CoreError("fill_counts: counts are not [L, J]");
    }
    const std::vector<std::int64_t> copy(counts.data(), counts.data() + counts.size());
    if (std::any_of(copy.begin(), copy.end(), [](std::int64_t n) { return n < 0; })) {
        throw CoreError("fill_counts: a count is negative");
    }
    const py::gil_scoped_release release;
    const std::scoped_lock lock(locked.mutex);
    searcher.add(copy);
}

}  // namespace

py::tuple store_tuple(const StoreContents& s, const CoreConfig& c) {
    const auto n = static_cast<py::ssize_t>(s.written.size());
    return py::make_tuple(halves_array(s.maps, {n, c.layers, c.experts}),
                          c.embedding_width > 0
                              ? py::object(halves_array(s.embeddings, {n, c.embedding_width}))
                              : py::object(py::none()),
                          s.written);
}

void bind_search(py::module_& m) {
    m.def(
        "select_experts",
        [](const py::array_t<float, py::array::c_style | py::array::forcecast>& p, float score, int top_k) {
            std::vector<char> chosen(static_cast<std::size_t>(p.size()), 0), taken;
            select_experts({p.data(), static_cast<std::size_t>(p.size())}, delta_of(score), top_k, chosen,
                           taken);
            std::vector<int> out;
            for (std::size_t j = 0; j < chosen.size(); ++j) {
                if (chosen[j] != 0) {
                    out.push_back(static_cast<int>(j));
                }
            }
            return out;
        },
        py::arg("p"), py::arg("score"), py::arg("top_k"), "The δ set of one searched row, ascending.");

    m.def("search_instructions", &search_instructions,
          "Instruction sets that searches can use on this processor, the widest (the default) first.");
    m.def("use_search_instructions", &use_search_instructions, py::arg("name"),
          "For tests, while nothing searches: one of search_instructions().");

    py::class_<LockedSearcher>(m, "Searcher")
        .def(py::init<const CoreConfig&>(), py::arg("config"))
        .def("fill", &fill, py::arg("gate"), py::arg("embedding"),
             "Adds iterations, gate [n, L, J] and embedding [n, h] or None, by the redundancy rule.")
        .def("fill_counts", &fill_counts, py::arg("counts"),
             "Adds one request's tokens per expert, int64 [L, J] (predictor activation).")
        .def("contents",
             [](LockedSearcher& locked) {
                 StoreContents contents;
                 {
                     const py::gil_scoped_release release;
                     const std::scoped_lock lock(locked.mutex);
                     contents = locked.engine->contents();
                 }
                 return store_tuple(contents, locked.engine->config());
             })
        .def("search_iteration", &search_iteration, py::arg("gate"), py::arg("embedding"),
             "(place, score) of each search of one row, gate [L, J] and embedding [h] or None.")
        .def("search_batch", &search_batch, py::arg("gates"), py::arg("embeddings"),
             "The same for rows searched together, gates [B, L, J] and embeddings [B, h] or None: per search "
             "a "
             "list with one entry per row.");
}

}  // namespace finemoe::bindings
