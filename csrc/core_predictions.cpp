// Predictions of every kind become prefetch queues: select, rank, queue.
#include <algorithm>
#include <cmath>

#include "core.hpp"
#include "f16.hpp"
#include "search/activation_searcher.hpp"
#include "search/select.hpp"

namespace finemoe {

std::uint64_t Core::speculation(int layer, int target, std::span<const std::uint16_t> probabilities,
                                double time_s) {
    const std::scoped_lock lock(mutex_);
    require_running();
    require(config_.predictor == PredictorKind::speculate, "speculation: this predictor takes none");
    require(open_ && layer == layer_now_ && target > layer && target < config_.layers,
            "speculation: made at the current layer for a later one");
    const auto batch = static_cast<std::size_t>(rows_->batch());
    check_probabilities(probabilities, batch * static_cast<std::size_t>(config_.experts));
    Record logged = record(RecordKind::speculation, time_s);
    logged.layer = layer;
    logged.target = target;
    log_.add(logged, [&](LogColumns& c) {
        c.values.values.insert(c.values.values.end(), probabilities.begin(), probabilities.end());
    });
    std::vector<float> rows(probabilities.size());
    std::transform(probabilities.begin(), probabilities.end(), rows.begin(), half_to_float);
    apply_predictions(target, rows, std::vector<float>(batch, 1.0F));  // δ = 0: the top K
    return settle(time_s);
}

// One target layer: the union of the rows' sets replaces what was queued for it; the largest p ranks each
// expert.
void Core::apply_predictions(int layer, std::span<const float> predicted, std::span<const float> scores) {
    const auto width = static_cast<std::size_t>(config_.experts);
    chosen_.assign(width, 0);
    rank_.assign(width, 0.0F);
    bool any = false;
    for (std::size_t r = 0; r < scores.size(); ++r) {
        if (scores[r] == kNoScore) {
            continue;
        }
        any = true;
        const auto row = predicted.subspan(r * width, width);
        select(row, config_.selector, scores[r]);
        const Row& of = rows_->rows[r];
        for (std::size_t j = 0; j < width; ++j) {
            float p = row[j];
            if (config_.rank_prefill_by_tokens && of.phase == Phase::prefill) {
                p = static_cast<float>(1.0 - std::pow(1.0 - static_cast<double>(p), of.tokens));
            }
            rank_[j] = std::max(rank_[j], p);
        }
    }
    if (any) {
        queue_chosen(layer);
    }
}

// A prediction for the whole batch, which ranks as it is.
void Core::apply_row(int layer, std::span<const float> row, Selector selector) {
    chosen_.assign(row.size(), 0);
    rank_.assign(row.begin(), row.end());
    select(row, selector, 1.0F);
    queue_chosen(layer);
}

// Marks a row's prefetch set in `chosen_`.
void Core::select(std::span<const float> row, Selector selector, float score) {
    if (selector == Selector::positive) {
        for (std::size_t j = 0; j < row.size(); ++j) {
            chosen_[j] = row[j] > 0.0F ? 1 : chosen_[j];
        }
    } else {
        select_experts(row, selector == Selector::delta ? delta_of(score) : 0.0, config_.top_k, chosen_,
                       taken_);
    }
}

void Core::queue_chosen(int layer) {
    for (Device& d : devices_) {
        counters_.dropped += static_cast<std::int64_t>(
            std::erase_if(d.queue, [&](const QueueEntry& entry) { return layer_of(entry.expert) == layer; }));
    }
    for (std::size_t j = 0; j < rank_.size(); ++j) {
        const ExpertId id = layer * config_.experts + static_cast<ExpertId>(j);
        at(id).p = rank_[j];
        if (chosen_[j] != 0 && at(id).status == Status::absent) {
            device_of(id).queue.push_back({id, rank_[j]});
        }
    }
}

// The experts that received most tokens so far, for the layers that no search of this iteration reaches in
// time.
void Core::queue_popular() {
    std::vector<float> row(static_cast<std::size_t>(config_.experts));
    for (int layer = 0; layer < std::min(config_.prefetch_distance, config_.layers); ++layer) {
        const auto counts = activation_->popular(layer);
        std::int64_t sum = 0;
        for (const std::int64_t n : counts) {
            sum += n;
        }
        if (sum > 0) {
            std::transform(counts.begin(), counts.end(), row.begin(), [&](std::int64_t n) {
                return static_cast<float>(static_cast<double>(n) / static_cast<double>(sum));
            });
            apply_row(layer, row, Selector::top_k);
        }
    }
}

void Core::check_row_counts(std::span<const std::int32_t> row_counts, std::span<const int> experts,
                            std::span<const int> token_counts) const {
    if (!config_.row_counts()) {
        require(row_counts.empty(), "gate: this predictor takes no row counts");
        return;
    }
    const auto width = static_cast<std::size_t>(config_.experts);
    require(row_counts.size() == static_cast<std::size_t>(rows_->batch()) * width,
            "gate: row counts are not [rows, J]");
    std::vector<std::int64_t> sums(width);
    for (std::size_t i = 0; i < row_counts.size(); ++i) {
        require(row_counts[i] >= 0, "gate: a row count is negative");
        sums[i % width] += row_counts[i];
    }
    for (std::size_t i = 0; i < experts.size(); ++i) {
        auto& sum = sums[static_cast<std::size_t>(experts[i])];
        require(sum == token_counts[i], "gate: row counts do not sum to the token counts");
        sum = 0;
    }
    require(std::all_of(sums.begin(), sums.end(), [](std::int64_t n) { return n == 0; }),
            "gate: row counts do not sum to the token counts");
}

void Core::count_tokens(std::span<const std::int32_t> row_counts) {
    const auto width = static_cast<std::size_t>(config_.experts);
    const auto batch = static_cast<std::size_t>(rows_->batch());
    for (std::size_t r = 0; r < batch; ++r) {
        activation_->add(rows_->rows[r].request, layer_now_, row_counts.subspan(r * width, width));
    }
    if (config_.predictor == PredictorKind::activation) {
        float* to =
            rows_->gates.data() + static_cast<std::ptrdiff_t>(layer_now_) * rows_->batch() * config_.experts;
        for (std::size_t r = 0; r < batch; ++r) {
            activation_row(activation_->row(rows_->rows[r].request, layer_now_), to + r * width);
        }
    }
}

// What the user's policy says of layers to come. What it raises ends the run.
void Core::ask_user(const std::function<UserPredictions()>& question) {
    try {
        for (const auto& [layer, row] : question()) {
            require(layer > layer_now_ && layer < config_.layers,
                    "the policy predicted layer " + std::to_string(layer) + ", which is not one to come");
            require(row.size() == static_cast<std::size_t>(config_.experts),
                    "the policy's prediction for layer " + std::to_string(layer) + " has " +
                        std::to_string(row.size()) + " values, not one for each of " +
                        std::to_string(config_.experts) + " experts");
            require(
                std::all_of(row.begin(), row.end(), [](float p) { return p >= 0.0F && std::isfinite(p); }),
                "the policy's prediction for layer " + std::to_string(layer) +
                    " has a value that is negative or not finite");
            apply_row(layer, row, config_.selector);
        }
    } catch (...) {
        aborted_ = true;
        throw;
    }
}

}  // namespace finemoe
