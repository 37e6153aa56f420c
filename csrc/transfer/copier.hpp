// A copier moves an expert's bytes into a slot of its device's arena. One worker uses it, so it has no locks
// but where it says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "types.hpp"

namespace finemoe::transfer {

// A copy that did not come about; the message names where it failed. The core decides whether to try again.
struct CopyError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Files, addresses or settings from outside that cannot be used.
struct SourceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Bytes [offset, offset + bytes) of an expert's slab, on their way into a slot.
struct Chunk {
    ExpertId expert = kNone;
    int slot = -1;
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
};

// The expert slots of one device: slot s begins at address + s · slab_bytes.
struct Arena {
    std::byte* address = nullptr;
    int slots = 0;
    std::int64_t slab_bytes = 0;

    std::byte* at(const Chunk& chunk) const { return address + chunk.slot * slab_bytes + chunk.offset; }
};

class Copier {
  public:
    virtual ~Copier() = default;

    // Chunks that may be on their way at once: 1 or 2, so that a preemption waits for at most two.
    virtual std::size_t depth() const = 0;
    // Starts a copy; it may be over when this returns. Throws CopyError: then nothing was started.
    virtual void submit(const Chunk& chunk) = 0;
    // Until the oldest submitted chunk is in its slot. Throws CopyError where it never will be.
    virtual void wait_oldest() = 0;
    // The forward pass has queued what reads these slots on its stream: copies into them come after that.
    // From any thread. Where compute is over when it returns there is nothing to order.
    virtual void record_compute(std::span<const int> slots, std::uintptr_t stream) = 0;
};

}  // namespace finemoe::transfer
