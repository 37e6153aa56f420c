// A CUDA runtime without a device: every stream is a thread that works off its queue in random time, every
// event a point in a stream. It knows what is under way, and ends the process where a copy overwrites what a
// kernel still reads, or a kernel reads what has not arrived.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "transfer/cuda_runtime_api.hpp"

namespace finemoe::stress {

class FakeCuda final : public transfer::CudaRuntime {
  public:
    FakeCuda(int devices, std::uint64_t seed) : devices_(devices), seed_(seed) {}
    ~FakeCuda() override;

    int device_count() override { return devices_; }
    int set_device(int device) override;
    void* malloc_host(std::size_t bytes) override;
    void free_host(void* memory) noexcept override;
    void register_host(void* memory, std::size_t bytes) override;
    void unregister_host(void* memory) noexcept override;
    Stream create_stream() override;
    void destroy_stream(Stream stream) noexcept override;
    void synchronize_stream(Stream stream) noexcept override;
    Event create_event() override;
    void destroy_event(Event event) noexcept override;
    void record(Event event, Stream stream) override;
    void wait_event(Stream stream, Event event) override;
    void synchronize(Event event) override;
    void memcpy_async(void* to, const void* from, std::size_t bytes, Stream stream) override;

    // A kernel that reads so many bytes.
    void launch(Stream stream, const void* from, std::size_t bytes, std::function<void()> kernel);
    void fail_next_record() { record_fails_ = true; }
    // Streams, events and host memory that were made and not given back.
    std::size_t alive();

  private:
    struct Point {
        std::mutex mutex;
        std::condition_variable reached;
        bool passed = false;
        void wait();
        void pass();
    };
    struct Queue {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::function<void()>> work;
        bool stop = false;
        int device = 0;
        std::thread thread;
    };
    struct Mark {
        std::shared_ptr<Point> point;  // where it was recorded last
        int device = 0;
    };
    struct Access {
        std::uint64_t number = 0;  // in the order of the calls
        bool writes = false;
        std::uintptr_t begin = 0, end = 0;
    };

    void work_off(Queue& queue, std::uint64_t seed);
    void enqueue(Stream stream, std::function<void()> work);
    Queue& queue(Stream stream);
    Mark& mark(Event event);
    std::uint64_t open(bool writes, const void* from, std::size_t bytes);
    void check_order(std::uint64_t number);
    void close(std::uint64_t number);

    const int devices_;
    const std::uint64_t seed_;
    std::atomic<bool> record_fails_ = false;
    std::mutex mutex_;  // of what follows
    std::uintptr_t next_ = 1;
    std::map<Stream, std::unique_ptr<Queue>> queues_;
    std::map<Event, Mark> marks_;
    std::map<void*, std::vector<std::byte>> host_;
    std::map<void*, std::size_t> registered_;
    std::map<std::uint64_t, Access> under_way_;
    std::uint64_t accesses_ = 0;
};

}  // namespace finemoe::stress
