#include "feed.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace finemoe {

namespace {

void need(bool condition, const std::string& problem) {
    if (!condition) {
        throw CoreError(problem);
    }
}

}  // namespace

Feed::Feed(int layers, int experts, int embedding_width)
    : layers_(layers), experts_(experts), width_(embedding_width) {
    need(layers >= 1 && layers <= 4096 && experts >= 1 && experts <= 65536 && embedding_width >= 0,
         "Feed: layers, experts or embedding_width out of range");
    counts_.resize(static_cast<std::size_t>(layers) * static_cast<std::size_t>(experts));
}

void Feed::add(std::int64_t request, RequestRouting v) {
    const auto n = static_cast<std::size_t>(v.iterations);
    const auto cells = n * static_cast<std::size_t>(layers_);
    const std::string who = "routing of request " + std::to_string(request) + ": ";
    need(n > 0 && v.gate.size() == cells * static_cast<std::size_t>(experts_), who + "gate is not [n, L, J]");
    need(v.offsets.size() == cells + 1 && v.offsets.front() == 0 &&
             v.offsets.back() == static_cast<std::int64_t>(v.experts.size()) &&
             std::is_sorted(v.offsets.begin(), v.offsets.end()) && v.experts.size() == v.token_counts.size(),
         who + "offsets, experts and token counts do not fit together");
    need(v.embedding.empty() || v.embedding.size() == n * static_cast<std::size_t>(width_),
         who + "embedding is not [n, h]");
    need(std::all_of(v.token_counts.begin(), v.token_counts.end(), [](std::int32_t n) { return n > 0; }),
         who + "an expert without tokens");
    const auto beyond = std::find_if(v.experts.begin(), v.experts.end(),
                                     [&](std::uint16_t expert) { return expert >= experts_; });
    if (beyond != v.experts.end()) {
        need(false, who + "expert " + std::to_string(*beyond) + " is not below J");
    }
    for (const auto& [distance, rows] : v.speculation) {
        need(distance >= 1 && distance < layers_ && rows.size() == v.gate.size(),
             who + "speculation is not [n, L, J] at a distance below L");
    }
    const std::scoped_lock lock(mutex_);
    requests_[request] = std::make_shared<const RequestRouting>(std::move(v));
}

const Feed::Shared& Feed::routing(std::int64_t request) const {
    const auto it = requests_.find(request);
    need(it != requests_.end(), "request " + std::to_string(request) + " has no routing");
    return it->second;
}

void Feed::remove(std::int64_t request) {
    const std::scoped_lock lock(mutex_);
    requests_.erase(request);
}

std::vector<std::int32_t> Feed::token_counts() const {
    const std::scoped_lock lock(mutex_);
    return counts_;
}

void Feed::select(std::span<const std::int64_t> requests, std::span<const std::int64_t> iterations,
                  std::span<const std::int32_t> tokens, Phase phase) {
    need(requests.size() == iterations.size() && requests.size() == tokens.size(),
         "one iteration and token count per row");
    const std::scoped_lock lock(mutex_);
    selected_.clear();
    rows_.clear();
    std::fill(counts_.begin(), counts_.end(), 0);
    for (std::size_t r = 0; r < requests.size(); ++r) {
        const Shared& shared = routing(requests[r]);
        const RequestRouting& v = *shared;
        need(iterations[r] >= 0 && iterations[r] < v.iterations,
             "request " + std::to_string(requests[r]) + " has no iteration " + std::to_string(iterations[r]));
        selected_.push_back({shared, iterations[r]});
        rows_.push_back({requests[r], phase, tokens[r], !v.embedding.empty()});
        for (int l = 0; l < layers_; ++l) {
            const auto cell = static_cast<std::size_t>(iterations[r] * layers_ + l);
            std::int32_t* counts = counts_.data() + static_cast<std::ptrdiff_t>(l) * experts_;
            for (std::int64_t i = v.offsets[cell]; i < v.offsets[cell + 1]; ++i) {
                counts[v.experts[static_cast<std::size_t>(i)]] += v.token_counts[static_cast<std::size_t>(i)];
            }
        }
    }
}

std::uint64_t Feed::begin_iteration(Core& core, double time_s) {
    const std::scoped_lock lock(mutex_);
    buffer_.clear();
    const bool embedded =
        core.config().embedding_width > 0 &&
        std::any_of(rows_.begin(), rows_.end(), [](const Row& r) { return r.has_embedding; });
    if (embedded) {
        const auto width = static_cast<std::size_t>(width_);
        buffer_.assign(rows_.size() * width, 0);
        for (std::size_t r = 0; r < rows_.size(); ++r) {
            if (rows_[r].has_embedding) {
                const auto from =
                    std::span(selected_[r].routing->embedding)
                        .subspan(static_cast<std::size_t>(selected_[r].iteration) * width, width);
                std::copy(from.begin(), from.end(), buffer_.begin() + static_cast<std::ptrdiff_t>(r * width));
            }
        }
    }
    return core.begin_iteration(rows_, buffer_, time_s);
}

