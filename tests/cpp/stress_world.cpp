#include "stress_world.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace finemoe::stress {

namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kStepBytes = 8;  // a copier looks for a preemption between steps
constexpr auto kMostSilence = 120s;     // without any event: a deadlock

std::uint8_t weight(ExpertId expert, std::int64_t byte) {
    return static_cast<std::uint8_t>(31 * expert + 7 * byte + 1);
}

}  // namespace

World::World(const Scenario& scenario, std::uint64_t seed)
    : core(scenario.config, -1),
      scenario_(scenario),
      seed_(seed),
      copiers_(static_cast<std::size_t>(scenario.config.devices)),
      slot_of_(static_cast<std::size_t>(scenario.config.total_experts()), -1) {
    const CoreConfig& c = scenario.config;
    for (Copier& copier : copiers_) {
        copier.slots.resize(static_cast<std::size_t>(c.slots_per_device));
        copier.failures.resize(slot_of_.size());
        for (Slot& slot : copier.slots) {
            slot.weights.resize(static_cast<std::size_t>(c.expert_bytes));
        }
    }
    core.preload(scenario.preload);
    for (int g = 0; g < c.devices; ++g) {
        int place = 0;
        for (const ExpertId e : core.residents(g)) {
            Slot& slot = copiers_[static_cast<std::size_t>(g)].slots[static_cast<std::size_t>(place)];
            slot.expert = e;
            slot.bytes = c.expert_bytes;
            slot_of_[static_cast<std::size_t>(e)] = place;
            for (std::int64_t b = 0; b < c.expert_bytes; ++b) {
                slot.weights[static_cast<std::size_t>(b)] = weight(e, b);
            }
            ++place;
        }
    }
    for (int g = 0; g < c.devices; ++g) {
        copiers_[static_cast<std::size_t>(g)].thread = std::thread([this, g] { copy(g); });
    }
    worker_ = std::thread([this] { search(); });
    onlooker_ = std::thread([this] { look_on(); });
    watchdog_ = std::thread([this] { watch(); });
}

void World::check(bool condition, const std::string& problem) const {
    if (!condition) {
        fail(scenario_.name, problem);
    }
}

void World::deliver(std::uint64_t mask) {
    for (std::size_t g = 0; g < copiers_.size(); ++g) {
        if ((mask >> (kDeviceShift + g) & 1U) != 0) {
            copiers_[g].signal.raise();
        }
    }
    if ((mask & kSearchPending) != 0) {
        searches_.raise();
    }
    if ((mask & (kForwardPending | kChunkReady)) != 0 || scenario_.as_ready) {
        forward.raise();
    }
    events_.fetch_add(1, std::memory_order_relaxed);
}

bool World::event(const std::function<std::uint64_t()>& act) {
    try {
        deliver(act());
        return true;
    } catch (const CoreError& error) {
        check(scenario_.lost_expert != kNone, error.what());
        return false;
    }
}

void World::read_weights(ExpertId expert) const {
    const auto place = slot_of_[static_cast<std::size_t>(expert)];
    check(place >= 0, "expert " + std::to_string(expert) + " is computed without a slot");
    const Copier& copier = copiers_[static_cast<std::size_t>(scenario_.config.device_of(expert))];
    const Slot& slot = copier.slots[static_cast<std::size_t>(place)];
    bool right = slot.expert == expert && slot.bytes == scenario_.config.expert_bytes;
    for (std::int64_t b = 0; b < scenario_.config.expert_bytes; ++b) {
        right = right && slot.weights[static_cast<std::size_t>(b)] == weight(expert, b);
    }
    check(right, "expert " + std::to_string(expert) + " is computed with other weights");
}

