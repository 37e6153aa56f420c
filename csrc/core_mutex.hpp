// A mutex that refuses the thread that holds it: a policy's callback that calls the core again would wait for
// itself.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "types.hpp"

namespace finemoe {

class CoreMutex {
  public:
    void lock() {
        refuse_owner();
        mutex_.lock();
        owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    bool try_lock() {
        refuse_owner();
        const bool taken = mutex_.try_lock();
        if (taken) {
            owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
        }
        return taken;
    }
    void unlock() {
        owner_.store(std::thread::id{}, std::memory_order_relaxed);
        mutex_.unlock();
    }

  private:
    void refuse_owner() const {
        if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) {
            throw CoreError("a policy must not call the core that is asking it");
        }
    }

    std::mutex mutex_;
    std::atomic<std::thread::id> owner_;
};

}  // namespace finemoe
