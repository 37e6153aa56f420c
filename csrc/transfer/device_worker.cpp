#include "transfer/device_worker.hpp"

#include <algorithm>
#include <utility>

namespace finemoe::transfer {

namespace {
constexpr std::chrono::milliseconds kSignOfLife{100};
}

// After an Abort the core refuses every event: what failed is for the worker to say that could not load.
void fail_unless_aborted(const Surroundings& around, const CoreError& error) {
    if (around.core.abort_reason().empty()) {
        around.progress.fail(std::string("the policy core refused an event: ") + error.what());
    }
}

DeviceWorker::DeviceWorker(int device, std::unique_ptr<Copier> copier, const Surroundings& around,
                           std::int64_t chunk_bytes, double bytes_per_s)
    : device_(device),
      copier_(std::move(copier)),
      around_(around),
      chunk_bytes_(chunk_bytes),
      limit_(bytes_per_s) {}

void DeviceWorker::start() {
    thread_ = std::thread([this] { run(); });
}

void DeviceWorker::join() {
    if (thread_.joinable()) {
        thread_.join();
    }
}

void DeviceWorker::run() {
    try {
        for (;;) {
            bool news = true;
            if (load_) {
                news = wakeup_.take();
            } else if (!wakeup_.take()) {
                limit_.idle();
                wakeup_.wait();
            }
            if (wakeup_.stopped()) {
                break;
            }
            if (news) {
                take_commands();
            }
            if (load_) {
                advance();
            }
        }
    } catch (const TransferError& error) {
        around_.progress.fail(error.what());
    } catch (const CoreError& error) {
        fail_unless_aborted(around_, error);
    } catch (...) {
        around_.progress.fail_with_current_exception();
    }
    drain_copier();  // nothing may be written into an arena whose engine is gone
}

void DeviceWorker::take_commands() {
    around_.core.take_device(device_, commands_);
    for (const Command& command : commands_) {
        if (command.kind == RecordKind::preempt_prefetch) {
            asked_to_pause_ = load_.has_value();  // without one, the load it meant is over by now
        } else {
            begin(command);
        }
    }
}

void DeviceWorker::begin(const Command& load) {
    if (load_) {
        throw TransferError("device " + std::to_string(device_) + " was given expert " +
                            std::to_string(load.expert) + " while expert " + std::to_string(load_->expert) +
                            " is in flight");
    }
    load_ = load;
    asked_to_pause_ = false;
    position_ = load.offset;
    const std::scoped_lock lock(figures_mutex_);
    loading_since_ = Clock::now();
    doing_ = std::string(load.load_kind == LoadKind::demand ? "demand" : "prefetch") + " of expert " +
             std::to_string(load.expert) + " into slot " + std::to_string(load.slot);
}

// One step: a chunk more for the copier, or the end of the oldest it has, or the end of the load.
void DeviceWorker::advance() {
    const std::int64_t end = load_->offset + load_->bytes;
    try {
        if (!asked_to_pause_ && position_ < end && in_flight_.size() < copier_->depth()) {
            submit_next();
        } else if (!in_flight_.empty()) {
            finish_oldest();
        } else {
            report();
        }
    } catch (const CopyError& error) {
        drain_copier();
        report_failure(error.what());
    }
}

void DeviceWorker::submit_next() {
    const std::int64_t end = load_->offset + load_->bytes;
    const Chunk chunk{load_->expert, load_->slot, position_, std::min(chunk_bytes_, end - position_)};
    const Clock::time_point now = Clock::now();
    copier_->submit(chunk);
    position_ += chunk.bytes;
    in_flight_.push_back({chunk.bytes, limit_.limited() ? limit_.reserve(chunk.bytes, now) : now});
}

void DeviceWorker::finish_oldest() {
    const InFlight oldest = in_flight_.front();
    in_flight_.pop_front();
    copier_->wait_oldest();
    around_.progress.moved();
    const Clock::time_point arrived = Clock::now();
    while (Clock::now() < oldest.due && !wakeup_.stopped()) {
        wakeup_.sleep_until(std::min(oldest.due, Clock::now() + kSignOfLife));
        around_.progress.moved();
    }
    const std::scoped_lock lock(figures_mutex_);
    figures_.bytes += oldest.bytes;
    figures_.limited_s += oldest.due > arrived ? seconds(Clock::now() - arrived) : 0.0;
}

// After a failure, or at the end: what becomes of the chunks does not matter, but they must be over.
void DeviceWorker::drain_copier() {
    for (; !in_flight_.empty(); in_flight_.pop_front()) {
        try {
            copier_->wait_oldest();
        } catch (const CopyError&) {  // said already, or nobody is left to tell
        }
    }
}

void DeviceWorker::report() {
    const ExpertId expert = load_->expert;
    const bool whole = position_ == load_->offset + load_->bytes;
    end_load(whole ? &DeviceStatistics::loads : &DeviceStatistics::pauses);
    around_.notify(whole ? around_.core.loaded(expert, around_.now())
                         : around_.core.paused(expert, position_, around_.now()));
}

void DeviceWorker::report_failure(const std::string& reason) {
    const ExpertId expert = load_->expert;
    end_load(&DeviceStatistics::failures);
    around_.notify(around_.core.load_failed(expert, reason, around_.now()));
    if (const std::string aborted = around_.core.abort_reason(); !aborted.empty()) {
        throw TransferError("expert " + std::to_string(expert) +
                            " could not be loaded in three attempts; the last: " + aborted);
    }
}

void DeviceWorker::end_load(std::int64_t DeviceStatistics::* count) {
    load_.reset();
    const std::scoped_lock lock(figures_mutex_);
    figures_.*count += 1;
    figures_.busy_s += seconds(Clock::now() - *std::exchange(loading_since_, std::nullopt));
    doing_ = "idle";
}

void DeviceWorker::fill(ExpertId expert, int slot) {
    const std::int64_t whole = around_.core.config().expert_bytes;
    for (std::int64_t at = 0; at < whole; at += chunk_bytes_) {
        copier_->submit({expert, slot, at, std::min(chunk_bytes_, whole - at)});
        copier_->wait_oldest();
    }
}

DeviceStatistics DeviceWorker::statistics() {
    const std::scoped_lock lock(figures_mutex_);
    DeviceStatistics figures = figures_;
    if (loading_since_) {
        figures.busy_s += seconds(Clock::now() - *loading_since_);
    }
    return figures;
}

std::string DeviceWorker::describe() {
    const std::scoped_lock lock(figures_mutex_);
    return "device " + std::to_string(device_) + ": " + doing_;
}

}  // namespace finemoe::transfer
