#include "search/block_matrix.hpp"

#include <cstdint>
#include <cstring>

// One source, compiled for several vector widths and chosen at load time. Lanes never mix, so all agree bit
// for bit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(FINEMOE_NO_CLONES)
#define FINEMOE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FINEMOE_CLONES
#endif

namespace finemoe {
namespace {

using Lanes = float __attribute__((vector_size(64)));  // 16 columns
using LaneBits = std::int32_t __attribute__((vector_size(64)));

FINEMOE_CLONES void accumulate_blocks(const float* data, const float* query, int features, int blocks,
                                      float* sums) {
    for (int b = 0; b < blocks; ++b) {
        Lanes a0 = {}, a1 = {}, a2 = {}, a3 = {};
        for (int f = 0; f < features; ++f, data += kBlock) {
            const Lanes* m = reinterpret_cast<const Lanes*>(data);
            const float q = query[f];
            a0 += q * m[0];
            a1 += q * m[1];
            a2 += q * m[2];
            a3 += q * m[3];
        }
        Lanes* s = reinterpret_cast<Lanes*>(sums + static_cast<std::ptrdiff_t>(b) * kBlock);
        s[0] += a0;
        s[1] += a1;
        s[2] += a2;
        s[3] += a3;
    }
}

FINEMOE_CLONES float largest_key(const float* sums, const float* scale, int blocks) {
    const Lanes* s = reinterpret_cast<const Lanes*>(sums);
    const Lanes* w = reinterpret_cast<const Lanes*>(scale);
    Lanes top = s[0] * w[0];
    for (int i = 1; i < blocks * 4; ++i) {
        const Lanes key = s[i] * w[i];
        top = key > top ? key : top;
    }
    float best = top[0];
    for (int i = 1; i < 16; ++i) {
        best = top[i] > best ? top[i] : best;
    }
    return best;
}

FINEMOE_CLONES bool block_has(const float* sums, const float* scale, float key) {
    const Lanes* s = reinterpret_cast<const Lanes*>(sums);
    const Lanes* w = reinterpret_cast<const Lanes*>(scale);
    const LaneBits hit =
        (s[0] * w[0] == key) | (s[1] * w[1] == key) | (s[2] * w[2] == key) | (s[3] * w[3] == key);
    std::int32_t any = 0;
    for (int i = 0; i < 16; ++i) {
        any |= hit[i];
    }
    return any != 0;
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

void BlockMatrix::accumulate(const float* query, int blocks, float* sums) const {
    accumulate_blocks(data_.data(), query, features_, blocks, sums);
}

float BlockMatrix::dot(const float* query, int column) const {
    float sum = 0.0F;
    for (int f = 0; f < features_; ++f) {
        sum += query[f] * data_[index(f, column)];
    }
    return sum;
}

Best best_column(const float* sums, const float* scale, const std::vector<long long>& written, int columns) {
    const int whole = columns / kBlock;
    Best best;
    if (whole > 0) {
        best.key = largest_key(sums, scale, whole);
    }
    for (int c = whole * kBlock; c < columns; ++c) {  // the last, partly filled block
        const float key = sums[c] * scale[c];
        if (c == 0 || key > best.key) {
            best.key = key;
        }
    }
    const auto consider = [&](int c) {
        const auto at = static_cast<std::size_t>(c);
        if (sums[c] * scale[c] == best.key &&
            (best.column < 0 || written[at] > written[static_cast<std::size_t>(best.column)])) {
            best.column = c;
        }
    };
    for (int b = 0; b < whole; ++b) {
        if (block_has(sums + b * kBlock, scale + b * kBlock, best.key)) {
            for (int c = b * kBlock; c < (b + 1) * kBlock; ++c) {
                consider(c);
            }
        }
    }
    for (int c = whole * kBlock; c < columns; ++c) {
        consider(c);
    }
    return best;
}

}  // namespace finemoe