void World::check_load(const Command& load, int g) const {
    const CoreConfig& c = scenario_.config;
    const Copier& copier = copiers_[static_cast<std::size_t>(g)];
    const std::string name = "load of expert " + std::to_string(load.expert);
    check(load.device == g && c.device_of(load.expert) == g, name + " on the wrong device");
    check(load.slot >= 0 && load.slot < c.slots_per_device, name + ": no such slot");
    check(load.offset + load.bytes == c.expert_bytes && load.bytes > 0, name + ": bytes do not add up");
    const Slot& slot = copier.slots[static_cast<std::size_t>(load.slot)];
    if (load.offset > 0) {
        check(slot.expert == load.expert && slot.bytes == load.offset, name + " resumes elsewhere");
    } else if (load.evicts != kNone) {
        check(slot.expert == load.evicts && slot.bytes == c.expert_bytes, name + ": its victim is elsewhere");
    } else {
        check(slot.expert == kNone || slot.bytes < c.expert_bytes, name + " into a slot in use");
    }
}

bool World::copy_fails(const Command& load, Copier& copier, std::mt19937_64& random) const {
    int& failures = copier.failures[static_cast<std::size_t>(load.expert)];
    const bool lost = load.expert == scenario_.lost_expert;
    const bool unlucky = failures < 2 && std::uniform_real_distribution()(random) < scenario_.failure_rate;
    failures = lost || unlucky ? failures + 1 : 0;
    return lost || unlucky;
}

void World::copy(int g) {
    Copier& me = copiers_[static_cast<std::size_t>(g)];
    const std::int64_t whole = scenario_.config.expert_bytes;
    std::mt19937_64 random(seed_ + 1000 + static_cast<std::uint64_t>(g));
    Command load;
    bool loading = false, asked = false;
    while (!stop_.load(std::memory_order_relaxed)) {
        me.busy = true;
        if (me.signal.take()) {
            std::vector<Command> commands;
            core.take_device(g, commands);
            for (Command& command : commands) {
                if (command.kind == RecordKind::preempt_prefetch) {
                    asked = loading;  // the load may be over by now: nothing to pause
                    continue;
                }
                check(!loading, "device " + std::to_string(g) + " has two loads in flight");
                load = std::move(command);
                loading = true;
                asked = false;
                check_load(load, g);
                Slot& slot = me.slots[static_cast<std::size_t>(load.slot)];
                if (load.evicts != kNone) {
                    slot_of_[static_cast<std::size_t>(load.evicts)] = -1;
                }
                slot.expert = load.expert;
                slot.bytes = load.offset;
            }
        }
        if (!loading) {
            me.busy = false;
            std::this_thread::sleep_for(20us);
            continue;
        }
        Slot& slot = me.slots[static_cast<std::size_t>(load.slot)];
        const bool demand = load.load_kind == LoadKind::demand;
        if (asked) {
            loading = false;
            me.prefetch_bytes += slot.bytes - load.offset;
            check(!demand, "a demand load is asked to pause");
            if (!event([&] { return core.paused(load.expert, slot.bytes); })) {
                return;
            }
            continue;
        }
        for (const auto end = std::min(whole, slot.bytes + kStepBytes); slot.bytes < end; ++slot.bytes) {
            slot.weights[static_cast<std::size_t>(slot.bytes)] = weight(load.expert, slot.bytes);
        }
        dawdle(random);
        if (slot.bytes < whole) {
            continue;
        }
        loading = false;
        bool running = true;
        if (copy_fails(load, me, random)) {
            slot.expert = kNone;
            running = event([&] { return core.load_failed(load.expert, "unlucky"); });
        } else {
            slot_of_[static_cast<std::size_t>(load.expert)] = load.slot;
            (demand ? me.demand_loads : me.prefetch_loads) += 1;
            (demand ? me.demand_bytes : me.prefetch_bytes) += load.bytes;
            running = event([&] { return core.loaded(load.expert); });
        }
        if (!running) {
            return;
        }
    }
}

