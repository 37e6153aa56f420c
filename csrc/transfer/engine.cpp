#include "transfer/engine.hpp"

#include <utility>

namespace finemoe::transfer {

namespace {
constexpr std::chrono::milliseconds kPollEvery{100};
}

Engine::Engine(Core& core, std::vector<std::unique_ptr<Copier>> copiers, const EngineSettings& settings)
    : core_(core),
      settings_(settings),
      around_{core, progress_, Clock::now(), [this](std::uint64_t mask) { notify(mask); }},
      searches_(around_) {
    if (settings.chunk_bytes < 1 || !(settings.bandwidth_bytes_per_s >= 0.0) ||
        !(settings.watchdog_s > 0.0)) {
        throw SourceError("TransferEngine: chunk_bytes (" + std::to_string(settings.chunk_bytes) +
                          ") must be at least 1, a bandwidth limit and watchdog_s more than 0.");
    }
    if (copiers.size() != static_cast<std::size_t>(core.config().devices)) {
        throw SourceError("TransferEngine: " + std::to_string(copiers.size()) + " arenas for " +
                          std::to_string(core.config().devices) + " devices of the core.");
    }
    for (auto& copier : copiers) {
        devices_.push_back(std::make_unique<DeviceWorker>(static_cast<int>(devices_.size()),
                                                          std::move(copier), around_, settings.chunk_bytes,
                                                          settings.bandwidth_bytes_per_s));
    }
}

void Engine::preload(std::span<const ExpertId> experts, const Poll& poll) {
    if (started_ || closed_) {
        throw TransferError("experts are preloaded before the engine starts");
    }
    core_.preload(experts, now());
    for (const ExpertId e : experts) {
        try {
            devices_[static_cast<std::size_t>(core_.config().device_of(e))]->fill(e, core_.slot(e));
        } catch (const CopyError& error) {
            progress_.fail(error.what());
            progress_.check();
        }
        poll();
    }
}

void Engine::start() {
    if (started_ || closed_) {
        throw TransferError(closed_ ? "the transfer engine is closed" : "the transfer engine runs already");
    }
    started_ = true;
    for (auto& device : devices_) {
        device->start();
        device->wake();  // for what the core has decided so far
    }
    searches_.start();
    searches_.wake();
}

void Engine::close() {
    const std::scoped_lock lock(close_mutex_);
    if (closed_.exchange(true)) {
        return;
    }
    progress_.close();
    for (auto& device : devices_) {
        device->stop();
    }
    searches_.stop();
    for (auto& device : devices_) {
        device->join();
    }
    searches_.join();
}

void Engine::notify(std::uint64_t mask) {
    for (std::size_t g = 0; g < devices_.size(); ++g) {
        if ((mask >> (kDeviceShift + g) & 1U) != 0) {
            devices_[g]->wake();
        }
    }
    if ((mask & kSearchPending) != 0) {
        searches_.wake();
    }
    progress_.event();
}

double Engine::wait(const char* what, const Poll& poll, const std::function<bool()>& done) {
    const Clock::time_point began = Clock::now();
    Clock::time_point polled = began, moved = began;
    std::uint64_t signs = progress_.signs_of_life();
    for (;;) {
        const std::uint64_t seen = progress_.events();
        progress_.check();
        if (done()) {
            return seconds(Clock::now() - began);
        }
        if (!started_) {
            throw TransferError("the transfer engine has not been started");
        }
        progress_.wait(seen, kPollEvery);
        const Clock::time_point now = Clock::now();
        if (now - polled >= kPollEvery) {
            polled = now;
            poll();
        }
        if (const std::uint64_t latest = progress_.signs_of_life(); latest != signs) {
            signs = latest;
            moved = now;
        } else if (seconds(now - moved) > settings_.watchdog_s) {
            throw TransferError(describe(what));
        }
    }
}

double Engine::wait_chunk(const Poll& poll) {
    return wait("the current chunk's experts", poll, [&] { return core_.chunk_resident(); });
}

double Engine::wait_search(std::int64_t ticket, const Poll& poll) {
    return wait("a search", poll, [&] { return searches_.done(ticket); });
}

double Engine::wait_prefetches(const Poll& poll) {
    return wait("prefetches of the next layer", poll, [&] { return !core_.prefetch_open(); });
}

std::vector<ExpertId> Engine::wait_ready(const Poll& poll) {
    std::vector<ExpertId> ready;
    wait("an expert of the current chunk", poll, [&] {
        const bool all =
            core_.chunk_resident();  // asked first: the last one may arrive between the questions
        ready = core_.chunk_ready();
        return all || !ready.empty();
    });
    return ready;
}

void Engine::drain(const Poll& poll) {
    wait("loads and searches to end", poll, [&] { return core_.idle(); });
}

void Engine::record_compute(int device, std::uintptr_t stream) {
    if (device < 0 || device >= core_.config().devices) {
        throw SourceError("record_compute: there is no device " + std::to_string(device) + ".");
    }
    std::vector<int> slots;
    for (const Placed& placed : core_.chunk_slots()) {
        if (placed.slot >= 0 && core_.config().device_of(placed.expert) == device) {
            slots.push_back(placed.slot);
        }
    }
    devices_[static_cast<std::size_t>(device)]->copier().record_compute(slots, stream);
}

std::vector<DeviceStatistics> Engine::device_statistics() {
    std::vector<DeviceStatistics> all;
    for (auto& device : devices_) {
        all.push_back(device->statistics());
    }
    return all;
}

std::string Engine::describe(const char* what) {
    std::string text = "nothing has moved for " + std::to_string(settings_.watchdog_s) +
                       " s while the forward pass waits for " + what + ". Missing experts:";
    for (const Placed& placed : core_.chunk_slots()) {
        if (placed.slot < 0) {
            text.append(" ").append(std::to_string(placed.expert));
        }
    }
    for (auto& device : devices_) {
        text += "; " + device->describe();
    }
    return text + "; " + searches_.describe();
}

}  // namespace finemoe::transfer
