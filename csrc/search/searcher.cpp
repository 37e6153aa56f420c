#include "search/searcher.hpp"

#include <algorithm>
#include <array>

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
        squares_.assign(it.rows.size(), 0.0);
    }
    for (; layers_done_ < layer; ++layers_done_) {
        gather(it, layers_done_);
        store_.layer(layers_done_).accumulate(queries_, store_.size(), into_, start_of(layers_done_));
    }
}

// The rows' queries of a layer, their running sums, and the squares of their norms with that layer.
void Searcher::gather(const IterationRows& it, int layer) {
    queries_.clear();
    into_.clear();
    for (int r = 0; r < it.batch(); ++r) {
        const auto at = static_cast<std::size_t>(r);
        const float* row = it.gate_row(config_.experts, layer, r);
        queries_.push_back(row);
        sums_[at].resize(store_.padded());  // the store may have grown by a block since
        into_.push_back(sums_[at].data());
        double squares = squares_[at];
        for (int j = 0; j < config_.experts; ++j) {
            squares += static_cast<double>(row[j]) * static_cast<double>(row[j]);
        }
        squares_[at] = squares;
    }
}

// The embeddings of an iteration's rows from `first` on, and where their similarities with every map go.
void Searcher::gather_units(const std::shared_ptr<const IterationRows>& iteration, int first) {
    const IterationRows& it = *iteration;
    compared_ = iteration;
    similarities_.resize(std::max(similarities_.size(), it.rows.size()));
    queries_.clear();
    into_.clear();
    for (int r = first; r < it.batch(); ++r) {
        if (const auto unit = unit_of(it, r); !unit.empty()) {
            auto& into = similarities_[static_cast<std::size_t>(r)];
            into.resize(store_.padded());
            queries_.push_back(unit.data());
            into_.push_back(into.data());
        }
    }
}

SearchResult Searcher::semantic(const SearchRequest& request) {
    const IterationRows& it = *request.iteration;
    gather_units(request.iteration, 0);
    best_.resize(queries_.size());
    store_.embeddings().accumulate_best(queries_, into_, BlockMatrix::Start::fresh, store_.ones(), tops_,
                                        best_);
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
        .accumulate_best(queries_, into_, start_of(request.layer), store_.inverse_norms(request.layer), tops_,
                         best_);
    SearchResult result{request.target, 1, {}, {}, {}};
    result.maps.reserve(best_.size());
    result.scores.reserve(best_.size());
    for (std::size_t r = 0; r < best_.size(); ++r) {
        result.maps.push_back(best_[r].column);
        result.scores.push_back(best_[r].key * inverse_norm(squares_[r]));
    }
    layers_done_ = request.layer + 1;
    copy_targets(result, it.batch());
    return result;
}

// The stored map that a row of the followed iteration repeats most:
// RDY = d/L · semantic + (L − d)/L · trajectory.
int Searcher::most_redundant(std::size_t row, bool embedded) {
    const auto n = static_cast<std::size_t>(store_.size());
    const float* sums = sums_[row].data();
    const float query_inverse = inverse_norm(squares_[row]);
    const float* inverse = store_.inverse_norms(config_.layers - 1).factors;
    redundancy_.resize(store_.padded());
    float* redundancy = redundancy_.data();
    if (!embedded) {
        for (std::size_t c = 0; c < n; ++c) {
            redundancy[c] = sums[c] * inverse[c] * query_inverse;
        }
    } else {
        const float* similarity = similarities_[row].data();
        const int distance = std::min(config_.prefetch_distance, config_.layers);
        const auto semantic_weight = static_cast<float>(static_cast<double>(distance) / config_.layers);
        const auto trajectory_weight =
            static_cast<float>(static_cast<double>(config_.layers - distance) / config_.layers);
        for (std::size_t c = 0; c < n; ++c) {
            redundancy[c] =
                semantic_weight * similarity[c] + trajectory_weight * (sums[c] * inverse[c] * query_inverse);
        }
    }
    return best_column(redundancy, store_.ones(), tops_).column;
}

