#include "search/block_matrix.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <string>

#include "types.hpp"

namespace finemoe {
namespace {

constexpr int kTopLanes = 16;
constexpr std::size_t kRowsTogether = 4;
constexpr int kBlockWords = kBlock / 2;
constexpr int kPrefetchWords = 2048;  // 8 KiB ahead: the hardware stops at the end of a page
constexpr float kLowest = -std::numeric_limits<float>::infinity();
alignas(64) constexpr std::int32_t kLaneNumbers[kTopLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                              8, 9, 10, 11, 12, 13, 14, 15};

// A code is a half's sign, five bits of exponent and ten of mantissa, subnormal halves renormalised: shifted
// to its place in a float it reads as value · 2^-102, exactly, and the query's 2^102 takes the factor back.
constexpr float kCodeScale = 0x1p-102F;
constexpr float kQueryScale = 0x1p102F;
// Masks of the two codes of a word: after the shift where signs may occur, before or after it where not.
constexpr std::int32_t kSignedLow = static_cast<std::int32_t>(0x8FFFFFFFU);
constexpr std::int32_t kSignedHigh = static_cast<std::int32_t>(0x8FFFE000U);
constexpr std::uint32_t kLow = 0x7FFFU;
constexpr std::uint32_t kHigh = 0x0FFFE000U;

std::uint32_t encode(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value * kCodeScale);
    return ((bits >> 16U) & 0x8000U) | ((bits >> 13U) & 0x7FFFU);
}

float decode(std::uint32_t code) {
    return std::bit_cast<float>(((code & 0x8000U) << 16U) | ((code & 0x7FFFU) << 13U)) * kQueryScale;
}

// Lanes never mix, so all instruction sets agree bit for bit (tests/test_search_instructions.py).
#define FINEMOE_KERNEL score_generic
#define FINEMOE_TARGET
#define FINEMOE_LANES 4
#define FINEMOE_WORDS 1
#include "search/score_kernel.hpp"
#undef FINEMOE_KERNEL
#undef FINEMOE_TARGET
#undef FINEMOE_LANES
#undef FINEMOE_WORDS
#ifdef __x86_64__
#define FINEMOE_KERNEL score_avx2
#define FINEMOE_TARGET __attribute__((target("avx2")))
#define FINEMOE_LANES 8
#define FINEMOE_WORDS 1
#include "search/score_kernel.hpp"
#undef FINEMOE_KERNEL
#undef FINEMOE_TARGET
#undef FINEMOE_LANES
#undef FINEMOE_WORDS
#define FINEMOE_KERNEL score_avx512
#define FINEMOE_TARGET __attribute__((target("avx512f")))
#define FINEMOE_LANES 16
#define FINEMOE_WORDS 2
#include "search/score_kernel.hpp"
#endif

using Kernel = void (*)(const std::uint32_t*, const float* const*, int, int, bool, float* const*,
                        const float*, float* const*);

// Kernels for 1 … kRowsTogether rows.
using KernelByRows = std::array<Kernel, kRowsTogether>;
struct Kernels {
    const char* instructions;
    KernelByRows positive, any;
};

#define FINEMOE_BY_ROWS(kernel, is_signed) \
    {kernel<is_signed, 1>, kernel<is_signed, 2>, kernel<is_signed, 3>, kernel<is_signed, 4>}

// Those that this processor has, the widest first.
std::vector<Kernels> available() {
    std::vector<Kernels> found;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") != 0) {
        found.push_back(
            {"avx512f", FINEMOE_BY_ROWS(score_avx512, false), FINEMOE_BY_ROWS(score_avx512, true)});
    }
    if (__builtin_cpu_supports("avx2") != 0) {
        found.push_back({"avx2", FINEMOE_BY_ROWS(score_avx2, false), FINEMOE_BY_ROWS(score_avx2, true)});
    }
#endif
    found.push_back({"generic", FINEMOE_BY_ROWS(score_generic, false), FINEMOE_BY_ROWS(score_generic, true)});
    return found;
}

Kernels kernels = available().front();

std::size_t tops_for(int columns) { return static_cast<std::size_t>(blocks_for(columns) + 1) * kTopLanes; }

// How many of the `count` values, `step` apart, are `wanted`, and the place of the last one. Without
// branches: where the best key stands cannot be predicted.
struct Found {
    int times = 0, place = 0;
};
std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
Found find(const float* values, int count, int step, float wanted) {
    Found found;
    for (int i = 0; i < count; ++i) {
        const bool same = bits_of(values[static_cast<std::ptrdiff_t>(i) * step]) == bits_of(wanted);
        found.times += same ? 1 : 0;
        found.place = same ? i : found.place;
    }
    return found;
}

