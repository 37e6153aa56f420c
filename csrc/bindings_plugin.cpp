// A policy written in Python, asked from inside the core's events: the core's mutex is held, the GIL is
// taken.
#include <string>

#include "bindings.hpp"

namespace finemoe::bindings {

namespace {

UserPredictions to_predictions(const py::object& returned, const char* method) {
    UserPredictions out;
    const std::string what = std::string("the policy's ") + method + " must return {layer: row of J values}";
    if (!py::isinstance<py::dict>(returned)) {
        throw CoreError(what + ", not " + std::string(py::repr(returned)));
    }
    for (const auto& [layer, row] : returned.cast<py::dict>()) {
        const auto values = py::array_t<float, py::array::c_style | py::array::forcecast>::ensure(row);
        if (!values || values.ndim() != 1 || !py::isinstance<py::int_>(layer)) {
            PyErr_Clear();
            throw CoreError(what + ": an entry is none");
        }
        out[layer.cast<int>()] = std::vector<float>(values.data(), values.data() + values.size());
    }
    return out;
}

template <typename T>
py::array matrix(std::size_t rows, std::span<const T> values) {
    const auto width = static_cast<py::ssize_t>(rows == 0 ? 0 : values.size() / rows);
    py::array_t<T> out({static_cast<py::ssize_t>(rows), width});
    std::copy(values.begin(), values.end(), out.mutable_data());
    return out;
}

class PythonPolicy final : public UserPolicy {
  public:
    explicit PythonPolicy(py::object policy) : policy_(std::move(policy)) {}
    PythonPolicy(const PythonPolicy&) = delete;
    PythonPolicy& operator=(const PythonPolicy&) = delete;
    ~PythonPolicy() override {
        const py::gil_scoped_acquire gil;
        policy_ = py::object();
    }

    UserPredictions begin_iteration(const std::vector<Row>& rows,
                                    std::span<const std::uint16_t> units) override {
        const py::gil_scoped_acquire gil;
        rows_ = rows.size();
        py::list listed;
        for (const Row& row : rows) {
            listed.append(
                py::make_tuple(row.request, row.phase == Phase::prefill ? "prefill" : "decode", row.tokens));
        }
        const py::object embeddings = units.empty()
                                          ? py::object(py::none())
                                          : halves_array({units.begin(), units.end()},
                                                         {static_cast<py::ssize_t>(rows_),
                                                          static_cast<py::ssize_t>(units.size() / rows_)});
        return to_predictions(policy_.attr("begin_iteration")(listed, embeddings), "begin_iteration");
    }

    UserPredictions gate(int layer, std::span<const std::uint16_t> probabilities,
                         std::span<const std::int32_t> row_counts) override {
        const py::gil_scoped_acquire gil;
        std::vector<float> floats(probabilities.size());
        std::transform(probabilities.begin(), probabilities.end(), floats.begin(), half_to_float);
        return to_predictions(policy_.attr("gate")(layer, matrix<float>(rows_, floats),
                                                   matrix<std::int32_t>(rows_, row_counts)),
                              "gate");
    }

    void end_iteration(const std::vector<std::int64_t>& finished) override {
        const py::gil_scoped_acquire gil;
        policy_.attr("end_iteration")(finished);
    }

    double eviction_key(const EvictionView& view) override {
        const py::gil_scoped_acquire gil;
        const py::object key = policy_.attr("eviction_key")(view);
        const double value = PyFloat_AsDouble(key.ptr());
        if (value == -1.0 && PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            throw CoreError("the policy's eviction_key must return a number, not " +
                            std::string(py::repr(key)));
        }
        return value;
    }

  private:
    py::object policy_;
    std::size_t rows_ = 0;
};

}  // namespace

std::shared_ptr<UserPolicy> make_policy(const py::object& policy) {
    return policy.is_none() ? nullptr : std::make_shared<PythonPolicy>(policy);
}

void bind_plugin(py::module_& m) {
    py::class_<EvictionView>(m, "ExpertView")
        .def_readonly("layer", &EvictionView::layer)
        .def_property_readonly("expert", [](const EvictionView& v) { return v.expert - v.layer * v.experts; })
        .def_readonly("probability", &EvictionView::probability)
        .def_readonly("frequency", &EvictionView::frequency)
        .def_readonly("last_used", &EvictionView::stamp)
        .def_readonly("layer_now", &EvictionView::layer_now)
        .def_readonly("layers", &EvictionView::layers);
}

}  // namespace finemoe::bindings
