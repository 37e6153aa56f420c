#include "transfer_fake_cuda.hpp"

#include <cstring>
#include <utility>

#include "stress_scenarios.hpp"

namespace finemoe::stress {

namespace {

thread_local int current_device = 0;

void need(bool condition, const std::string& problem) {
    if (!condition) {
        fail("fake CUDA", problem);
    }
}

}  // namespace

void FakeCuda::Point::wait() {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return passed; });
}

void FakeCuda::Point::pass() {
    {
        const std::scoped_lock lock(mutex);
        passed = true;
    }
    reached.notify_all();
}

FakeCuda::~FakeCuda() { need(alive() == 0, "streams, events or host memory were not given back"); }

std::size_t FakeCuda::alive() {
    const std::scoped_lock lock(mutex_);
    return queues_.size() + marks_.size() + host_.size() + registered_.size();
}

int FakeCuda::set_device(int device) {
    need(device >= 0 && device < devices_, "no such device");
    return std::exchange(current_device, device);
}

void* FakeCuda::malloc_host(std::size_t bytes) {
    std::vector<std::byte> memory(bytes);
    void* const address = memory.data();
    const std::scoped_lock lock(mutex_);
    host_.emplace(address, std::move(memory));
    return address;
}

void FakeCuda::free_host(void* memory) noexcept {
    const std::scoped_lock lock(mutex_);
    need(host_.erase(memory) == 1, "free_host of what is no host memory");
}

void FakeCuda::register_host(void* memory, std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    need(registered_.emplace(memory, bytes).second, "memory registered twice");
}

void FakeCuda::unregister_host(void* memory) noexcept {
    const std::scoped_lock lock(mutex_);
    need(registered_.erase(memory) == 1, "unregister_host of what is not registered");
}

FakeCuda::Stream FakeCuda::create_stream() {
    const std::scoped_lock lock(mutex_);
    const Stream stream = next_++;
    auto made = std::make_unique<Queue>();
    made->device = current_device;
    made->thread = std::thread([this, made = made.get(), seed = seed_ + stream] { work_off(*made, seed); });
    queues_.emplace(stream, std::move(made));
    return stream;
}

void FakeCuda::destroy_stream(Stream stream) noexcept {
    std::unique_ptr<Queue> gone;
    {
        const std::scoped_lock lock(mutex_);
        gone = std::move(queues_.at(stream));
        queues_.erase(stream);
    }
    {
        const std::scoped_lock lock(gone->mutex);
        gone->stop = true;
    }
    gone->changed.notify_one();
    gone->thread.join();
}

void FakeCuda::work_off(Queue& queue, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (;;) {
        std::function<void()> work;
        {
            std::unique_lock lock(queue.mutex);
            queue.changed.wait(lock, [&] { return queue.stop || !queue.work.empty(); });
            if (queue.work.empty()) {
                return;
            }
            work = std::move(queue.work.front());
            queue.work.pop_front();
        }
        dawdle(random);
        work();
    }
}

FakeCuda::Queue& FakeCuda::queue(Stream stream) {
    const std::scoped_lock lock(mutex_);
    const auto found = queues_.find(stream);
    need(found != queues_.end(), "no such stream");
    need(found->second->device == current_device, "a stream of another device than the thread's");
    return *found->second;
}

FakeCuda::Mark& FakeCuda::mark(Event event) {
    const std::scoped_lock lock(mutex_);
    const auto found = marks_.find(event);
    need(found != marks_.end(), "no such event");
    need(found->second.device == current_device, "an event of another device than the thread's");
    return found->second;
}

void FakeCuda::enqueue(Stream stream, std::function<void()> work) {
    Queue& to = queue(stream);
    {
        const std::scoped_lock lock(to.mutex);
        to.work.push_back(std::move(work));
    }
    to.changed.notify_one();
}

void FakeCuda::synchronize_stream(Stream stream) noexcept {
    const auto point = std::make_shared<Point>();
    enqueue(stream, [point] { point->pass(); });
    point->wait();
}

FakeCuda::Event FakeCuda::create_event() {
    const std::scoped_lock lock(mutex_);
    const Event event = next_++;
    marks_.emplace(event, Mark{nullptr, current_device});
    return event;
}

void FakeCuda::destroy_event(Event event) noexcept {
    const std::scoped_lock lock(mutex_);
    need(marks_.erase(event) == 1, "destroy_event of what is none");
}

void FakeCuda::record(Event event, Stream stream) {
    if (record_fails_.exchange(false)) {
        throw transfer::CudaError("record: asked to fail");
    }
    auto point = std::make_shared<Point>();
    mark(event).point = point;
    enqueue(stream, [point] { point->pass(); });
}

void FakeCuda::wait_event(Stream stream, Event event) {
    if (const auto point = mark(event).point; point != nullptr) {
        enqueue(stream, [point] { point->wait(); });
    }
}

void FakeCuda::synchronize(Event event) {
    if (const auto point = mark(event).point; point != nullptr) {
        point->wait();
    }
}

void FakeCuda::memcpy_async(void* to, const void* from, std::size_t bytes, Stream stream) {
    const std::uint64_t number = open(true, to, bytes);
    enqueue(stream, [this, to, from, bytes, number] {
        check_order(number);
        std::memcpy(to, from, bytes);
        close(number);
    });
}

void FakeCuda::launch(Stream stream, const void* from, std::size_t bytes, std::function<void()> kernel) {
    const std::uint64_t number = open(false, from, bytes);
    enqueue(stream, [this, kernel = std::move(kernel), number] {
        check_order(number);
        kernel();
        close(number);
    });
}

std::uint64_t FakeCuda::open(bool writes, const void* from, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(from);
    const std::scoped_lock lock(mutex_);
    const std::uint64_t number = accesses_++;
    under_way_.emplace(number, Access{number, writes, begin, begin + bytes});
    return number;
}

// Of two accesses to the same bytes of which one writes, the one that was asked for first must be over.
void FakeCuda::check_order(std::uint64_t number) {
    const std::scoped_lock lock(mutex_);
    const Access& mine = under_way_.at(number);
    for (const auto& [earlier, other] : under_way_) {
        if (earlier < number && (mine.writes || other.writes) && mine.begin < other.end &&
            other.begin < mine.end) {
            need(false, mine.writes
                            ? "a copy overwrites what a kernel has still to read, or another copy to write"
                            : "a kernel reads what has not arrived");
        }
    }
}

void FakeCuda::close(std::uint64_t number) {
    const std::scoped_lock lock(mutex_);
    under_way_.erase(number);
}

}  // namespace finemoe::stress
