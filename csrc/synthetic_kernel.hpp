// The loops of synthetic.cpp for one instruction set: no include guard, since it is included once for each,
// with FINEMOE_TARGET, FINEMOE_LANES (floats of a vector register), FINEMOE_LOGITS and FINEMOE_GATES (names)
// defined. Functions without helpers, because GCC lowers a helper's vectors before it inlines it.

// out[n, w] of whole registers of columns; see synthetic_logits.
FINEMOE_TARGET void FINEMOE_LOGITS(const float* latents, std::size_t rows, std::size_t dimensions,
                                   const float* readout, std::size_t width, const float* bias,
                                   const float* noise, const float* strength, std::uint32_t* streams,
                                   float* out) {
    using Words = std::uint32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Ints = std::int32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Lanes = float __attribute__((vector_size(FINEMOE_LANES * 4)));
    constexpr std::size_t kRegisters = 4;  // of sums at a time: they hide an addition's latency
    for (std::size_t first = 0; first < width; first += kRegisters * FINEMOE_LANES) {
        Words stream[kRegisters];
        Lanes lasting[kRegisters], spread[kRegisters];
        __builtin_memcpy(stream, streams + first, sizeof stream);
        __builtin_memcpy(lasting, bias + first, sizeof lasting);
        __builtin_memcpy(spread, noise + first, sizeof spread);
        for (std::size_t n = 0; n < rows; ++n) {
            Lanes sums[kRegisters];
            const float strong = strength[n];
#pragma GCC unroll 8
            for (std::size_t k = 0; k < kRegisters; ++k) {
                stream[k] ^= stream[k] << 13U;
                stream[k] ^= stream[k] >> 17U;
                stream[k] ^= stream[k] << 5U;
                const Lanes whole = __builtin_convertvector(reinterpret_cast<Ints>(stream[k] >> 8U), Lanes);
                sums[k] = lasting[k] + spread[k] * strong * (whole * 0x1p-24F - 0.5F);
            }
            for (std::size_t d = 0; d < dimensions; ++d) {
                const float latent = latents[n * dimensions + d];
#pragma GCC unroll 8
                for (std::size_t k = 0; k < kRegisters; ++k) {
                    Lanes weights;
                    __builtin_memcpy(&weights, readout + d * width + first + k * FINEMOE_LANES,
                                     sizeof weights);
                    sums[k] += latent * weights;
                }
            }
            __builtin_memcpy(out + n * width + first, sums, sizeof sums);
        }
        __builtin_memcpy(streams + first, stream, sizeof stream);
    }
}

