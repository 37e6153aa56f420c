// The inner loop of every search, for one instruction set: no include guard, since block_matrix.cpp includes
// it once for each, with FINEMOE_KERNEL, FINEMOE_TARGET and FINEMOE_LANES (floats of a vector register)
// defined. One function without helpers, because GCC lowers a helper's vectors before it inlines it; eight
// sums at a time, because one addition waits three cycles for the one before.

// sums[c] += Σ_f query[f] · words[f][c] for whole blocks of columns, in feature order. With a scale, a block
// is scored while its sums are in registers: tops[b][lane] is the largest sums[c] · scale[c] of block b's
// columns in that lane, and a last row after the blocks' has the largest of each lane.
template <bool kSigned>
FINEMOE_TARGET void FINEMOE_KERNEL(const std::uint32_t* words, const float* query, int features, int columns,
                                   float* sums, const float* scale, float* tops) {
    using Words = std::uint32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Ints = std::int32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Lanes = float __attribute__((vector_size(FINEMOE_LANES * 4)));
    constexpr int kGroups = kTopLanes / FINEMOE_LANES;  // registers that 16 columns take
    float* largest = tops;
    if (scale != nullptr) {
        largest = tops + static_cast<std::ptrdiff_t>(blocks_for(columns)) * kTopLanes;
        std::fill(largest, largest + kTopLanes, kLowest);
    }
    for (int left = columns; left > 0; left -= kBlock) {
        for (int group = 0; group < kGroups; ++group) {
            const Words* w = reinterpret_cast<const Words*>(words) + group;
            Lanes a0 = {}, a1 = {}, a2 = {}, a3 = {}, a4 = {}, a5 = {}, a6 = {}, a7 = {};
            for (int f = 0; f < features; ++f, w += 4 * kGroups) {
                const float q = query[f] * kQueryScale;
                __builtin_prefetch(w + kPrefetchWords / FINEMOE_LANES);
                __builtin_prefetch(w + (kPrefetchWords + 16) / FINEMOE_LANES);
                __builtin_prefetch(w + (kPrefetchWords + 32) / FINEMOE_LANES);
                __builtin_prefetch(w + (kPrefetchWords + 48) / FINEMOE_LANES);
                const Words w0 = w[0], w1 = w[kGroups], w2 = w[2 * kGroups], w3 = w[3 * kGroups];
                if constexpr (kSigned) {
                    a0 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w0 << 16U) >> 3 & kSignedLow);
                    a1 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w0) >> 3 & kSignedHigh);
                    a2 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w1 << 16U) >> 3 & kSignedLow);
                    a3 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w1) >> 3 & kSignedHigh);
                    a4 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w2 << 16U) >> 3 & kSignedLow);
                    a5 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w2) >> 3 & kSignedHigh);
                    a6 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w3 << 16U) >> 3 & kSignedLow);
                    a7 += q * reinterpret_cast<Lanes>(reinterpret_cast<Ints>(w3) >> 3 & kSignedHigh);
                } else {
                    a0 += q * reinterpret_cast<Lanes>((w0 & kLow) << 13U);
                    a1 += q * reinterpret_cast<Lanes>(w0 >> 3U & kHigh);
                    a2 += q * reinterpret_cast<Lanes>((w1 & kLow) << 13U);
                    a3 += q * reinterpret_cast<Lanes>(w1 >> 3U & kHigh);
                    a4 += q * reinterpret_cast<Lanes>((w2 & kLow) << 13U);
                    a5 += q * reinterpret_cast<Lanes>(w2 >> 3U & kHigh);
                    a6 += q * reinterpret_cast<Lanes>((w3 & kLow) << 13U);
                    a7 += q * reinterpret_cast<Lanes>(w3 >> 3U & kHigh);
                }
            }
            Lanes* s = reinterpret_cast<Lanes*>(sums) + group;
            a0 += s[0];
            a1 += s[kGroups];
            a2 += s[2 * kGroups];
            a3 += s[3 * kGroups];
            a4 += s[4 * kGroups];
            a5 += s[5 * kGroups];
            a6 += s[6 * kGroups];
            a7 += s[7 * kGroups];
            if (features > 0) {
                s[0] = a0;
                s[kGroups] = a1;
                s[2 * kGroups] = a2;
                s[3 * kGroups] = a3;
                s[4 * kGroups] = a4;
                s[5 * kGroups] = a5;
                s[6 * kGroups] = a6;
                s[7 * kGroups] = a7;
            }
            if (scale == nullptr) {
                continue;
            }
            const Lanes* x = reinterpret_cast<const Lanes*>(scale) + group;
            a0 *= x[0];
            a1 *= x[kGroups];
            a2 *= x[2 * kGroups];
            a3 *= x[3 * kGroups];
            a4 *= x[4 * kGroups];
            a5 *= x[5 * kGroups];
            a6 *= x[6 * kGroups];
            a7 *= x[7 * kGroups];
            if (left < kBlock) {  // the last block is padded
                const Ints column = reinterpret_cast<const Ints*>(kLaneNumbers)[group];
                a0 = column < left ? a0 : kLowest;
                a1 = column < left - kTopLanes ? a1 : kLowest;
                a2 = column < left - 2 * kTopLanes ? a2 : kLowest;
                a3 = column < left - 3 * kTopLanes ? a3 : kLowest;
                a4 = column < left - 4 * kTopLanes ? a4 : kLowest;
                a5 = column < left - 5 * kTopLanes ? a5 : kLowest;
                a6 = column < left - 6 * kTopLanes ? a6 : kLowest;
                a7 = column < left - 7 * kTopLanes ? a7 : kLowest;
            }
            a0 = a0 > a1 ? a0 : a1;
            a2 = a2 > a3 ? a2 : a3;
            a4 = a4 > a5 ? a4 : a5;
            a6 = a6 > a7 ? a6 : a7;
            a0 = a0 > a2 ? a0 : a2;
            a4 = a4 > a6 ? a4 : a6;
            a0 = a0 > a4 ? a0 : a4;
            reinterpret_cast<Lanes*>(tops)[group] = a0;
            Lanes& top = reinterpret_cast<Lanes*>(largest)[group];
            top = top > a0 ? top : a0;
        }
        words += static_cast<std::ptrdiff_t>(features) * kBlockWords;
        sums += kBlock;
        if (scale != nullptr) {
            scale += kBlock;
            tops += kTopLanes;
        }
    }
}
