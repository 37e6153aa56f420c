#include "search/block_matrix.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

// One source, compiled for several vector widths and chosen at load time. Lanes never mix, so all agree bit
// for bit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(FINEMOE_NO_CLONES)
#define FINEMOE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FINEMOE_CLONES
#endif

namespace finemoe {
namespace {

constexpr int kLanes = 16;
using Lanes = float __attribute__((vector_size(64)));
using LaneBits = std::int32_t __attribute__((vector_size(64)));

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr LaneBits kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// sums[c] += Σ_f query[f] · data[f][c], in feature order. With a scale, a block is scored while its sums are
// in registers: tops[b][lane] is the largest sums[c] · scale[c] of block b's columns in that lane, and a last
// row after the blocks has the largest of each lane. One function: a helper would be compiled for the
// narrowest vectors.
FINEMOE_CLONES void accumulate_and_score(const float* data, const float* query, int features, int columns,
                                         float* sums, const float* scale, float* tops) {
    Lanes top = Lanes{} + kLowest;
    for (int left = columns; left > 0; left -= kBlock, sums += kBlock) {
        Lanes* s = reinterpret_cast<Lanes*>(sums);
        Lanes s0 = s[0], s1 = s[1], s2 = s[2], s3 = s[3];
        if (features > 0) {
            Lanes a0 = {}, a1 = {}, a2 = {}, a3 = {};
            for (int f = 0; f < features; ++f, data += kBlock) {
                const Lanes* m = reinterpret_cast<const Lanes*>(data);
                const float q = query[f];
                a0 += q * m[0];
                a1 += q * m[1];
                a2 += q * m[2];
                a3 += q * m[3];
            }
            s[0] = s0 += a0;
            s[1] = s1 += a1;
            s[2] = s2 += a2;
            s[3] = s3 += a3;
        }
        if (scale != nullptr) {
            const Lanes* w = reinterpret_cast<const Lanes*>(scale);
            Lanes k0 = s0 * w[0], k1 = s1 * w[1], k2 = s2 * w[2], k3 = s3 * w[3];
            if (left < kBlock) {  // the last block is padded
                k0 = kLaneNumbers < left ? k0 : kLowest;
                k1 = kLaneNumbers < left - kLanes ? k1 : kLowest;
                k2 = kLaneNumbers < left - 2 * kLanes ? k2 : kLowest;
                k3 = kLaneNumbers < left - 3 * kLanes ? k3 : kLowest;
            }
            k0 = k0 > k1 ? k0 : k1;
            k2 = k2 > k3 ? k2 : k3;
            k0 = k0 > k2 ? k0 : k2;
            *reinterpret_cast<Lanes*>(tops) = k0;
            top = top > k0 ? top : k0;
            scale += kBlock;
            tops += kLanes;
        }
    }
    if (scale != nullptr) {
        *reinterpret_cast<Lanes*>(tops) = top;
    }
}

// The largest key and its most recently written column, found through the tops.
Best best_of(const float* sums, const float* scale, const float* tops, const std::vector<long long>& written,
             int columns) {
    const int blocks = blocks_for(columns);
    const float* lanes = tops + static_cast<std::ptrdiff_t>(blocks) * kLanes;
    Best best{-1, *std::max_element(lanes, lanes + kLanes)};
    const auto consider = [&](int c) {
        const auto at = static_cast<std::size_t>(c);
        if (sums[c] * scale[c] == best.key &&
            (best.column < 0 || written[at] > written[static_cast<std::size_t>(best.column)])) {
            best.column = c;
        }
    };
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int b = 0; lanes[lane] == best.key && b < blocks; ++b) {
            if (tops[b * kLanes + lane] == best.key) {
                for (int c = b * kBlock + lane; c < std::min((b + 1) * kBlock, columns); c += kLanes) {
                    consider(c);
                }
            }
        }
    }
    return best;
}

}  // namespace

BlockMatrix::BlockMatrix(int features, int capacity) : features_(features) {
    data_.reserve(static_cast<std::size_t>(blocks_for(capacity)) * kBlock *
                  static_cast<std::size_t>(features));
}

void BlockMatrix::set(int column, const float* values) {
    const std::size_t needed =
        (static_cast<std::size_t>(column / kBlock) + 1) * kBlock * static_cast<std::size_t>(features_);
    if (data_.size() < needed) {
        data_.resize(needed, 0.0F);
    }
    for (int f = 0; f < features_; ++f) {
        data_[index(f, column)] = values[f];
    }
}

void BlockMatrix::get(int column, float* values) const {
    for (int f = 0; f < features_; ++f) {
        values[f] = data_[index(f, column)];
    }
}

void BlockMatrix::accumulate(const float* query, int columns, float* sums) const {
    accumulate_and_score(data_.data(), query, features_, columns, sums, nullptr, nullptr);
}

Best BlockMatrix::accumulate_best(const float* query, float* sums, const Scale& scale,
                                  FloatBlocks& tops) const {
    tops.resize(static_cast<std::size_t>(blocks_for(scale.columns()) + 1) * kLanes);
    accumulate_and_score(data_.data(), query, features_, scale.columns(), sums, scale.factors, tops.data());
    return best_of(sums, scale.factors, tops.data(), scale.written, scale.columns());
}

Best best_column(float* sums, const Scale& scale, FloatBlocks& tops) {
    tops.resize(static_cast<std::size_t>(blocks_for(scale.columns()) + 1) * kLanes);
    accumulate_and_score(nullptr, nullptr, 0, scale.columns(), sums, scale.factors, tops.data());
    return best_of(sums, scale.factors, tops.data(), scale.written, scale.columns());
}

}  // namespace finemoe
