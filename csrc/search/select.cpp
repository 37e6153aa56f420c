#include "search/select.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace finemoe {

namespace {

// Probabilities are not negative, so their bits sort as they do. Below them stands the expert's place from
// the end: keys are all different, and of equal probabilities the lower expert has the larger key.
std::uint64_t key_of(float p, std::size_t j) {
    return std::uint64_t{std::bit_cast<std::uint32_t>(p + 0.0F)} << 32U | (0xFFFFFFFFU - j);
}

// Marks the kTop experts with the largest keys, which cannot be predicted: without branches. Returns their
// mass, added in descending order.
template <std::size_t kTop>
double mark_largest(std::span<const float> p, std::vector<char>& taken) {
    std::array<std::uint64_t, kTop> held{};
    for (std::size_t j = 0; j < p.size(); ++j) {
        std::uint64_t key = key_of(p[j], j);
        for (std::size_t k = 0; k < kTop; ++k) {
            const std::uint64_t smaller = std::min(held[k], key);
            held[k] = std::max(held[k], key);
            key = smaller;
        }
    }
    double mass = 0.0;
    for (const std::uint64_t key : held) {
        const std::size_t j = 0xFFFFFFFFU - (key & 0xFFFFFFFFU);
        taken[j] = 1;
        mass += static_cast<double>(p[j]);
    }
    return mass;
}

using Mark = double (*)(std::span<const float>, std::vector<char>&);
constexpr std::array<Mark, 8> kMark = {mark_largest<1>, mark_largest<2>, mark_largest<3>, mark_largest<4>,
                                       mark_largest<5>, mark_largest<6>, mark_largest<7>, mark_largest<8>};

}  // namespace

// Few experts are taken beyond the first K, so repeated scans beat a sort.
void select_experts(std::span<const float> p, double delta, int top_k, std::vector<char>& chosen,
                    std::vector<char>& taken) {
    taken.assign(p.size(), 0);
    const std::size_t least = std::min(static_cast<std::size_t>(top_k), p.size());
    double mass = 0.0;
    std::size_t count = 0;
    if (least >= 1 && least <= kMark.size()) {
        mass = kMark[least - 1](p, taken);
        count = least;
    }
    for (; count < p.size() && (count < least || mass < delta); ++count) {
        std::size_t best = p.size();
        for (std::size_t j = 0; j < p.size(); ++j) {
            if (taken[j] == 0 && (best == p.size() || p[j] > p[best])) {
                best = j;
            }
        }
        if (count >= least && p[best] <= 0.0F) {
            break;
        }
        taken[best] = 1;
        mass += static_cast<double>(p[best]);
    }
    for (std::size_t j = 0; j < p.size(); ++j) {
        chosen[j] = static_cast<char>(chosen[j] | taken[j]);
    }
}

}  // namespace finemoe
