#include "synthetic.hpp"

#include <algorithm>
#include <cmath>

#include "f16.hpp"
#include "types.hpp"

namespace finemoe {
namespace {

constexpr float kLargestLogit = 80.0F;
constexpr float kRounding = 0x1.8p23F;        // adding and taking it away rounds to a whole number
constexpr std::size_t kColumnsTogether = 32;  // what FINEMOE_LOGITS takes at a time, at most
constexpr std::size_t kMostLanes = 8;
constexpr std::size_t kLogitsTogether = 4096;  // whose scratch stays in the first-level cache

void need(bool condition, const char* problem) {
    if (!condition) {
        throw CoreError(problem);
    }
}

std::size_t padded(std::size_t count, std::size_t to) { return (count + to - 1) / to * to; }

// The rows with fewer columns, or with zeros behind them.
template <typename T>
std::vector<T> with_width(std::span<const T> values, std::size_t width, std::size_t other) {
    std::vector<T> out(values.size() / width * other);
    const std::size_t columns = std::min(width, other);
    for (std::size_t from = 0, to = 0; from < values.size(); from += width, to += other) {
        for (std::size_t i = 0; i < columns; ++i) {
            out[to + i] = values[from + i];
        }
    }
    return out;
}

// Without contraction both instruction sets give the same bits.
#define FINEMOE_TARGET
#define FINEMOE_LANES 4
#define FINEMOE_LOGITS logits_generic
#define FINEMOE_GATES gates_generic
#define FINEMOE_EMBEDDINGS embeddings_generic
#include "synthetic_kernel.hpp"
#undef FINEMOE_TARGET
#undef FINEMOE_LANES
#undef FINEMOE_LOGITS
#undef FINEMOE_GATES
#undef FINEMOE_EMBEDDINGS
#ifdef __x86_64__
#define FINEMOE_TARGET __attribute__((target("avx2")))
#define FINEMOE_LANES 8
#define FINEMOE_LOGITS logits_avx2
#define FINEMOE_GATES gates_avx2
#define FINEMOE_EMBEDDINGS embeddings_avx2
#include "synthetic_kernel.hpp"
const bool wide = __builtin_cpu_supports("avx2") != 0;
const auto run_logits = wide ? logits_avx2 : logits_generic;
const auto run_gates = wide ? gates_avx2 : gates_generic;
const auto run_embeddings = wide ? embeddings_avx2 : embeddings_generic;
#else
const auto run_logits = logits_generic;
const auto run_gates = gates_generic;
const auto run_embeddings = embeddings_generic;
#endif

}  // namespace

std::vector<float> synthetic_logits(std::span<const float> latents, std::span<const float> readout,
                                    std::span<const float> bias, std::span<const float> noise,
                                    std::span<const float> strength, NoiseStreams& streams) {
    const std::size_t width = bias.size();
    need(width > 0 && noise.size() == width && streams.size() == width && readout.size() % width == 0,
         "synthetic_logits: readout, bias, noise and streams differ in columns");
    const std::size_t dimensions = readout.size() / width;
    need(dimensions > 0 && latents.size() % dimensions == 0, "synthetic_logits: latents are not [n, D]");
    const std::size_t rows = latents.size() / dimensions;
    need(strength.size() == rows, "synthetic_logits: strength is not [n]");
    const std::size_t whole = padded(width, kColumnsTogether);
    if (whole == width) {
        std::vector<float> out(rows * width);
        run_logits(latents.data(), rows, dimensions, readout.data(), width, bias.data(), noise.data(),
                   strength.data(), streams.data(), out.data());
        return out;
    }
    NoiseStreams widened = with_width(std::span<const std::uint32_t>(streams), width, whole);
    const auto wide = [&](std::span<const float> values) { return with_width(values, width, whole); };
    std::vector<float> out(rows * whole);
    run_logits(latents.data(), rows, dimensions, wide(readout).data(), whole, wide(bias).data(),
               wide(noise).data(), strength.data(), widened.data(), out.data());
    streams = with_width(std::span<const std::uint32_t>(widened), whole, width);
    return with_width(std::span<const float>(out), whole, width);
}

SyntheticGate synthetic_gate(std::span<const float> logits, int experts, int top_k) {
    need(experts >= 1 && experts <= 65536 && top_k >= 1 && top_k <= experts,
         "synthetic_gate: experts or top_k");
    const auto width = static_cast<std::size_t>(experts);
    const auto chosen = static_cast<std::size_t>(top_k);
    need(logits.size() % width == 0, "synthetic_gate: logits are not rows of J");
    SyntheticGate made;
    made.rows.resize(logits.size());
    made.chosen.resize(logits.size() / width * chosen);
    // Some rows at a time, so that everything stays in the cache.
    const std::size_t most = padded(std::max<std::size_t>(1U, kLogitsTogether / width), kMostLanes);
    std::vector<float> shares(most * width);
    std::vector<std::uint16_t> halves(most * width);
    std::vector<std::int32_t> held(chosen * kMostLanes);
    for (std::size_t from = 0; from < logits.size(); from += most * width) {
        const std::size_t count = std::min(most * width, logits.size() - from);
        std::copy_n(logits.data() + from, count, shares.data());
        run_gates(shares.data(), count, width, chosen, held.data(), halves.data(),
                  made.chosen.data() + from / width * chosen);
        std::copy_n(halves.data(), count, made.rows.data() + from);
    }
    return made;
}

std::vector<std::uint16_t> synthetic_embeddings(std::span<const std::int64_t> kinds,
                                                std::span<const float> table, std::span<const float> mean,
                                                float noise, NoiseStreams& streams) {
    const std::size_t width = mean.size();
    need(width > 0 && streams.size() == width && table.size() % width == 0,
         "synthetic_embeddings: table, mean and streams differ in columns");
    const auto known = static_cast<std::int64_t>(table.size() / width);
    need(
        std::all_of(kinds.begin(), kinds.end(), [&](std::int64_t kind) { return kind >= 0 && kind < known; }),
        "synthetic_embeddings: no such kind");
    const std::size_t whole = padded(width, kMostLanes);
    std::vector<std::uint16_t> out(kinds.size() * whole);
    if (whole == width) {
        run_embeddings(kinds.data(), kinds.size(), table.data(), width, mean.data(), noise, streams.data(),
                       out.data());
        return out;
    }
    NoiseStreams widened = with_width(std::span<const std::uint32_t>(streams), width, whole);
    run_embeddings(kinds.data(), kinds.size(), with_width(table, width, whole).data(), whole,
                   with_width(mean, width, whole).data(), noise, widened.data(), out.data());
    streams = with_width(std::span<const std::uint32_t>(widened), whole, width);
    return with_width(std::span<const std::uint16_t>(out), whole, width);
}

SyntheticPrompt synthetic_prompt(std::span<const std::uint16_t> rows, std::span<const std::uint16_t> chosen,
                                 std::size_t width, int experts, int top_k) {
    need(width > 0 && experts >= 1 && top_k >= 1 && width % static_cast<std::size_t>(experts) == 0 &&
             !rows.empty() && rows.size() % width == 0,
         "synthetic_prompt: rows are not [n, L, J]");
    const auto in_layer = static_cast<std::size_t>(top_k);
    const std::size_t layers = width / static_cast<std::size_t>(experts), n = rows.size() / width;
    need(chosen.size() == n * layers * in_layer, "synthetic_prompt: chosen is not [n, L, K]");
    need(std::all_of(chosen.begin(), chosen.end(), [&](std::uint16_t e) { return e < experts; }),
         "synthetic_prompt: an expert is not below J");
    std::vector<float> sums(width);
    SyntheticPrompt prompt;
    prompt.mean.resize(width);
    prompt.counts.resize(width);
    for (std::size_t r = 0; r < n; ++r) {
        for (std::size_t i = 0; i < width; ++i) {
            sums[i] += half_to_float(rows[r * width + i]);
        }
        const std::uint16_t* next = chosen.data() + r * layers * in_layer;
        for (std::size_t first = 0; first < width; first += static_cast<std::size_t>(experts)) {
            for (std::size_t k = 0; k < in_layer; ++k) {
                ++prompt.counts[first + *next++];
            }
        }
    }
    std::transform(sums.begin(), sums.end(), prompt.mean.begin(),
                   [&](float sum) { return float_to_half(sum / static_cast<float>(n)); });
    return prompt;
}

std::vector<std::int64_t> synthetic_repeats(std::span<const double> draws, std::size_t stock, double repeat,
                                            double run) {
    need(draws.size() % 3 == 0, "synthetic_repeats: draws are not [n, 3]");
    std::vector<std::int64_t> source(draws.size() / 3);
    const std::size_t none = stock + source.size();
    std::size_t last = none;  // what the token before repeated
    for (std::size_t t = 0; t < source.size(); ++t) {
        const double* draw = draws.data() + 3 * t;
        const std::size_t place = stock + t;
        if (last < none && draw[0] < run) {
            ++last;
        } else if (place > 0 && draw[1] < repeat) {
            last = std::min(static_cast<std::size_t>(draw[2] * static_cast<double>(place)), place - 1);
        } else {
            last = none;
        }
        const std::size_t from = last < none ? last : place;
        source[t] = from >= stock && from < place ? source[from - stock] : static_cast<std::int64_t>(from);
    }
    return source;
}

void synthetic_drift(std::span<float> noise, std::size_t dimensions, float correlation) {
    need(dimensions > 0 && noise.size() % dimensions == 0, "synthetic_drift: noise is not [n, D]");
    need(correlation >= 0.0F && correlation < 1.0F, "synthetic_drift: correlation is not in [0, 1)");
    const float fresh = std::sqrt(1.0F - correlation * correlation);
    for (std::size_t i = dimensions; i < noise.size(); ++i) {
        noise[i] = correlation * noise[i - dimensions] + fresh * noise[i];
    }
}

}  // namespace finemoe
