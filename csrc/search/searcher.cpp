#include "search/searcher.hpp"

#include <algorithm>

#include "f16.hpp"

namespace finemoe {

Searcher::Searcher(const CoreConfig& config) : SearchEngine(config, MapStore::Norms::prefix) {}

std::span<const float> Searcher::unit_of(const IterationRows& it, int row) const {
    if (!it.rows[static_cast<std::size_t>(row)].has_embedding) {
        return {};
    }
    const auto width = static_cast<std::size_t>(config_.embedding_width);
    return {it.units.data() + static_cast<std::size_t>(row) * width, width};
}

SearchResult Searcher::run(const SearchRequest& request) {
    switch (request.kind) {
        case SearchKind::semantic:
            return semantic(request);
        case SearchKind::trajectory:
            return trajectory(request);
        case SearchKind::update:
            update(request);
            break;
    }
    return {};
}

// Brings the running sums of an iteration up to `layer`, that layer excluded: each adds one J-wide dot
// product per stored map.
void Searcher::follow(const std::shared_ptr<const IterationRows>& iteration, int layer) {
    const IterationRows& it = *iteration;
    if (followed_ != iteration) {
        followed_ = iteration;
        layers_done_ = 0;
        sums_.resize(std::max(sums_.size(), it.rows.size()));
        for (std::size_t r = 0; r < it.rows.size(); ++r) {
            sums_[r].assign(store_.padded(), 0.0F);
        }
        squares_.assign(it.rows.size(), 0.0);
    }
    for (; layers_done_ < layer; ++layers_done_) {
        gather(it, layers_done_);
        store_.layer(layers_done_).accumulate(queries_, store_.size(), into_);
    }
}

// The rows' queries of a layer, their running sums, and the squares of their norms with that layer.
void Searcher::gather(const IterationRows& it, int layer) {
    queries_.clear();
    into_.clear();
    for (int r = 0; r < it.batch(); ++r) {
        queries_.push_back(it.gate_row(config_.experts, layer, r));
        into_.push_back(sums_[static_cast<std::size_t>(r)].data());
        add_squares(queries_.back(), r);
    }
}

void Searcher::add_squares(const float* row, int r) {
    for (int j = 0; j < config_.experts; ++j) {
        squares_[static_cast<std::size_t>(r)] += static_cast<double>(row[j]) * static_cast<double>(row[j]);
    }
}

SearchResult Searcher::semantic(const SearchRequest& request) {
    const IterationRows& it = *request.iteration;
    const auto batch = static_cast<std::size_t>(it.batch());
    scratch_.assign(store_.padded() * batch, 0.0F);
    queries_.clear();
    into_.clear();
    for (int r = 0; r < it.batch(); ++r) {
        if (const auto unit = unit_of(it, r); !unit.empty()) {
            queries_.push_back(unit.data());
            into_.push_back(scratch_.data() + queries_.size() * store_.padded() - store_.padded());
        }
    }
    best_.resize(queries_.size());
    store_.embeddings().accumulate_best(queries_, into_, store_.ones(), tops_, best_);
    SearchResult result{0, request.target + 1, {}, {}, {}};
    auto next = best_.begin();
    for (int r = 0; r < it.batch(); ++r) {
        const Best best = unit_of(it, r).empty() ? Best{} : *next++;
        result.maps.push_back(best.column);
        result.scores.push_back(best.column >= 0 ? best.key : kNoScore);
    }
    copy_targets(result, it.batch());
    return result;
}

SearchResult Searcher::trajectory(const SearchRequest& request) {
    const IterationRows& it = *request.iteration;
    if (layers_done_ > request.layer) {
        followed_.reset();  // asked out of order: from the start
    }
    follow(request.iteration, request.layer);
    gather(it, request.layer);
    best_.resize(queries_.size());
    store_.layer(request.layer)
        .accumulate_best(queries_, into_, store_.inverse_norms(request.layer), tops_, best_);
    SearchResult result{request.target, 1, {}, {}, {}};
    for (std::size_t r = 0; r < best_.size(); ++r) {
        result.maps.push_back(best_[r].column);
        result.scores.push_back(best_[r].key * inverse_norm(squares_[r]));
    }
    layers_done_ = request.layer + 1;
    copy_targets(result, it.batch());
    return result;
}

// The stored map that the new one repeats most: RDY = d/L · semantic + (L − d)/L · trajectory.
int Searcher::most_redundant(const float* sums, float query_inverse, std::span<const float> unit) {
    const int n = store_.size();
    const float* inverse = store_.inverse_norms(config_.layers - 1).factors;
    redundancy_.resize(store_.padded());
    scratch_.assign(store_.padded(), 0.0F);
    const int distance = std::min(config_.prefetch_distance, config_.layers);
    const float semantic_weight = static_cast<float>(static_cast<double>(distance) / config_.layers);
    const float trajectory_weight =
        static_cast<float>(static_cast<double>(config_.layers - distance) / config_.layers);
    if (!unit.empty()) {
        store_.embeddings().accumulate(unit.data(), n, scratch_.data());
    }
    for (int c = 0; c < n; ++c) {
        const auto at = static_cast<std::size_t>(c);
        const float trajectory = sums[c] * inverse[c] * query_inverse;
        redundancy_[at] =
            unit.empty() ? trajectory : semantic_weight * scratch_[at] + trajectory_weight * trajectory;
    }
    return best_column(redundancy_.data(), store_.ones(), tops_).column;
}

void Searcher::update(const SearchRequest& request) {
    const IterationRows& it = *request.iteration;
    const auto row = static_cast<std::size_t>(request.row);
    const auto unit = unit_of(it, request.row);
    int place = store_.size();
    if (place == store_.capacity()) {  // below it nothing is compared
        follow(request.iteration, config_.layers);
        place = most_redundant(sums_[row].data(), inverse_norm(squares_[row]), unit);
    }
    std::vector<float> map(static_cast<std::size_t>(config_.total_experts()));
    for (int l = 0; l < config_.layers; ++l) {
        const float* from = it.gate_row(config_.experts, l, request.row);
        std::copy(from, from + config_.experts,
                  map.data() + static_cast<std::ptrdiff_t>(l) * config_.experts);
    }
    store_.put(place, map.data(), unit);
    if (request.row + 1 == it.batch()) {
        followed_.reset();  // its last update: nothing follows this iteration any more
    } else {
        refresh_sums(place, map.data());
    }
}

// After a write the followed rows' sums for that place are those of the new map, added in the same order.
void Searcher::refresh_sums(int place, const float* map) {
    for (int r = 0; followed_ && r < followed_->batch(); ++r) {
        auto& sums = sums_[static_cast<std::size_t>(r)];
        sums.resize(store_.padded(), 0.0F);
        float sum = 0.0F;
        for (int l = 0; l < layers_done_; ++l) {
            const float* query = followed_->gate_row(config_.experts, l, r);
            float part = 0.0F;
            for (int j = 0; j < config_.experts; ++j) {
                part += query[j] * map[static_cast<std::ptrdiff_t>(l) * config_.experts + j];
            }
            sum += part;
        }
        sums[static_cast<std::size_t>(place)] = sum;
    }
}

std::shared_ptr<const IterationRows> make_iteration(std::span<const std::uint16_t> gates,
                                                    std::span<const std::uint16_t> embedding) {
    auto it = std::make_shared<IterationRows>();
    it->rows.push_back(Row{});
    it->gates.resize(gates.size());
    std::transform(gates.begin(), gates.end(), it->gates.begin(), half_to_float);
    it->units.resize(embedding.size());
    it->rows.front().has_embedding = !embedding.empty() && unit_embedding(embedding, it->units.data());
    return it;
}

void Searcher::add(std::span<const std::uint16_t> gates, std::span<const std::uint16_t> embedding) {
    update(SearchRequest{0, SearchKind::update, config_.layers - 1, -1, 0, make_iteration(gates, embedding)});
}

}  // namespace finemoe
