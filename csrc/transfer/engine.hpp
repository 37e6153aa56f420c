// The transfer engine: carries the core's commands out on real memory (docs/transfer.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core.hpp"
#include "transfer/copier.hpp"
#include "transfer/device_worker.hpp"
#include "transfer/search_worker.hpp"
#include "transfer/shared.hpp"

namespace finemoe::transfer {

struct EngineSettings {
    std::int64_t chunk_bytes = std::int64_t{1} << 20;
    double bandwidth_bytes_per_s = 0.0;  // of each device; 0: no limit
    double watchdog_s = 120.0;           // a wait ends with an error when nothing has moved for so long
};

class Engine {
  public:
    // Called every 100 ms of a wait; may throw, which ends the wait.
    using Poll = std::function<void()>;

    // One copier per device. The core outlives the engine.
    Engine(Core& core, std::vector<std::unique_ptr<Copier>> copiers, const EngineSettings& settings);
    ~Engine() { close(); }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // The core's `preload`, and the experts' bytes into their slots; before start().
    void preload(std::span<const ExpertId> experts, const Poll& poll);
    void start();
    // Stops the workers after the chunk they are at and joins them. Again: nothing.
    void close();
    // Seconds since the engine was made: what events tell the core.
    double now() const { return around_.now(); }

    // Wakes who has commands after an event of that mask.
    void notify(std::uint64_t mask);
    // Throws what has stopped the engine, if anything has.
    void check() { progress_.check(); }

    // Each waits, as long as something moves, and throws what stops the engine. The first three return the
    // seconds waited.
    double wait_chunk(const Poll& poll);  // every expert of the core's current chunk is resident
    double wait_search(std::int64_t ticket, const Poll& poll);  // done, or abandoned
    double wait_prefetches(const Poll& poll);                   // those of the next layer have arrived
    std::vector<ExpertId> wait_ready(const Poll& poll);  // some uncomputed expert of the chunk is resident
    void drain(const Poll& poll);                        // no load is in flight, every search is done

    // Of the resident experts of the current chunk on that device: see Copier::record_compute.
    void record_compute(int device, std::uintptr_t stream);

    std::vector<DeviceStatistics> device_statistics();
    SearchStatistics search_statistics() { return searches_.statistics(); }

  private:
    double wait(const char* what, const Poll& poll, const std::function<bool()>& done);
    std::string describe(const char* what);

    Core& core_;
    const EngineSettings settings_;
    Progress progress_;
    Surroundings around_;
    std::vector<std::unique_ptr<DeviceWorker>> devices_;
    SearchWorker searches_;
    std::atomic<bool> started_{false}, closed_{false};
    std::mutex close_mutex_;
};

}  // namespace finemoe::transfer