void World::search() {
    std::mt19937_64 random(seed_ + 1);
    std::int64_t expected = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        const bool last = stop_search_.load(std::memory_order_relaxed);
        if (!searches_.take()) {
            if (last) {
                return;
            }
            std::this_thread::sleep_for(20us);
            continue;
        }
        std::vector<Command> commands;
        core.take_searches(commands);
        for (const Command& command : commands) {
            const std::int64_t ticket = command.ticket;
            check(ticket == expected++, "tickets are not issued in order");
            dawdle(random);
            if (random() % 20 == 0) {  // late for its layer, or for its iteration
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
            }
            if (random() % 4 != 0) {  // otherwise search_done has to run it
                core.run_searches(ticket);
            }
            const bool left_out = random() % 2 == 0 && core.search_abandoned(ticket);
            if (!left_out && !event([&] { return core.search_done(ticket); })) {
                return;
            }
            last_done_.store(ticket, std::memory_order_relaxed);
        }
    }
}

// Reads what a progress line or a metrics page would, at any time.
void World::look_on() {
    std::int64_t activated = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        for (int g = 0; g < scenario_.config.devices; ++g) {
            check(core.residents(g).size() <= static_cast<std::size_t>(scenario_.config.slots_per_device),
                  "more experts resident than slots");
        }
        const Totals now = core.totals();
        check(now.activated >= activated && now.hits + now.late <= now.activated, "totals run backward");
        activated = now.activated;
        check(
            core.store_contents().written.size() <= static_cast<std::size_t>(scenario_.config.store_capacity),
            "more maps stored than the capacity");
        core.layer_counts();
        core.counters();
        core.take_log();
        std::this_thread::sleep_for(500us);
    }
}

void World::watch() {
    std::int64_t seen = -1;
    auto since = std::chrono::steady_clock::now();
    while (!stop_.load(std::memory_order_relaxed)) {
        const std::int64_t now = events_.load(std::memory_order_relaxed);
        if (now != seen) {
            seen = now;
            since = std::chrono::steady_clock::now();
        }
        check(std::chrono::steady_clock::now() - since < kMostSilence, "deadlock: nothing happens any more");
        std::this_thread::sleep_for(10ms);
    }
}

bool World::idle() const {
    return std::none_of(copiers_.begin(), copiers_.end(),
                        [](const Copier& copier) { return copier.busy || copier.signal.raised(); });
}

void World::finish() {
    stop_search_ = true;
    worker_.join();
    for (std::int64_t before = -1; before != events_ || !idle();) {
        before = events_;
        std::this_thread::sleep_for(2ms);
    }
    close();
    Counters moved;
    for (const Copier& copier : copiers_) {
        moved.demand_loads += copier.demand_loads;
        moved.prefetch_loads += copier.prefetch_loads;
        moved.demand_bytes += copier.demand_bytes;
        moved.prefetch_bytes += copier.prefetch_bytes;
    }
    const Counters counted = core.counters();
    check(counted.demand_loads == moved.demand_loads && counted.prefetch_loads == moved.prefetch_loads,
          "loads counted and done differ");
    check(counted.demand_bytes == moved.demand_bytes && counted.prefetch_bytes == moved.prefetch_bytes,
          "bytes counted and moved differ");
    const std::int64_t judged = counted.useful_bytes + counted.wasted_bytes + counted.unused_bytes;
    check(judged == counted.prefetch_bytes, "prefetched bytes are not all useful, wasted or unused");
    for (int g = 0; g < scenario_.config.devices; ++g) {
        std::vector<ExpertId> held;
        for (const Slot& slot : copiers_[static_cast<std::size_t>(g)].slots) {
            if (slot.expert != kNone && slot.bytes == scenario_.config.expert_bytes) {
                held.push_back(slot.expert);
            }
        }
        check(core.residents(g) == held, "resident experts and filled slots differ");
    }
}

void World::close() {
    stop_ = true;
    for (Copier& copier : copiers_) {
        if (copier.thread.joinable()) {
            copier.thread.join();
        }
    }
    for (std::thread* thread : {&worker_, &onlooker_, &watchdog_}) {
        if (thread->joinable()) {
            thread->join();
        }
    }
}

}  // namespace finemoe::stress
