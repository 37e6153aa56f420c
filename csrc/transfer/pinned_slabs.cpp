#include "transfer/pinned_slabs.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace finemoe::transfer {

namespace {
constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 50;
}  // namespace

PinnedSlabs::PinnedSlabs(std::shared_ptr<CudaRuntime> runtime, int experts, std::int64_t slab_bytes,
                         std::int64_t limit_bytes)
    : runtime_(std::move(runtime)), experts_(experts) {
    if (experts < 1 || slab_bytes < 1 || slab_bytes > kMostBytes / experts) {
        throw SourceError("PinnedSlabs: " + std::to_string(experts) + " experts of " +
                          std::to_string(slab_bytes) + " bytes cannot be held.");
    }
    stride_ = (slab_bytes + kPage - 1) / kPage * kPage;
    const auto bytes = static_cast<std::size_t>(stride_ * experts);
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        throw SourceError("PinnedSlabs: " + std::to_string(bytes) + " bytes of host memory cannot be had: " +
                          std::strerror(errno) + ". Read the experts from files instead.");
    }
    memory_ = static_cast<std::byte*>(memory);
    pin(limit_bytes);
}

void PinnedSlabs::pin(std::int64_t limit_bytes) {
    const std::int64_t whole = stride_ * experts_;
    const std::int64_t wanted = limit_bytes < 0 ? whole : std::min(whole, limit_bytes / stride_ * stride_);
    if (runtime_ == nullptr) {
        warning_ = "host memory is not pinned: " + cuda_problem(0);
        return;
    }
    if (wanted > 0) {
        try {
            runtime_->register_host(memory_, static_cast<std::size_t>(wanted));
            pinned_bytes_ = wanted;
        } catch (const CudaError& error) {
            warning_ = "host memory is not pinned, copies are slower (" + std::string(error.what()) + ")";
            return;
        }
    }
    if (wanted < whole) {
        warning_ = std::to_string(wanted) + " of " + std::to_string(whole) +
                   " bytes of expert slabs are pinned (the limit is " + std::to_string(limit_bytes) +
                   "); copies of the others are slower";
    }
}

PinnedSlabs::~PinnedSlabs() {
    if (pinned_bytes_ > 0) {
        runtime_->unregister_host(memory_);
    }
    ::munmap(memory_, static_cast<std::size_t>(stride_ * experts_));
}

}  // namespace finemoe::transfer