std::uint64_t Feed::gate(Core& core, int layer, double time_s) {
    need(layer >= 0 && layer < layers_, "no such layer");
    const std::scoped_lock lock(mutex_);
    need(core.config().experts == experts_, "the feed and the core differ in experts");
    buffer_.clear();
    for (const Selected& row : selected_) {
        copy_row(row.routing->gate, row.iteration, layer);
    }
    required_.clear();
    required_counts_.clear();
    const std::int32_t* counts = counts_.data() + static_cast<std::ptrdiff_t>(layer) * experts_;
    for (int j = 0; j < experts_; ++j) {
        if (counts[j] > 0) {
            required_.push_back(j);
            required_counts_.push_back(counts[j]);
        }
    }
    row_counts_.clear();
    if (core.config().row_counts()) {
        collect_row_counts(layer);
    }
    return core.gate(layer, buffer_, required_, required_counts_, time_s, row_counts_);
}

// Appends the row of one iteration and layer of `values` [n, L, J].
void Feed::copy_row(const std::vector<std::uint16_t>& values, std::int64_t iteration, int layer) {
    const auto from = values.begin() + static_cast<std::ptrdiff_t>((iteration * layers_ + layer) * experts_);
    buffer_.insert(buffer_.end(), from, from + experts_);
}

void Feed::collect_row_counts(int layer) {
    row_counts_.assign(selected_.size() * static_cast<std::size_t>(experts_), 0);
    for (std::size_t r = 0; r < selected_.size(); ++r) {
        const RequestRouting& v = *selected_[r].routing;
        const auto cell = static_cast<std::size_t>(selected_[r].iteration * layers_ + layer);
        for (std::int64_t i = v.offsets[cell]; i < v.offsets[cell + 1]; ++i) {
            const auto k = static_cast<std::size_t>(i);
            row_counts_[r * static_cast<std::size_t>(experts_) + v.experts[k]] += v.token_counts[k];
        }
    }
}

std::uint64_t Feed::speculation(Core& core, int layer, int target, double time_s) {
    need(layer >= 0 && layer < target && target < layers_, "speculation: no such layer or target");
    const std::scoped_lock lock(mutex_);
    buffer_.clear();
    for (std::size_t r = 0; r < selected_.size(); ++r) {
        const auto& rows = selected_[r].routing->speculation;
        const auto found = rows.find(target - layer);
        need(found != rows.end(), "request " + std::to_string(rows_[r].request) +
                                      " has no speculation at distance " + std::to_string(target - layer));
        copy_row(found->second, selected_[r].iteration, layer);
    }
    return core.speculation(layer, target, buffer_, time_s);
}

std::uint64_t Feed::foresee(Core& core, std::int64_t step, std::span<const std::int64_t> requests,
                            std::span<const std::int64_t> from, int count, double time_s) {
    need(requests.size() == from.size(), "one iteration per request");
    need(count >= 0 && count <= 4096 &&
             std::all_of(from.begin(), from.end(), [](std::int64_t i) { return i >= 0; }),
         "foresee: count or an iteration out of range");
    const std::scoped_lock lock(mutex_);
    std::vector<std::vector<ExpertId>> required(static_cast<std::size_t>(count) *
                                                static_cast<std::size_t>(layers_));
    std::vector<char> seen(static_cast<std::size_t>(experts_));
    for (std::size_t i = 0; i < required.size(); ++i) {
        const auto ahead = static_cast<std::int64_t>(i) / layers_;
        const int layer = static_cast<int>(i) % layers_;
        std::fill(seen.begin(), seen.end(), 0);
        for (std::size_t r = 0; r < requests.size(); ++r) {
            const RequestRouting& v = *routing(requests[r]);
            if (from[r] + ahead >= v.iterations) {
                continue;
            }
            const auto cell = static_cast<std::size_t>((from[r] + ahead) * layers_ + layer);
            for (std::int64_t k = v.offsets[cell]; k < v.offsets[cell + 1]; ++k) {
                seen[v.experts[static_cast<std::size_t>(k)]] = 1;
            }
        }
        for (int j = 0; j < experts_; ++j) {
            if (seen[static_cast<std::size_t>(j)] != 0) {
                required[i].push_back(layer * experts_ + j);
            }
        }
    }
    return core.foresight(step, required, time_s);
}

}  // namespace finemoe
