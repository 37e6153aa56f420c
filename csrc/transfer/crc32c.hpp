// CRC-32C (Castagnoli), as iSCSI and ext4 use it: RFC 3720, appendix B.4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace finemoe::transfer {

// The checksum of what `start` is the checksum of, followed by `bytes`; start = 0: of `bytes` alone.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t start = 0);
// The same by table, on every processor (for tests).
std::uint32_t crc32c_table(std::span<const std::byte> bytes, std::uint32_t start = 0);

}  // namespace finemoe::transfer
