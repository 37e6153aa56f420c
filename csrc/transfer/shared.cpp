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

void Progress::fail(const std::string& reason) {
    {
        const std::scoped_lock lock(mutex_);
        if (!failed_) {
            failed_ = true;
            reason_ = reason;
        }
        ++events_;
    }
    changed_.notify_all();
}

void Progress::fail_with_current_exception() {
    std::string reason = "unknown failure";
    try {
        throw;
    } catch (const std::exception& error) {
        reason = error.what();  // not under the lock: a Python exception takes the GIL for it
    } catch (...) {
    }
    {
        const std::scoped_lock lock(mutex_);
        if (!failed_ || (exception_ == nullptr && !told_)) {
            failed_ = true;
            exception_ = std::current_exception();
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
    std::exception_ptr exception;
    {
        const std::scoped_lock lock(mutex_);
        if (!failed_ && closed_) {
            throw TransferError("the transfer engine is closed");
        }
        if (!failed_) {
            return;
        }
        told_ = true;
        exception = std::exchange(exception_, nullptr);
        if (exception == nullptr) {
            throw TransferError(reason_);
        }
    }
    std::rethrow_exception(exception);
}

}  // namespace finemoe::transfer
