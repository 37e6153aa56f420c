// Where experts come from: one slab of equal size per expert.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transfer/copier.hpp"

namespace finemoe::transfer {

class Source {
  public:
    virtual ~Source() = default;

    virtual int experts() const = 0;
    virtual std::int64_t slab_bytes() const = 0;
    // Bytes [offset, offset + bytes) of the expert's slab into `to`. An expert is read by one thread at a
    // time. Throws CopyError.
    virtual void read(ExpertId expert, std::int64_t offset, std::int64_t bytes, std::byte* to) = 0;
    // The expert's slab where it lies in host memory as a whole, else null.
    virtual const std::byte* slab(ExpertId expert) const = 0;
};

// Slabs in host memory, `stride` bytes apart.
class HostSource final : public Source {
  public:
    // Throws SourceError.
    HostSource(const std::byte* address, int experts, std::int64_t slab_bytes, std::int64_t stride);

    int experts() const override { return experts_; }
    std::int64_t slab_bytes() const override { return slab_bytes_; }
    void read(ExpertId expert, std::int64_t offset, std::int64_t bytes, std::byte* to) override;
    const std::byte* slab(ExpertId expert) const override { return address_ + expert * stride_; }

  private:
    const std::byte* address_;
    int experts_;
    std::int64_t slab_bytes_, stride_;
};

}  // namespace finemoe::transfer
