// The arithmetic of synthetic routing.
#include "bindings.hpp"
#include "synthetic.hpp"

namespace finemoe::bindings {

namespace {

using Floats = py::array_t<float, py::array::c_style>;
using Streams = py::array_t<std::uint32_t, py::array::c_style>;

std::span<const float> span_of(const Floats& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}

// `make` advances a copy of the streams, which then becomes the array.
template <typename Make>
auto with_streams(Streams& array, Make&& make) {
    NoiseStreams streams(array.data(), array.data() + array.size());
    auto made = [&] {
        const py::gil_scoped_release release;
        return make(streams);
    }();
    std::copy(streams.begin(), streams.end(), array.mutable_data());
    return made;
}

}  // namespace

void bind_synthetic(py::module_& m) {
    m.def(
        "synthetic_logits",
        [](const Floats& latents, const Floats& readout, const Floats& bias, const Floats& noise,
           const Floats& strength, Streams& streams) {
            const auto made = with_streams(streams, [&](NoiseStreams& s) {
                return synthetic_logits(span_of(latents), span_of(readout), span_of(bias), span_of(noise),
                                        span_of(strength), s);
            });
            const auto width = bias.size();
            return py::array_t<float>({static_cast<py::ssize_t>(made.size()) / width, width}, made.data());
        },
        py::arg("latents").noconvert(), py::arg("readout").noconvert(), py::arg("bias").noconvert(),
        py::arg("noise").noconvert(), py::arg("strength").noconvert(), py::arg("streams").noconvert(),
        "f32 logits [n, W] of latents [n, D], readout [D, W], bias and noise [W], strength of the noise [n]; "
        "streams [W] move on by n.");
    m.def(
        "synthetic_gate",
        [](const Floats& logits, int experts, int top_k) {
            const SyntheticGate made = [&] {
                const py::gil_scoped_release release;
                return synthetic_gate(span_of(logits), experts, top_k);
            }();
            const auto rows = logits.size() / experts;
            return py::make_tuple(
                halves_array(made.rows, {rows, experts}),
                py::array_t<std::uint16_t>({rows, static_cast<py::ssize_t>(top_k)}, made.chosen.data()));
        },
        py::arg("logits").noconvert(), py::arg("experts"), py::arg("top_k"),
        "f16 probabilities [rows, J] and the top K of each [rows, K], ascending.");
    m.def(
        "synthetic_embeddings",
        [](const py::array_t<std::int64_t, py::array::c_style>& kinds, const Floats& table,
           const Floats& mean, float noise, Streams& streams) {
            const auto made = with_streams(streams, [&](NoiseStreams& s) {
                return synthetic_embeddings({kinds.data(), static_cast<std::size_t>(kinds.size())},
                                            span_of(table), span_of(mean), noise, s);
            });
            return halves_array(made, {kinds.size(), mean.size()});
        },
        py::arg("kinds").noconvert(), py::arg("table").noconvert(), py::arg("mean").noconvert(),
        py::arg("noise"), py::arg("streams").noconvert(),
        "f16 rows [n, h]: mean [h] + table [kinds, h][kinds[i]] + noise.");
    m.def(
        "synthetic_prompt",
        [](const py::array& rows, const py::array_t<std::uint16_t, py::array::c_style>& chosen) {
            if (rows.ndim() != 3 || chosen.ndim() != 3) {
                throw CoreError("synthetic_prompt: rows are not [n, L, J] or chosen not [n, L, K]");
            }
            const auto halves = to_halves(rows);
            const auto layers = rows.shape(1), experts = rows.shape(2);
            const SyntheticPrompt made =
                synthetic_prompt(halves, {chosen.data(), static_cast<std::size_t>(chosen.size())},
                                 static_cast<std::size_t>(layers * experts), static_cast<int>(experts),
                                 static_cast<int>(chosen.shape(2)));
            return py::make_tuple(halves_array(made.mean, {layers, experts}),
                                  py::array_t<std::int64_t>({layers, experts}, made.counts.data()));
        },
        py::arg("rows"), py::arg("chosen").noconvert(),
        "Of f16 rows [n, L, J] and their top K [n, L, K]: the mean row [L, J] and the tokens per expert [L, "
        "J].");
    m.def(
        "synthetic_repeats",
        [](const py::array_t<double, py::array::c_style>& draws, std::size_t stock, double repeat,
           double run) {
            const auto source =
                synthetic_repeats({draws.data(), static_cast<std::size_t>(draws.size())}, stock, repeat, run);
            return py::array_t<std::int64_t>(static_cast<py::ssize_t>(source.size()), source.data());
        },
        py::arg("draws").noconvert(), py::arg("stock"), py::arg("repeat"), py::arg("run"),
        "Which of `stock` tokens and of those before it each of n tokens repeats, itself where none [n]; "
        "uniform "
        "draws f64 [n, 3].");
    m.def(
        "synthetic_drift",
        [](Floats& noise, float correlation) {
            if (noise.ndim() != 2) {
                throw CoreError("synthetic_drift: noise is not [n, D]");
            }
            synthetic_drift({noise.mutable_data(), static_cast<std::size_t>(noise.size())},
                            static_cast<std::size_t>(noise.shape(1)), correlation);
        },
        py::arg("noise").noconvert(), py::arg("correlation"),
        "Turns f32 noise [n, D] into series with that correlation from row to row, in place.");
}

}  // namespace finemoe::bindings
