// Slots in device memory: asynchronous copies on a stream of its own, from slabs in host memory or through
// two pinned staging buffers.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/cuda_runtime_api.hpp"
#include "transfer/source.hpp"

namespace finemoe::transfer {

class CudaCopier final : public Copier {
  public:
    // chunk_bytes: the most that a chunk has. Throws CudaError.
    CudaCopier(std::shared_ptr<CudaRuntime> runtime, int device, std::shared_ptr<Source> source,
               const Arena& arena, std::int64_t chunk_bytes);
    ~CudaCopier() override;
    CudaCopier(const CudaCopier&) = delete;
    CudaCopier& operator=(const CudaCopier&) = delete;

    std::size_t depth() const override { return kDepth; }
    void submit(const Chunk& chunk) override;
    void wait_oldest() override;
    void record_compute(std::span<const int> slots, std::uintptr_t stream) override;

  private:
    static constexpr std::size_t kDepth = 2;

    // The point in a stream behind a compute. Its event goes back into the pool when no slot needs it any
    // more.
    struct Compute {
        Compute(CudaRuntime::Event e, CudaRuntime::Stream s, std::vector<CudaRuntime::Event>& p)
            : event(e), stream(s), pool(p) {}
        ~Compute() { pool.push_back(event); }
        Compute(const Compute&) = delete;
        Compute& operator=(const Compute&) = delete;

        const CudaRuntime::Event event;
        const CudaRuntime::Stream stream;
        std::vector<CudaRuntime::Event>& pool;
    };
    using Reader = std::shared_ptr<const Compute>;

    const std::byte* host_bytes(const Chunk& chunk);
    void wait_for_readers(int slot);
    Reader new_reader(CudaRuntime::Stream stream);

    std::shared_ptr<CudaRuntime> runtime_;
    const int device_;
    std::shared_ptr<Source> source_;
    const Arena arena_;
    CudaRuntime::Stream stream_ = 0;
    std::array<CudaRuntime::Event, kDepth> arrived_{};  // recorded behind the chunks submitted
    std::array<void*, kDepth> staging_{};
    std::size_t submitted_ = 0, awaited_ = 0;

    std::mutex readers_mutex_;  // of what follows
    std::vector<CudaRuntime::Event> all_events_, free_events_;
    std::vector<std::vector<Reader>> readers_;  // per slot, of each stream the last compute that reads it
};

}  // namespace finemoe::transfer
