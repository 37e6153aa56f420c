#include "transfer/shared.hpp"

#include <utility>

namespace finemoe::transfer {

void Wakeup::raise() {
    {
        const std::scoped_lock lock(mutex_);
        raised_ = true;
    }
    changed_.notify_one();
}

void Wakeup::stop() {
    {
        const std::scoped_lock lock(mutex_);
        stopped_ = true;
    }
    changed_.notify_one();
}

bool Wakeup::stopped() {
    const std::scoped_lock lock(mutex_);
    return stopped_;
}

bool Wakeup::take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(raised_, false);
}

void Wakeup::wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return raised_ || stopped_; });
    raised_ = false;
}

void Wakeup::sleep_until(Clock::time_point time) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, time, [&] { return stopped_; });
}

void Progress::event() {
    {
        const std::scoped_lock lock(mutex_);
        ++events_;
    }
    changed_.notify_all();
}

void Progress::fail(std::exception_ptr failure) {
    std::string reason = "unknown failure";
    try {
        std::rethrow_exception(failure);
    } catch (const std::exception& error) {
        reason = error.what();
    } catch (...) {
    }
    {
        const std::scoped_lock lock(mutex_);
        if (!failed_) {
            failed_ = true;
            failure_ = std::move(failure);
            reason_ = std::move(reason);
        }
        ++events_;
    }
    changed_.notify_all();
}

void Progress::close() {
    {
        const std::scoped_lock lock(mutex_);
        closed_ = true;
        ++events_;
    }
    changed_.notify_all();
}

std::uint64_t Progress::events() {
    const std::scoped_lock lock(mutex_);
    return events_;
}

void Progress::wait(std::uint64_t seen, Clock::duration longest) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, Clock::now() + longest, [&] { return events_ != seen; });
}

void Progress::check() {
    std::exception_ptr failure;
    {
        const std::scoped_lock lock(mutex_);
        if (failed_) {
            failure = std::exchange(failure_, nullptr);
            if (failure == nullptr) {
                throw TransferError("the transfer engine has stopped: " + reason_);
            }
        } else if (closed_) {
            throw TransferError("the transfer engine is closed");
        }
    }
    if (failure != nullptr) {
        std::rethrow_exception(failure);
    }
}

}  // namespace finemoe::transfer
