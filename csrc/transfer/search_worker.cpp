#include "transfer/search_worker.hpp"

namespace finemoe::transfer {

void SearchWorker::start() {
    thread_ = std::thread([this] { run(); });
}

void SearchWorker::join() {
    if (thread_.joinable()) {
        thread_.join();
    }
}

void SearchWorker::run() {
    try {
        for (;;) {
            wakeup_.wait();
            if (wakeup_.stopped()) {
                return;
            }
            around_.core.take_searches(commands_);
            for (const Command& command : commands_) {
                if (wakeup_.stopped()) {
                    return;
                }
                search(command.ticket);
            }
        }
    } catch (const CoreError& error) {
        fail_unless_aborted(around_, error);
    } catch (...) {
        around_.progress.fail_with_current_exception();
    }
}

void SearchWorker::search(std::int64_t ticket) {
    {
        const std::scoped_lock lock(figures_mutex_);
        running_ = ticket;
    }
    const Clock::time_point began = Clock::now();
    around_.core.run_searches(ticket);
    {
        const std::scoped_lock lock(figures_mutex_);
        figures_.searches += 1;
        figures_.busy_s += seconds(Clock::now() - began);
        running_ = -1;
    }
    std::uint64_t mask = 0;
    if (!around_.core.search_abandoned(ticket)) {
        mask = around_.core.search_done(ticket, around_.now());
    }
    last_.store(ticket, std::memory_order_release);
    around_.notify(mask);
}

SearchStatistics SearchWorker::statistics() {
    const std::scoped_lock lock(figures_mutex_);
    return figures_;
}

std::string SearchWorker::describe() {
    const std::scoped_lock lock(figures_mutex_);
    return "searches: done up to ticket " + std::to_string(last_.load()) +
           (running_ < 0 ? "" : ", running ticket " + std::to_string(running_));
}

}  // namespace finemoe::transfer
