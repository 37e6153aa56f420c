#include "transfer/cuda_copier.hpp"

#include <utility>

namespace finemoe::transfer {

CudaCopier::CudaCopier(std::shared_ptr<CudaRuntime> runtime, int device, std::shared_ptr<Source> source,
                       const Arena& arena, std::int64_t chunk_bytes)
    : runtime_(std::move(runtime)),
      device_(device),
      source_(std::move(source)),
      arena_(arena),
      readers_(static_cast<std::size_t>(arena.slots)) {
    const OnDevice here(*runtime_, device_);
    stream_ = runtime_->create_stream();
    for (auto& event : arrived_) {
        event = runtime_->create_event();
    }
    if (source_->slab(0) == nullptr) {
        for (void*& buffer : staging_) {
            buffer = runtime_->malloc_host(static_cast<std::size_t>(chunk_bytes));
        }
    }
}

CudaCopier::~CudaCopier() {
    runtime_->destroy_stream(stream_);
    for (const auto event : arrived_) {
        runtime_->destroy_event(event);
    }
    readers_.clear();
    for (const auto event : all_events_) {
        runtime_->destroy_event(event);
    }
    for (void* buffer : staging_) {
        if (buffer != nullptr) {
            runtime_->free_host(buffer);
        }
    }
}

void CudaCopier::submit(const Chunk& chunk) {
    const OnDevice here(*runtime_, device_);
    const std::byte* from = host_bytes(chunk);
    wait_for_readers(chunk.slot);
    runtime_->memcpy_async(arena_.at(chunk), from, static_cast<std::size_t>(chunk.bytes), stream_);
    try {
        runtime_->record(arrived_[submitted_ % kDepth], stream_);
    } catch (...) {  // nobody would wait for this copy, and its slot and buffer are soon used again
        runtime_->synchronize_stream(stream_);
        throw;
    }
    ++submitted_;
}

// Of two staging buffers, the chunk before the last has left this one: no more than two are under way.
const std::byte* CudaCopier::host_bytes(const Chunk& chunk) {
    if (const std::byte* slab = source_->slab(chunk.expert); slab != nullptr) {
        return slab + chunk.offset;
    }
    auto* const buffer = static_cast<std::byte*>(staging_[submitted_ % kDepth]);
    source_->read(chunk.expert, chunk.offset, chunk.bytes, buffer);
    return buffer;
}

// Later chunks into the slot follow on the same stream, so the first one waits for all.
void CudaCopier::wait_for_readers(int slot) {
    const std::scoped_lock lock(readers_mutex_);
    auto& readers = readers_[static_cast<std::size_t>(slot)];
    for (const Reader& reader : readers) {
        runtime_->wait_event(stream_, reader->event);
    }
    readers.clear();
}

void CudaCopier::wait_oldest() {
    const OnDevice here(*runtime_, device_);
    runtime_->synchronize(arrived_[awaited_++ % kDepth]);
}

void CudaCopier::record_compute(std::span<const int> slots, std::uintptr_t stream) {
    const OnDevice here(*runtime_, device_);
    const std::scoped_lock lock(readers_mutex_);
    const Reader reader = new_reader(stream);
    runtime_->record(reader->event, stream);
    for (const int slot : slots) {
        auto& readers = readers_[static_cast<std::size_t>(slot)];
        std::erase_if(readers, [&](const Reader& earlier) { return earlier->stream == stream; });
        readers.push_back(reader);
    }
}

CudaCopier::Reader CudaCopier::new_reader(CudaRuntime::Stream stream) {
    if (free_events_.empty()) {
        all_events_.reserve(all_events_.size() + 1);
        free_events_.reserve(all_events_.size() + 1);  // so that none is lost when it comes back
        free_events_.push_back(runtime_->create_event());
        all_events_.push_back(free_events_.back());
    }
    const CudaRuntime::Event event = free_events_.back();
    free_events_.pop_back();
    return std::make_shared<Compute>(event, stream, free_events_);
}

}  // namespace finemoe::transfer