void Searcher::update(const SearchRequest& request) {
    const IterationRows& it = *request.iteration;
    const auto unit = unit_of(it, request.row);
    int place = store_.size();
    if (place == store_.capacity()) {  // below it nothing is compared
        follow(request.iteration, config_.layers);
        if (compared_ != request.iteration) {  // no semantic search has compared them
            gather_units(request.iteration, request.row);
            store_.embeddings().accumulate(queries_, store_.size(), into_, BlockMatrix::Start::fresh);
        }
        place = most_redundant(static_cast<std::size_t>(request.row), !unit.empty());
    }
    assemble_map(it, request.row);
    store_.put(place, map_.data(), unit);
    if (request.row + 1 == it.batch()) {  // its last update: nothing follows this iteration any more
        followed_.reset();
        compared_.reset();
        return;
    }
    const auto next = static_cast<std::size_t>(request.row) + 1;
    if (followed_ == request.iteration) {
        followed_rows_.arrange(request.iteration, it.gates.data(), layers_done_, config_.experts);
        refresh(followed_rows_, next, place,
                std::span(map_).first(static_cast<std::size_t>(layers_done_ * config_.experts)), sums_);
    }
    if (compared_ == request.iteration && !it.units.empty()) {
        compared_rows_.arrange(request.iteration, it.units.data(), 1, config_.embedding_width);
        refresh(compared_rows_, next, place, unit, similarities_);
    }
}

// Values [groups, B, width] by feature: [groups, width, B padded to whole tiles]. Once for each iteration and
// number of groups.
void Searcher::ByFeature::arrange(const std::shared_ptr<const IterationRows>& iteration, const float* given,
                                  int group_count, int group_width) {
    const auto g = static_cast<std::size_t>(group_count), w = static_cast<std::size_t>(group_width);
    if (of == iteration && groups == g) {
        return;
    }
    of = iteration;
    groups = g;
    width = w;
    batch = iteration->rows.size();
    rows = (batch + kTile - 1) / kTile * kTile;
    values.resize(groups * width * rows);
    for (std::size_t group = 0; group < groups; ++group) {
        for (std::size_t f = 0; f < width; ++f) {
            for (std::size_t r = 0; r < batch; ++r) {
                values[(group * width + f) * rows + r] = given[(group * batch + r) * width + f];
            }
        }
    }
}

// After a write the sums of the rows from `first` on, which are still to be added, are for that place those
// of what is stored there now, added in the same order; a tile of rows at a time, each in its own lane.
void Searcher::refresh(const ByFeature& by_feature, std::size_t first, int place,
                       std::span<const float> stored, std::vector<FloatBlocks>& sums) {
    for (std::size_t tile = first / kTile * kTile; tile < by_feature.batch; tile += kTile) {
        std::array<float, kTile> total{};
        const float* query = by_feature.values.data() + tile;
        for (std::size_t from = 0; from < stored.size(); from += by_feature.width) {
            std::array<float, kTile> part{};
            for (std::size_t f = from; f < from + by_feature.width; ++f, query += by_feature.rows) {
                for (std::size_t i = 0; i < kTile; ++i) {
                    part[i] += query[i] * stored[f];
                }
            }
            for (std::size_t i = 0; i < kTile; ++i) {
                total[i] += part[i];
            }
        }
        for (std::size_t r = std::max(first, tile); r < std::min(tile + kTile, by_feature.batch); ++r) {
            sums[r].resize(store_.padded());
            sums[r][static_cast<std::size_t>(place)] = total[r - tile];
        }
    }
}

std::shared_ptr<const IterationRows> make_iteration(std::span<const std::uint16_t> gates,
                                                    std::span<const std::uint16_t> embeddings,
                                                    std::size_t batch, const CoreConfig& config) {
    auto it = std::make_shared<IterationRows>();
    it->rows.resize(batch);
    it->gates.resize(gates.size());
    it->units.resize(embeddings.size());
    const auto layers = static_cast<std::size_t>(config.layers);
    const auto experts = static_cast<std::size_t>(config.experts);
    const auto width = static_cast<std::size_t>(config.embedding_width);
    for (std::size_t r = 0; r < batch; ++r) {
        for (std::size_t l = 0; l < layers; ++l) {
            const auto row = gates.subspan((r * layers + l) * experts, experts);
            std::transform(row.begin(), row.end(),
                           it->gates.begin() + static_cast<std::ptrdiff_t>((l * batch + r) * experts),
                           half_to_float);
        }
        it->rows[r].has_embedding =
            !embeddings.empty() &&
            unit_embedding(embeddings.subspan(r * width, width), it->units.data() + r * width);
    }
    return it;
}

void Searcher::add(std::span<const std::uint16_t> gates, std::span<const std::uint16_t> embedding) {
    update(SearchRequest{0, SearchKind::update, config_.layers - 1, -1, 0,
                         make_iteration(gates, embedding, 1, config_)});
}

}  // namespace finemoe
