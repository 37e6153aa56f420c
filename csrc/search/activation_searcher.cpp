#include "search/activation_searcher.hpp"

#include <algorithm>
#include <numeric>

#include "f16.hpp"

namespace finemoe {
namespace {

float row_inverse(const float* row, int experts) {
    double squares = 0.0;
    for (int j = 0; j < experts; ++j) {
        squares += static_cast<double>(row[j]) * static_cast<double>(row[j]);
    }
    return inverse_norm(squares);
}

}  // namespace

void activation_row(std::span<const std::int64_t> counts, float* q) {
    const auto sum = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
    for (std::size_t j = 0; j < counts.size(); ++j) {
        const float share = sum > 0.0 ? static_cast<float>(static_cast<double>(counts[j]) / sum) : 0.0F;
        q[j] = half_to_float(float_to_half(share));
    }
}

ActivationSearcher::ActivationSearcher(const CoreConfig& config)
    : SearchEngine(config, MapStore::Norms::row) {}

// Brings the sums of an iteration up to `layers` layers.
void ActivationSearcher::follow(const std::shared_ptr<const IterationRows>& iteration, int layers) {
    const IterationRows& it = *iteration;
    const auto batch = static_cast<std::size_t>(it.batch());
    if (followed_ != iteration || layers_done_ > layers) {
        followed_ = iteration;
        layers_done_ = 0;
        sums_.resize(std::max(sums_.size(), batch));
        inverse_.resize(std::max(inverse_.size(), batch));
        for (std::size_t r = 0; r < batch; ++r) {
            sums_[r].assign(store_.padded(), 0.0F);
            inverse_[r].clear();
        }
    }
    for (; layers_done_ < layers; ++layers_done_) {
        const float* stored_inverse = store_.inverse_norms(layers_done_).factors;
        for (std::size_t r = 0; r < batch; ++r) {
            const float* row = it.gate_row(config_.experts, layers_done_, static_cast<int>(r));
            const float inverse = row_inverse(row, config_.experts);
            inverse_[r].push_back(inverse);
            dots_.assign(store_.padded(), 0.0F);
            store_.layer(layers_done_).accumulate(row, store_.size(), dots_.data());
            float* sums = sums_[r].data();
            for (std::size_t c = 0; c < store_.padded(); ++c) {
                sums[c] += dots_[c] * stored_inverse[c] * inverse;
            }
        }
    }
}

SearchResult ActivationSearcher::run(const SearchRequest& request) {
    if (request.kind == SearchKind::update) {
        update(request);
        return {};
    }
    follow(request.iteration, request.layer + 1);
    SearchResult result{request.target, 1, {}, {}, {}};
    if (config_.targets == Targets::later) {
        result.first_target = request.layer + 1;
        result.targets = config_.layers - result.first_target;
    }
    const int batch = request.iteration->batch();
    for (int r = 0; r < batch; ++r) {
        const Best best = best_column(sums_[static_cast<std::size_t>(r)].data(), store_.ones(), tops_);
        result.maps.push_back(best.column);
        result.scores.push_back(best.key / static_cast<float>(request.layer + 1));
    }
    copy_targets(result, batch);
    return result;
}

void ActivationSearcher::update(const SearchRequest& request) {
    int place = store_.size();
    if (place == store_.capacity()) {  // below it nothing is compared
        follow(request.iteration, config_.layers);
        auto& sums = sums_[static_cast<std::size_t>(request.row)];
        place = best_column(sums.data(), store_.ones(), tops_).column;
    }
    assemble_map(*request.iteration, request.row);
    store_.put(place, map_.data(), {});
    if (followed_ == request.iteration) {
        refresh_sums(place, map_.data());
    }
}

// After a write the followed rows' sums for that place are those of the new matrix, added in the same order.
void ActivationSearcher::refresh_sums(int place, const float* map) {
    for (int r = 0; r < followed_->batch(); ++r) {
        const auto at = static_cast<std::size_t>(r);
        float sum = 0.0F;
        for (int l = 0; l < layers_done_; ++l) {
            const float* query = followed_->gate_row(config_.experts, l, r);
            const float* stored = map + static_cast<std::ptrdiff_t>(l) * config_.experts;
            float dot = 0.0F;
            for (int j = 0; j < config_.experts; ++j) {
                dot += query[j] * stored[j];
            }
            sum += dot * row_inverse(stored, config_.experts) * inverse_[at][static_cast<std::size_t>(l)];
        }
        sums_[at].resize(store_.padded(), 0.0F);
        sums_[at][static_cast<std::size_t>(place)] = sum;
    }
}

void ActivationSearcher::add(std::span<const std::int64_t> counts) {
    auto it = std::make_shared<IterationRows>();
    it->rows.push_back(Row{});
    it->gates.resize(counts.size());
    const auto width = static_cast<std::size_t>(config_.experts);
    for (std::size_t at = 0; at < counts.size(); at += width) {
        activation_row(counts.subspan(at, width), it->gates.data() + at);
    }
    update(SearchRequest{0, SearchKind::update, config_.layers - 1, -1, 0, it});
}

}  // namespace finemoe
