// What the engine needs of the CUDA runtime, so that its order can be tested without a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transfer/copier.hpp"

namespace finemoe::transfer {

// A call of the runtime that failed: its name, and what the runtime says.
struct CudaError : CopyError {
    using CopyError::CopyError;
};

// Streams run their work in order; an event is a point in a stream. Every call but those that say so throws
// CudaError.
class CudaRuntime {
  public:
    using Stream = std::uintptr_t;  // cudaStream_t, as a number; 0 is the default stream
    using Event = std::uintptr_t;   // cudaEvent_t

    virtual ~CudaRuntime() = default;

    virtual int device_count() = 0;
    virtual int set_device(int device) = 0;  // of the calling thread; returns the one before
    virtual void* malloc_host(std::size_t bytes) = 0;
    virtual void free_host(void* memory) noexcept = 0;
    virtual void register_host(void* memory, std::size_t bytes) = 0;
    virtual void unregister_host(void* memory) noexcept = 0;
    virtual Stream create_stream() = 0;
    virtual void destroy_stream(Stream stream) noexcept = 0;      // after what is in it
    virtual void synchronize_stream(Stream stream) noexcept = 0;  // the calling thread, for all that is in it
    virtual Event create_event() = 0;
    virtual void destroy_event(Event event) noexcept = 0;
    virtual void record(Event event, Stream stream) = 0;
    virtual void wait_event(Stream stream, Event event) = 0;  // for what was recorded last
    virtual void synchronize(Event event) = 0;                // the calling thread, for the same
    virtual void memcpy_async(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
};

// The runtime that this build has, or null where it was built without a CUDA toolkit.
std::shared_ptr<CudaRuntime> cuda_runtime();
// Why that device cannot be used, with the remedy; empty where it can.
std::string cuda_problem(int device);

// The calling thread's device, for a scope.
class OnDevice {
  public:
    OnDevice(CudaRuntime& runtime, int device) : runtime_(runtime), before_(runtime.set_device(device)) {}
    ~OnDevice() {
        try {
            runtime_.set_device(before_);
        } catch (const CudaError&) {  // the next call that needs a device says it
        }
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    CudaRuntime& runtime_;
    int before_;
};

}  // namespace finemoe::transfer
