// IEEE half precision: exact widening, and rounding to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace finemoe {

inline constexpr std::uint16_t kHalfOne = 0x3C00;

inline bool half_is_finite(std::uint16_t h) { return (h & 0x7C00U) != 0x7C00U; }

// Finite halves only. Scaling by 2^112 re-biases the exponent and normalises subnormals, exactly.
inline float half_to_float(std::uint16_t h) {
    const float magnitude = std::bit_cast<float>((h & 0x7FFFU) << 13U) * 0x1p112F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | ((h & 0x8000U) << 16U));
}

inline std::uint16_t float_to_half(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16U) & 0x8000U;
    std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude >= 0x47800000U) {  // 65536 and above, infinities, NaN
        return static_cast<std::uint16_t>(sign | (magnitude > 0x7F800000U ? 0x7E00U : 0x7C00U));
    }
    if (magnitude < 0x38800000U) {  // subnormal halves: let the f32 adder round at the right bit
        const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U));
    }
    const std::uint32_t odd = (magnitude >> 13U) & 1U;
    magnitude += 0xC8000FFFU + odd;  // re-bias by -112, round half to even; a carry reaches infinity
    return static_cast<std::uint16_t>(sign | (magnitude >> 13U));
}

// half_to_float(float_to_half(value)) of values below 65520, without branches.
inline float round_to_half(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    const float shifted =
        (std::bit_cast<float>(magnitude) + 0.5F) - 0.5F;  // subnormal halves: steps of 2^-24
    const std::uint32_t normal = (magnitude + 0xFFFU + ((magnitude >> 13U) & 1U)) & 0xFFFFE000U;
    const std::uint32_t rounded = magnitude < 0x38800000U ? std::bit_cast<std::uint32_t>(shifted) : normal;
    return std::bit_cast<float>(rounded | (bits & 0x80000000U));
}

}  // namespace finemoe