// The largest key and its most recently written column, found through the tops.
Best best_of(const float* sums, const Scale& scale, const float* tops) {
    const int columns = scale.columns(), blocks = blocks_for(columns);
    const float* lanes = tops + static_cast<std::ptrdiff_t>(blocks) * kTopLanes;
    std::array<float, 4> largest = {lanes[0], lanes[1], lanes[2],
                                    lanes[3]};  // four chains: one waits too long
    for (int l = 4; l < kTopLanes; l += 4) {
        for (int i = 0; i < 4; ++i) {
            auto& held = largest[static_cast<std::size_t>(i)];
            held = lanes[l + i] > held ? lanes[l + i] : held;
        }
    }
    Best best{-1, std::max(std::max(largest[0], largest[1]), std::max(largest[2], largest[3]))};
    const Found lane = find(lanes, kTopLanes, 1, best.key);
    const Found block = find(tops + lane.place, blocks, kTopLanes, best.key);
    const int first = block.place * kBlock + lane.place;
    if (lane.times == 1 && block.times == 1) {  // of 8 columns
        int times = 0;
        for (int k = 0; k < kBlock / kTopLanes; ++k) {
            const int c = std::min(first + k * kTopLanes, columns - 1);
            const bool same = bits_of(sums[c] * scale.factors[c]) == bits_of(best.key);
            times += same && first + k * kTopLanes < columns ? 1 : 0;
            best.column = same ? c : best.column;
        }
        if (times == 1) {
            return best;
        }
    }
    best.column = -1;
    const auto consider = [&](int c) {  // several equal ones
        if (sums[c] * scale.factors[c] == best.key &&
            (best.column < 0 || scale.written[static_cast<std::size_t>(c)] >
                                    scale.written[static_cast<std::size_t>(best.column)])) {
            best.column = c;
        }
    };
    for (int l = 0; l < kTopLanes; ++l) {
        for (int b = 0; lanes[l] == best.key && b < blocks; ++b) {
            for (int c = b * kBlock + l; c < std::min((b + 1) * kBlock, columns); c += kTopLanes) {
                consider(c);
            }
        }
    }
    return best;
}

}  // namespace

BlockMatrix::BlockMatrix(int features, int capacity, Values values) : features_(features), values_(values) {
    words_.reserve(static_cast<std::size_t>(blocks_for(capacity)) * kBlockWords *
                   static_cast<std::size_t>(features));
}

BlockMatrix::Place BlockMatrix::place(int column) const {
    const auto block = static_cast<std::size_t>(column / kBlock);
    const auto within = static_cast<std::size_t>(column % kBlock);
    return {block * static_cast<std::size_t>(features_) * kBlockWords + within / 32 * 16 + within % 16,
            within % 32 / 16 * 16};
}

void BlockMatrix::check(std::span<const float> values) const {
    const float least = values_ == Values::positive ? 0.0F : -1.0F;
    for (const float v : values) {
        if (!(v >= least && v <= 1.0F)) {
            throw CoreError("a stored value is not in [" + std::to_string(least) +
                            ", 1]: " + std::to_string(v));
        }
    }
}

void BlockMatrix::set(int column, const float* values) {
    const std::size_t needed =
        (static_cast<std::size_t>(column / kBlock) + 1) * kBlockWords * static_cast<std::size_t>(features_);
    if (words_.size() < needed) {
        words_.resize(needed, 0U);
    }
    const Place at = place(column);
    std::uint32_t* word = words_.data() + at.word;
    for (int f = 0; f < features_; ++f, word += kBlockWords) {
        *word = (*word & ~(0xFFFFU << at.shift)) | encode(values[f]) << at.shift;
    }
}

void BlockMatrix::get(int column, float* values) const {
    const Place at = place(column);
    const std::uint32_t* word = words_.data() + at.word;
    for (int f = 0; f < features_; ++f, word += kBlockWords) {
        values[f] = decode(*word >> at.shift);
    }
}

void BlockMatrix::score(std::span<const float* const> queries, int columns, std::span<float* const> sums,
                        Start start, const float* scale, FloatBlocks* tops) const {
    const KernelByRows& by_rows = values_ == Values::positive ? kernels.positive : kernels.any;
    // The queries with the factor that takes the codes' scale back.
    thread_local std::vector<float> scaled;
    const auto features = static_cast<std::size_t>(features_);
    scaled.resize(kRowsTogether * features);
    const std::size_t each = tops == nullptr ? 0U : tops_for(columns);
    if (tops != nullptr) {
        tops->resize(queries.size() * each);
    }
    for (std::size_t r = 0; r < queries.size(); r += kRowsTogether) {
        const std::size_t rows = std::min(kRowsTogether, queries.size() - r);
        std::array<const float*, kRowsTogether> from{};
        std::array<float*, kRowsTogether> into{};
        for (std::size_t i = 0; i < rows; ++i) {
            float* query = scaled.data() + i * features;
            std::transform(queries[r + i], queries[r + i] + features_, query,
                           [](float value) { return value * kQueryScale; });
            from[i] = query;
            into[i] = tops == nullptr ? nullptr : tops->data() + (r + i) * each;
        }
        by_rows[rows - 1](words_.data(), from.data(), features_, columns, start == Start::fresh,
                          sums.data() + r, scale, into.data());
    }
}

void BlockMatrix::accumulate(std::span<const float* const> queries, int columns, std::span<float* const> sums,
                             Start start) const {
    score(queries, columns, sums, start, nullptr, nullptr);
}

void BlockMatrix::accumulate_best(std::span<const float* const> queries, std::span<float* const> sums,
                                  Start start, const Scale& scale, FloatBlocks& tops,
                                  std::span<Best> best) const {
    score(queries, scale.columns(), sums, start, scale.factors, &tops);
    const std::size_t each = tops_for(scale.columns());
    for (std::size_t r = 0; r < queries.size(); ++r) {
        best[r] = best_of(sums[r], scale, tops.data() + r * each);
    }
}

Best best_column(float* sums, const Scale& scale, FloatBlocks& tops) {
    tops.resize(tops_for(scale.columns()));
    const float* query = nullptr;
    float* row_tops = tops.data();
    kernels.positive[0](nullptr, &query, 0, scale.columns(), false, &sums, scale.factors, &row_tops);
    return best_of(sums, scale, tops.data());
}

std::vector<std::string> search_instructions() {
    std::vector<std::string> names;
    for (const Kernels& k : available()) {
        names.emplace_back(k.instructions);
    }
    return names;
}

void use_search_instructions(const std::string& name) {
    for (const Kernels& k : available()) {
        if (name == k.instructions) {
            kernels = k;
            return;
        }
    }
    throw CoreError("this processor has no kernels for " + name);
}

}  // namespace finemoe
