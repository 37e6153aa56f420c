#include "transfer/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace finemoe::transfer {

namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // 0x1EDC6F41, bits reversed

constexpr std::array<std::uint32_t, 256> make_table() {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) {
            value = (value >> 1U) ^ ((value & 1U) != 0 ? kPolynomial : 0U);
        }
        table[i] = value;
    }
    return table;
}

constexpr auto kTable = make_table();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_hardware(std::span<const std::byte> bytes,
                                                                std::uint32_t start) {
    std::uint64_t crc = ~start;
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    for (; left >= 8; left -= 8, at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, at, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    auto last = static_cast<std::uint32_t>(crc);
    for (; left > 0; --left, ++at) {
        last = _mm_crc32_u8(last, static_cast<std::uint8_t>(*at));
    }
    return ~last;
}
#endif

}  // namespace

std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t start) {
    std::uint32_t crc = ~start;
    for (const std::byte b : bytes) {
        crc = (crc >> 8U) ^ kTable[(crc ^ static_cast<std::uint32_t>(b)) & 0xFFU];
    }
    return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t start) {
#if defined(__x86_64__)
    static const bool hardware = __builtin_cpu_supports("sse4.2") != 0;
    if (hardware) {
        return crc32c_hardware(bytes, start);
    }
#endif
    return crc32c_table(bytes, start);
}

}  // namespace finemoe::transfer