// Overwrites `shares` (count logits) with probabilities, gives them as f16 in `rows` and the top K of every J
// in `chosen`. `shares` and `rows` go on to a multiple of FINEMOE_LANES rows of J;
// `held` is scratch for K registers.
FINEMOE_TARGET void FINEMOE_GATES(float* shares, std::size_t count, std::size_t experts, std::size_t top_k,
                                  std::int32_t* held, std::uint16_t* rows, std::uint16_t* chosen) {
    using Words = std::uint32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Ints = std::int32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Lanes = float __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Halves = std::uint16_t __attribute__((vector_size(FINEMOE_LANES * 2)));
    // e^x by 2^n · 2^f, |f| ≤ ½; 2^f is a polynomial fitted on Chebyshev nodes, relative error 1e-7. The
    // library's exp may differ between machines.
    for (std::size_t i = 0; i < count; i += FINEMOE_LANES) {
        Lanes x;
        __builtin_memcpy(&x, shares + i, sizeof x);
        x = x < -kLargestLogit ? -kLargestLogit : x;
        x = x > kLargestLogit ? kLargestLogit : x;
        const Lanes t = x * 1.44269504F;
        const Lanes whole = (t + kRounding) - kRounding;
        const Lanes f = t - whole;
        Lanes p = 1.5337577e-4F * f + 1.339986e-3F;
        p = p * f + 9.61852e-3F;
        p = p * f + 5.550329e-2F;
        p = p * f + 2.4022646e-1F;
        p = p * f + 6.931472e-1F;
        p = p * f + 1.0F;
        const Words exponent = reinterpret_cast<Words>(__builtin_convertvector(whole, Ints)) << 23U;
        p = reinterpret_cast<Lanes>(reinterpret_cast<Words>(p) + exponent);
        __builtin_memcpy(shares + i, &p, sizeof p);
    }
    for (float* row = shares; row < shares + count; row += experts) {
        float total = 0.0F;
        for (std::size_t j = 0; j < experts; ++j) {
            total += row[j];
        }
        const float factor = 1.0F / total;
        std::size_t j = 0;
        for (; j + FINEMOE_LANES <= experts; j += FINEMOE_LANES) {
            Lanes p;
            __builtin_memcpy(&p, row + j, sizeof p);
            p *= factor;
            __builtin_memcpy(row + j, &p, sizeof p);
        }
        for (; j < experts; ++j) {
            row[j] *= factor;
        }
    }
    // float_to_half for values of 0 … 1
    for (std::size_t i = 0; i < count; i += FINEMOE_LANES) {
        Lanes p;
        __builtin_memcpy(&p, shares + i, sizeof p);
        p = p > 1.0F ? 1.0F : p;
        const Words bits = reinterpret_cast<Words>(p);
        const Words subnormal = reinterpret_cast<Words>(p + 0.5F) - 0x3F000000U;
        const Words normal = (bits + (0xC8000FFFU + ((bits >> 13U) & 1U))) >> 13U;
        const Halves half = __builtin_convertvector(bits < 0x38800000U ? subnormal : normal, Halves);
        __builtin_memcpy(rows + i, &half, sizeof half);
    }
    // The K largest of as many rows as a register has lanes. A key is a half's code above the expert's place
    // from the end, so that keys are all different and the lower of equal experts has the larger one.
    const std::size_t all = count / experts;
    for (std::size_t row = 0; row < all; row += FINEMOE_LANES) {
        std::fill(held, held + top_k * FINEMOE_LANES, 0);
        for (std::size_t j = 0; j < experts; ++j) {
            Ints keys = {};
#pragma GCC unroll 16
            for (std::size_t i = 0; i < FINEMOE_LANES; ++i) {
                keys[i] = rows[(row + i) * experts + j];
            }
            keys = keys << 16U | static_cast<std::int32_t>(0xFFFFU - j);
            for (std::size_t k = 0; k < top_k; ++k) {
                Ints before;
                __builtin_memcpy(&before, held + k * FINEMOE_LANES, sizeof before);
                const Ints larger = before > keys ? before : keys;
                keys = before > keys ? keys : before;
                __builtin_memcpy(held + k * FINEMOE_LANES, &larger, sizeof larger);
            }
        }
        for (std::size_t i = 0; i < FINEMOE_LANES && row + i < all; ++i, chosen += top_k) {
            for (std::size_t k = 0; k < top_k; ++k) {  // insertion by place, without branches
                auto place = static_cast<std::uint16_t>(0xFFFF - (held[k * FINEMOE_LANES + i] & 0xFFFF));
                for (std::size_t at = k; at > 0; --at) {
                    const std::uint16_t other = chosen[at - 1];
                    chosen[at] = std::max(other, place);
                    place = std::min(other, place);
                }
                chosen[0] = place;
            }
        }
    }
}

// rows[n, w] of whole registers; see synthetic_embeddings.
FINEMOE_TARGET void FINEMOE_EMBEDDINGS(const std::int64_t* kinds, std::size_t count, const float* table,
                                       std::size_t width, const float* mean, float noise,
                                       std::uint32_t* streams, std::uint16_t* rows) {
    using Words = std::uint32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Ints = std::int32_t __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Lanes = float __attribute__((vector_size(FINEMOE_LANES * 4)));
    using Halves = std::uint16_t __attribute__((vector_size(FINEMOE_LANES * 2)));
    for (std::size_t n = 0; n < count; ++n) {
        const float* from = table + static_cast<std::size_t>(kinds[n]) * width;
        for (std::size_t i = 0; i < width; i += FINEMOE_LANES) {
            Words stream;
            Lanes lasting, row;
            __builtin_memcpy(&stream, streams + i, sizeof stream);
            __builtin_memcpy(&lasting, mean + i, sizeof lasting);
            __builtin_memcpy(&row, from + i, sizeof row);
            stream ^= stream << 13U;
            stream ^= stream >> 17U;
            stream ^= stream << 5U;
            __builtin_memcpy(streams + i, &stream, sizeof stream);
            const Lanes whole = __builtin_convertvector(reinterpret_cast<Ints>(stream >> 8U), Lanes);
            const Lanes value = row + lasting + noise * (whole * 0x1p-24F - 0.5F);
            // float_to_half of values below 65520
            const Words bits = reinterpret_cast<Words>(value) & 0x7FFFFFFFU;
            const Words subnormal =
                reinterpret_cast<Words>(reinterpret_cast<Lanes>(bits) + 0.5F) - 0x3F000000U;
            const Words normal = (bits + (0xC8000FFFU + ((bits >> 13U) & 1U))) >> 13U;
            const Words sign = reinterpret_cast<Words>(value) >> 16U & 0x8000U;
            const Halves half =
                __builtin_convertvector((bits < 0x38800000U ? subnormal : normal) | sign, Halves);
            __builtin_memcpy(rows + n * width + i, &half, sizeof half);
        }
    }
}
