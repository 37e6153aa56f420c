// What the coming steps will require, as told by a world that knows it (`belady`, `oracle`).
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "types.hpp"

namespace finemoe {

class Foresight {
  public:
    static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

    explicit Foresight(int total_experts) : uses_(static_cast<std::size_t>(total_experts)) {}

    // required[i]: ids that step `step` + i requires. Replaces what was known from `step` on.
    void tell(std::int64_t step, const std::vector<std::vector<ExpertId>>& required) {
        if (step < end_) {
            for (auto& uses : uses_) {
                while (!uses.empty() && uses.back() >= step) {
                    uses.pop_back();
                }
            }
            while (!steps_.empty() && first_ + static_cast<std::int64_t>(steps_.size()) > step) {
                steps_.pop_back();
            }
        }
        if (steps_.empty()) {
            first_ = step;
        }
        for (std::size_t i = 0; i < required.size(); ++i) {
            for (const ExpertId e : required[i]) {
                uses_[static_cast<std::size_t>(e)].push_back(step + static_cast<std::int64_t>(i));
            }
            steps_.push_back(required[i]);
        }
        end_ = step + static_cast<std::int64_t>(required.size());
    }

    // Forgets what is past: only steps after `now` are asked for.
    void advance(std::int64_t now) {
        while (!steps_.empty() && first_ <= now) {
            for (const ExpertId e : steps_.front()) {
                auto& uses = uses_[static_cast<std::size_t>(e)];
                if (!uses.empty() && uses.front() <= now) {
                    uses.pop_front();
                }
            }
            steps_.pop_front();
            ++first_;
        }
    }

    // The first step ≥ `from` known to require the expert.
    std::int64_t next_use(ExpertId expert, std::int64_t from) const {
        for (const std::int64_t step : uses_[static_cast<std::size_t>(expert)]) {
            if (step >= from) {
                return step;
            }
        }
        return kNever;
    }

    std::int64_t first() const { return first_; }
    std::int64_t end() const { return end_; }
    const std::vector<ExpertId>& required(std::int64_t step) const {
        return steps_[static_cast<std::size_t>(step - first_)];
    }

  private:
    std::vector<std::deque<std::int64_t>> uses_;
    std::deque<std::vector<ExpertId>> steps_;
    std::int64_t first_ = 0, end_ = 0;
};

}  // namespace finemoe
