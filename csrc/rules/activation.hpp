// Tokens that experts received: per request that is served (its activation matrix), and since the run began.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "types.hpp"

namespace finemoe {

class Activation {
  public:
    Activation(int layers, int experts)
        : experts_(static_cast<std::size_t>(experts)),
          serving_(static_cast<std::size_t>(layers) * experts_),
          popular_(serving_.size()),
          serving_sum_(static_cast<std::size_t>(layers)) {}

    // counts [J]: tokens of the request that the layer's experts received.
    void add(std::int64_t request, int layer, std::span<const std::int32_t> counts) {
        std::vector<std::int64_t>& matrix = requests_[request];
        matrix.resize(serving_.size());
        const std::size_t first = static_cast<std::size_t>(layer) * experts_;
        for (std::size_t j = 0; j < experts_; ++j) {
            matrix[first + j] += counts[j];
            serving_[first + j] += counts[j];
            popular_[first + j] += counts[j];
            serving_sum_[static_cast<std::size_t>(layer)] += counts[j];
        }
    }

    void forget(std::int64_t request) {
        const auto it = requests_.find(request);
        if (it == requests_.end()) {
            return;
        }
        for (std::size_t e = 0; e < serving_.size(); ++e) {
            serving_[e] -= it->second[e];
            serving_sum_[e / experts_] -= it->second[e];
        }
        requests_.erase(it);
    }

    // A row of a request's matrix; the request must have been seen.
    std::span<const std::int64_t> row(std::int64_t request, int layer) const {
        return layer_of(requests_.at(request), layer);
    }
    std::span<const std::int64_t> popular(int layer) const { return layer_of(popular_, layer); }

    // Share of its layer's tokens that the expert received, of the requests that are served; 0 without any.
    double share(ExpertId expert) const {
        const auto e = static_cast<std::size_t>(expert);
        const std::int64_t sum = serving_sum_[e / experts_];
        return sum > 0 ? static_cast<double>(serving_[e]) / static_cast<double>(sum) : 0.0;
    }

  private:
    std::span<const std::int64_t> layer_of(const std::vector<std::int64_t>& matrix, int layer) const {
        return std::span(matrix).subspan(static_cast<std::size_t>(layer) * experts_, experts_);
    }

    std::size_t experts_;
    std::unordered_map<std::int64_t, std::vector<std::int64_t>> requests_;
    std::vector<std::int64_t> serving_, popular_, serving_sum_;
};

}  // namespace finemoe
