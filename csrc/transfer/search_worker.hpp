// The thread that runs searches and store updates, every ticket in order.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transfer/device_worker.hpp"

namespace finemoe::transfer {

struct SearchStatistics {
    std::int64_t searches = 0;  // and updates
    double busy_s = 0.0;
};

class SearchWorker {
  public:
    explicit SearchWorker(const Surroundings& around) : around_(around) {}

    void start();
    void wake() { wakeup_.raise(); }
    void stop() { wakeup_.stop(); }  // after the search that runs
    void join();

    // Whether the ticket's result has been told to the core, or the ticket was abandoned.
    bool done(std::int64_t ticket) const { return last_.load(std::memory_order_acquire) >= ticket; }
    SearchStatistics statistics();
    std::string describe();

  private:
    void run();
    void search(std::int64_t ticket);

    Surroundings around_;
    Wakeup wakeup_;
    std::thread thread_;
    std::vector<Command> commands_;
    std::atomic<std::int64_t> last_{-1};
    std::mutex figures_mutex_;
    SearchStatistics figures_;
    std::int64_t running_ = -1;
};

}  // namespace finemoe::transfer
