// The δ rule: which experts to prefetch from a searched row (paper §4.3).
#pragma once

#include <span>
#include <vector>

namespace finemoe {

// δ = clip(1 − score, 0, 1): the less alike the found map is, the more of its mass is prefetched.
inline double delta_of(float score) {
    const double delta = 1.0 - static_cast<double>(score);
    return delta < 0.0 ? 0.0 : (delta > 1.0 ? 1.0 : delta);
}

// The smallest set of most probable experts whose probabilities sum to at least δ, never fewer than top_k,
// and none of probability 0 beyond those. Marks chosen[j]; `taken` is scratch. Ties: the lower expert.
void select_experts(std::span<const float> p, double delta, int top_k, std::vector<char>& chosen,
                    std::vector<char>& taken);

}  // namespace finemoe
