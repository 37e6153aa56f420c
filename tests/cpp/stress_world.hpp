// A world of threads around one core: a copier per device, one search worker, an onlooker and a watchdog.
// What they share apart from the core (weights, slots) has no lock of its own: only the core's word orders
// it, so the thread sanitizer sees every expert that is overwritten while it is computed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core.hpp"
#include "stress_scenarios.hpp"

namespace finemoe::stress {

// A wake-up that orders nothing: relaxed, so that it hides no missing lock in the core.
class Signal {
  public:
    void raise() { raised_.store(true, std::memory_order_relaxed); }
    bool take() { return raised_.exchange(false, std::memory_order_relaxed); }
    bool raised() const { return raised_.load(std::memory_order_relaxed); }

  private:
    std::atomic<bool> raised_{false};
};

class World {
  public:
    World(const Scenario& scenario, std::uint64_t seed);
    ~World() { close(); }
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    Core core;

    // Hands out the commands of an event, as its mask says.
    void deliver(std::uint64_t mask);
    Signal forward;
    bool search_is_done(std::int64_t ticket) const {
        return last_done_.load(std::memory_order_relaxed) >= ticket;
    }
    // Reads the weights of a resident expert; fails where they are not this expert's.
    void read_weights(ExpertId expert) const;
    void check(bool condition, const std::string& problem) const;

    // Waits until nothing is left to do, stops the threads, and compares what was moved with the core's
    // counters.
    void finish();
    // Stops the threads as they are.
    void close();

  private:
    struct Slot {
        ExpertId expert = kNone;
        std::int64_t bytes = 0;
        std::vector<std::uint8_t> weights;
    };
    struct Copier {
        std::vector<Slot> slots;
        Signal signal;
        std::atomic<bool> busy{false};
        std::int64_t demand_loads = 0, prefetch_loads = 0, demand_bytes = 0, prefetch_bytes = 0;
        std::vector<int> failures;  // in a row, per expert
        std::thread thread;
    };

    void copy(int g);
    void check_load(const Command& load, int g) const;
    bool copy_fails(const Command& load, Copier& copier, std::mt19937_64& random) const;
    void search();
    void look_on();
    void watch();
    bool idle() const;
    // Runs an event; false where the core has stopped, as a scenario with a lost expert does.
    bool event(const std::function<std::uint64_t()>& act);

    const Scenario scenario_;
    const std::uint64_t seed_;
    std::vector<Copier> copiers_;
    std::vector<int> slot_of_;  // per expert
    Signal searches_;
    std::atomic<std::int64_t> last_done_{-1}, events_{0};
    std::atomic<bool> stop_search_{false}, stop_{false};
    std::thread worker_, onlooker_, watchdog_;
};

}  // namespace finemoe::stress
