// The inner loop of every search, for one instruction set: no include guard, since block_matrix.cpp includes
// it once for each, with FINEMOE_KERNEL, FINEMOE_TARGET, FINEMOE_LANES (floats of a vector register) and
// FINEMOE_WORDS (registers of words taken at a time) defined. One function without helpers, because GCC
// lowers a helper's vectors before it inlines it. kRows queries are scored in one pass, so that the halves
// are widened once for all of them; every lane of every row has its own sum, so that rows do not depend on
// one another.

// sums[r][c] += Σ_f queries[r][f] · words[f][c] (queries times kQueryScale) for whole blocks of columns, in
// feature order. With a scale, a block is scored while its sums are in registers: tops[r][b][lane] is the
// largest sums[r][c] · scale[c] of block b's columns in that lane, and a last row after the blocks' has the
// largest of each lane.
template <bool kSigned, int kRows>
FINEMOE_TARGET void FINEMOE_KERNEL(const std::uint32_t* words, const float* const* queries, int features,
                                   int columns, bool fresh, float* const* sums, const float* scale,
                                   float* const* tops) {
    using Words = std::uint32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Ints = std::int32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Lanes = float __attribute__((vector_size(FINEMOE_LANES * 4)));
    constexpr int kGroups = kTopLanes / FINEMOE_LANES;  // registers that 16 columns take
    // Enough sums at a time to hide an addition's latency, few enough for the registers.
    constexpr int kWords = kRows == 1 ? 4 : FINEMOE_WORDS;
    const int blocks = blocks_for(columns);
    if (scale != nullptr) {
        for (int r = 0; r < kRows; ++r) {
            std::fill(tops[r], tops[r] + (blocks + 1) * kTopLanes, kLowest);
        }
    }
    for (int block = 0; block < blocks;
         ++block, words += static_cast<std::ptrdiff_t>(features) * kBlockWords) {
        const int left = columns - block * kBlock;
        for (int part = 0; part < 4 / kWords * kGroups; ++part) {
            const int first = part / kGroups * kWords, group = part % kGroups;
            const Words* w = reinterpret_cast<const Words*>(words) + first * kGroups + group;
            Lanes a[kRows][2 * kWords];
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                for (int k = 0; k < 2 * kWords; ++k) {
                    a[r][k] = Lanes{};
                }
            }
            for (int f = 0; f < features; ++f, w += 4 * kGroups) {
                __builtin_prefetch(w + kPrefetchWords / FINEMOE_LANES);
                if constexpr (kRows == 1) {
                    __builtin_prefetch(w + (kPrefetchWords + 16) / FINEMOE_LANES);
                    __builtin_prefetch(w + (kPrefetchWords + 32) / FINEMOE_LANES);
                    __builtin_prefetch(w + (kPrefetchWords + 48) / FINEMOE_LANES);
                }
#pragma GCC unroll 16
                for (int k = 0; k < kWords; ++k) {
                    const Words word = w[k * kGroups];
                    Lanes low, high;
                    if constexpr (kSigned) {
                        low = reinterpret_cast<Lanes>(reinterpret_cast<Ints>(word << 16U) >> 3 & kSignedLow);
                        high = reinterpret_cast<Lanes>(reinterpret_cast<Ints>(word) >> 3 & kSignedHigh);
                    } else {
                        low = reinterpret_cast<Lanes>((word & kLow) << 13U);
                        high = reinterpret_cast<Lanes>(word >> 3U & kHigh);
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < kRows; ++r) {
                        const float q = queries[r][f];
                        a[r][2 * k] += q * low;
                        a[r][2 * k + 1] += q * high;
                    }
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                Lanes* s = reinterpret_cast<Lanes*>(sums[r] + block * kBlock) + 2 * first * kGroups + group;
                Lanes top = {};
#pragma GCC unroll 16
                for (int k = 0; k < 2 * kWords; ++k) {
                    Lanes sum = a[r][k];
                    if (!fresh) {
                        sum += s[k * kGroups];
                    }
                    if (features > 0) {
                        s[k * kGroups] = sum;
                    }
                    if (scale != nullptr) {
                        const int at = (2 * first + k) * kTopLanes;
                        sum *= reinterpret_cast<const Lanes*>(scale + block * kBlock + at)[group];
                        if (left < kBlock) {  // the last block is padded
                            const Ints column = reinterpret_cast<const Ints*>(kLaneNumbers)[group];
                            sum = column < left - at ? sum : kLowest;
                        }
                        top = k == 0 ? sum : sum > top ? sum : top;
                    }
                }
                if (scale != nullptr) {
                    Lanes& in_block = reinterpret_cast<Lanes*>(tops[r] + block * kTopLanes)[group];
                    Lanes& in_all = reinterpret_cast<Lanes*>(tops[r] + blocks * kTopLanes)[group];
                    in_block = in_block > top ? in_block : top;
                    in_all = in_all > top ? in_all : top;
                }
            }
        }
    }
}
