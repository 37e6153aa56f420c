#include <cstring>
#include <string>

#include "transfer/source.hpp"

namespace finemoe::transfer {

HostSource::HostSource(const std::byte* address, int experts, std::int64_t slab_bytes, std::int64_t stride)
    : address_(address), experts_(experts), slab_bytes_(slab_bytes), stride_(stride) {
    if (address == nullptr || experts < 1 || slab_bytes < 1 || stride < slab_bytes) {
        throw SourceError("HostSource: the address must not be null, there must be at least one expert (" +
                          std::to_string(experts) + ") of at least one byte (" + std::to_string(slab_bytes) +
                          "), and slabs must not overlap (" + std::to_string(stride) + " bytes apart).");
    }
}

void HostSource::read(ExpertId expert, std::int64_t offset, std::int64_t bytes, std::byte* to) {
    std::memcpy(to, slab(expert) + offset, static_cast<std::size_t>(bytes));
}

}  // namespace finemoe::transfer
