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

    // When a copy of so many bytes that begins now may be over. A pause shorter than kSlack is made up for:
    // it is the workers waking up late, not an idle link.
    Clock::time_point reserve(std::int64_t bytes, Clock::time_point now) {
        const auto span = std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_s_);
        free_at_ = std::max(free_at_, now - kSlack) + std::chrono::duration_cast<Clock::duration>(span);
        return free_at_;
    }

  private:
    static constexpr std::chrono::milliseconds kSlack{1};

    double bytes_per_s_;
    Clock::time_point free_at_{};
};

}  // namespace finemoe::transfer
