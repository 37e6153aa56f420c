// One device's thread: drains the device's outbox, copies chunk by chunk, and reports to the core.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core.hpp"
#include "transfer/copier.hpp"
#include "transfer/rate_limit.hpp"
#include "transfer/shared.hpp"

namespace finemoe::transfer {

struct DeviceStatistics {
    std::int64_t loads = 0, pauses = 0, failures = 0, bytes = 0;  // bytes: of chunks that arrived
    double busy_s = 0.0;                                          // with a load in flight
    double limited_s = 0.0;                                       // of these, waiting for the bandwidth limit
};

// What a worker needs of its engine.
struct Surroundings {
    Core& core;
    Progress& progress;
    Clock::time_point start;
    std::function<void(std::uint64_t mask)> notify;

    double now() const { return seconds(Clock::now() - start); }
};

void fail_unless_aborted(const Surroundings& around, const CoreError& error);

class DeviceWorker {
  public:
    DeviceWorker(int device, std::unique_ptr<Copier> copier, const Surroundings& around,
                 std::int64_t chunk_bytes, double bytes_per_s);

    void start();
    void wake() { wakeup_.raise(); }
    void stop() { wakeup_.stop(); }  // after the chunks that the copier has
    void join();

    // Copies a whole expert, on the calling thread, before start(). Throws CopyError.
    void fill(ExpertId expert, int slot);
    Copier& copier() { return *copier_; }
    DeviceStatistics statistics();
    std::string describe();  // what it is doing, for a person

  private:
    struct InFlight {
        std::int64_t bytes = 0;
        Clock::time_point due{};  // not over before that, by the bandwidth limit
    };

    void run();
    void take_commands();
    void begin(const Command& load);
    void advance();
    void submit_next();
    void finish_oldest();
    void drain_copier();
    void report();
    void report_failure(const std::string& reason);
    void end_load(std::int64_t DeviceStatistics::* count);

    const int device_;
    std::unique_ptr<Copier> copier_;
    Surroundings around_;
    const std::int64_t chunk_bytes_;
    RateLimit limit_;
    Wakeup wakeup_;
    std::thread thread_;
    std::vector<Command> commands_;

    std::optional<Command> load_;
    bool asked_to_pause_ = false;
    std::int64_t position_ = 0;  // bytes of the slab handed to the copier, and before
    std::deque<InFlight> in_flight_;

    std::mutex figures_mutex_;
    DeviceStatistics figures_;
    std::optional<Clock::time_point> loading_since_;  // the load in flight
    std::string doing_ = "idle";
};

}  // namespace finemoe::transfer
