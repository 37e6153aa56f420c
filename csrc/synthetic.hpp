// The arithmetic of synthetic routing (traces/synthetic.py) on whole rows: logits, gate rows and embeddings.
// Every operation has one order and rounds once, so the same input gives the same bits on every processor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace finemoe {

// A stream of uniform numbers per column (xorshift32): each row takes one number from each.
using NoiseStreams = std::vector<std::uint32_t>;

// logits[n, W] = latents[n, D] · readout[D, W] + bias[W] + noise[W] · strength[n] · u, u uniform in [−½, ½).
// All are row-major f32; a stream must not be 0. CoreError where sizes do not fit together.
std::vector<float> synthetic_logits(std::span<const float> latents, std::span<const float> readout,
                                    std::span<const float> bias, std::span<const float> noise,
                                    std::span<const float> strength, NoiseStreams& streams);

// Rows of J logits as probabilities in f16, and the top K of each in ascending order (of equals the lower
// one). Logits beyond ±80 count as ±80.
struct SyntheticGate {
    std::vector<std::uint16_t> rows, chosen;  // [logits], [logits / J · K]
};
SyntheticGate synthetic_gate(std::span<const float> logits, int experts, int top_k);

// f16 rows [n, h]: mean[h] + table[kinds[i]] + noise · u.
std::vector<std::uint16_t> synthetic_embeddings(std::span<const std::int64_t> kinds,
                                                std::span<const float> table, std::span<const float> mean,
                                                float noise, NoiseStreams& streams);

// What a prompt's rows [n, W], W = L · J, with their top K come to: the mean row in f16 and each expert's
// tokens.
struct SyntheticPrompt {
    std::vector<std::uint16_t> mean;   // [W]
    std::vector<std::int64_t> counts;  // [W]
};
SyntheticPrompt synthetic_prompt(std::span<const std::uint16_t> rows, std::span<const std::uint16_t> chosen,
                                 std::size_t width, int experts, int top_k);

// Which earlier token each of n tokens repeats, itself where none: [n], places counted from the first of
// `stock` tokens before them. draws[n, 3] are uniform in [0, 1). A token after a repeated one repeats the
// next one of its source with chance `run`; otherwise, with chance `repeat`, any earlier one. What is
// repeated stands for what it repeats itself.
std::vector<std::int64_t> synthetic_repeats(std::span<const double> draws, std::size_t stock, double repeat,
                                            double run);

// Turns noise [n, D] into stationary series: x[t] = r · x[t − 1] + √(1 − r²) · noise[t], x[0] = noise[0].
void synthetic_drift(std::span<float> noise, std::size_t dimensions, float correlation);

}  // namespace finemoe
