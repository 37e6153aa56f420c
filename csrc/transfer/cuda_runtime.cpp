// The CUDA runtime itself, linked statically: torch brings its own, and both share the device's primary
// context.
#include <cuda_runtime_api.h>

#include "transfer/cuda_runtime_api.hpp"

namespace finemoe::transfer {

namespace {

void call(cudaError_t result, const char* name) {
    if (result != cudaSuccess) {
        cudaGetLastError();  // so that no later call of ours or torch's is blamed for it
        throw CudaError(std::string(name) + ": " + cudaGetErrorString(result));
    }
}

cudaStream_t to_stream(CudaRuntime::Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t to_event(CudaRuntime::Event event) { return reinterpret_cast<cudaEvent_t>(event); }

class RealRuntime final : public CudaRuntime {
  public:
    int device_count() override {
        int count = 0;
        call(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
        return count;
    }
    int set_device(int device) override {
        int before = 0;
        call(cudaGetDevice(&before), "cudaGetDevice");
        if (before != device) {
            call(cudaSetDevice(device), "cudaSetDevice");
        }
        return before;
    }
    void* malloc_host(std::size_t bytes) override {
        void* memory = nullptr;
        call(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), "cudaHostAlloc");
        return memory;
    }
    void free_host(void* memory) noexcept override { cudaFreeHost(memory); }
    void register_host(void* memory, std::size_t bytes) override {
        call(cudaHostRegister(memory, bytes, cudaHostRegisterPortable), "cudaHostRegister");
    }
    void unregister_host(void* memory) noexcept override { cudaHostUnregister(memory); }
    Stream create_stream() override {
        cudaStream_t stream = nullptr;
        call(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        return reinterpret_cast<Stream>(stream);
    }
    void destroy_stream(Stream stream) noexcept override {
        synchronize_stream(stream);
        cudaStreamDestroy(to_stream(stream));
    }
    void synchronize_stream(Stream stream) noexcept override {
        if (cudaStreamSynchronize(to_stream(stream)) != cudaSuccess) {  // a broken device copies nothing
            cudaGetLastError();
        }
    }
    Event create_event() override {
        cudaEvent_t event = nullptr;
        call(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
        return reinterpret_cast<Event>(event);
    }
    void destroy_event(Event event) noexcept override { cudaEventDestroy(to_event(event)); }
    void record(Event event, Stream stream) override {
        call(cudaEventRecord(to_event(event), to_stream(stream)), "cudaEventRecord");
    }
    void wait_event(Stream stream, Event event) override {
        call(cudaStreamWaitEvent(to_stream(stream), to_event(event), 0), "cudaStreamWaitEvent");
    }
    void synchronize(Event event) override {
        call(cudaEventSynchronize(to_event(event)), "cudaEventSynchronize");
    }
    void memcpy_async(void* to, const void* from, std::size_t bytes, Stream stream) override {
        call(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, to_stream(stream)), "cudaMemcpyAsync");
    }
};

}  // namespace

std::shared_ptr<CudaRuntime> cuda_runtime() {
    static const auto runtime = std::make_shared<RealRuntime>();
    return runtime;
}

std::string cuda_problem(int device) {
    try {
        const int count = cuda_runtime()->device_count();
        if (device >= 0 && device < count) {
            return "";
        }
        return "there is no CUDA device " + std::to_string(device) +
               " (devices here: " + std::to_string(count) + "). Name one that is here, or run on the CPU.";
    } catch (const CudaError& error) {
        return "no CUDA device can be used here (" + std::string(error.what()) +
               "). Install a driver for the device, or run on the CPU.";
    }
}

}  // namespace finemoe::transfer
