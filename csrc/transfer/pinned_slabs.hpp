// Expert slabs in host memory, as many of them pinned as the limit allows. What is not pinned is copied all
// the same, more slowly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transfer/cuda_runtime_api.hpp"

namespace finemoe::transfer {

class PinnedSlabs {
  public:
    // runtime: null pins nothing. limit_bytes: the most to pin, negative for no limit. Slabs are a whole
    // number of pages apart, so that none is pinned in part. Throws SourceError where the memory itself
    // cannot be had.
    PinnedSlabs(std::shared_ptr<CudaRuntime> runtime, int experts, std::int64_t slab_bytes,
                std::int64_t limit_bytes);
    ~PinnedSlabs();
    PinnedSlabs(const PinnedSlabs&) = delete;
    PinnedSlabs& operator=(const PinnedSlabs&) = delete;

    std::byte* address() const { return memory_; }
    int experts() const { return experts_; }
    std::int64_t stride() const { return stride_; }
    std::int64_t pinned_bytes() const { return pinned_bytes_; }
    const std::string& warning() const { return warning_; }  // why not all is pinned; empty where it is

  private:
    void pin(std::int64_t limit_bytes);

    std::shared_ptr<CudaRuntime> runtime_;
    const int experts_;
    std::int64_t stride_ = 0, pinned_bytes_ = 0;
    std::byte* memory_ = nullptr;
    std::string warning_;
};

}  // namespace finemoe::transfer
