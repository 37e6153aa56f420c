// A token bucket: bytes at no more than so many per second, as a slower link would bring them.
#pragma once

#include <algorithm>

#include "transfer/shared.hpp"

namespace finemoe::transfer {

class RateLimit {
  public:
    // bytes_per_s: 0 for no limit
    explicit RateLimit(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}

    bool limited() const { return bytes_per_s_ > 0.0; }

    // The link has nothing to do.
    void idle() { idle_ = true; }

    // When a copy of so many bytes that begins now may be over. Copies that follow on each other are paced as
    // one: what a worker wakes up late, up to kSlack, is made up for.
    Clock::time_point reserve(std::int64_t bytes, Clock::time_point now) {
        const auto span = std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_s_);
        free_at_ = std::max(free_at_, idle_ ? now : now - kSlack) +
                   std::chrono::duration_cast<Clock::duration>(span);
        idle_ = false;
        return free_at_;
    }

  private:
    static constexpr std::chrono::milliseconds kSlack{50};

    double bytes_per_s_;
    Clock::time_point free_at_{};
    bool idle_ = true;
};

}  // namespace finemoe::transfer
