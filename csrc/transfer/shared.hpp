// What the threads of an engine share: a clock, wake-ups, and what the forward pass waits for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>

namespace finemoe::transfer {

// The engine cannot go on: an expert that no copy brings, a worker's exception, a closed engine.
struct TransferError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Clock = std::chrono::steady_clock;

inline double seconds(Clock::duration span) { return std::chrono::duration<double>(span).count(); }

// Wakes one worker. A wake-up that comes while it works is kept until it looks.
class Wakeup {
  public:
    void raise();
    void stop();
    bool stopped();
    bool take();                               // whether one has come since the last look
    void wait();                               // until one has come, or stop; takes it
    void sleep_until(Clock::time_point time);  // or until stop

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool raised_ = false, stopped_ = false;
};

// What has happened, and the first failure.
class Progress {
  public:
    void event();  // something that a wait may be for
    // A sign of life: bytes or time have passed.
    void moved() { moved_.fetch_add(1, std::memory_order_relaxed); }
    // What has stopped a worker; the first counts.
    void fail(const std::string& reason);
    // The same with the exception that is being handled, such as a policy's: it reaches who waits as it is.
    // It counts more than a reason that nobody has been told.
    void fail_with_current_exception();
    void close();

    std::uint64_t events();
    // Changes as long as anything moves.
    std::uint64_t signs_of_life() { return events() + moved_.load(std::memory_order_relaxed); }
    // Until there are other than so many events, but not longer than that.
    void wait(std::uint64_t seen, Clock::duration longest);
    // Throws the failure: its exception the first time, else TransferError; or TransferError once closed.
    void check();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::uint64_t events_ = 0;
    std::atomic<std::uint64_t> moved_{0};
    bool closed_ = false, failed_ = false, told_ = false;
    std::exception_ptr exception_;
    std::string reason_;
};

}  // namespace finemoe::transfer
