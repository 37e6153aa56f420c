#include "search/search_engine.hpp"

#include <algorithm>
#include <iterator>

#include "f16.hpp"
#include "search/activation_searcher.hpp"
#include "search/searcher.hpp"

namespace finemoe {

SearchEngine::SearchEngine(const CoreConfig& config, MapStore::Norms norms)
    : config_(config),
      store_(config.layers, config.experts, config.embedding_width, config.store_capacity, norms) {}

void SearchEngine::assemble_map(const IterationRows& iteration, int row) {
    map_.clear();
    for (int l = 0; l < config_.layers; ++l) {
        const float* from = iteration.gate_row(config_.experts, l, row);
        map_.insert(map_.end(), from, from + config_.experts);
    }
}

void SearchEngine::copy_targets(SearchResult& result, int batch) const {
    result.predicted.assign(static_cast<std::size_t>(result.targets * batch * config_.experts), 0.0F);
    for (int t = 0; t < result.targets; ++t) {
        for (int r = 0; r < batch; ++r) {
            const int map = result.maps[static_cast<std::size_t>(r)];
            if (map >= 0) {
                store_.row(
                    map, result.first_target + t,
                    result.predicted.data() + (static_cast<std::ptrdiff_t>(t) * batch + r) * config_.experts);
            }
        }
    }
}

StoreContents SearchEngine::contents() const {
    StoreContents out;
    std::vector<float> row(static_cast<std::size_t>(std::max(config_.experts, config_.embedding_width)));
    const auto append = [&](std::vector<std::uint16_t>& to, int count) {
        std::transform(row.begin(), row.begin() + count, std::back_inserter(to), float_to_half);
    };
    for (int i = 0; i < store_.size(); ++i) {
        for (int l = 0; l < config_.layers; ++l) {
            store_.row(i, l, row.data());
            append(out.maps, config_.experts);
        }
        if (config_.embedding_width > 0) {
            store_.embedding(i, row.data());
            append(out.embeddings, config_.embedding_width);
        }
        out.written.push_back(store_.written()[static_cast<std::size_t>(i)]);
    }
    return out;
}

std::unique_ptr<SearchEngine> make_search_engine(const CoreConfig& config) {
    if (config.predictor == PredictorKind::activation) {
        return std::make_unique<ActivationSearcher>(config);
    }
    return std::make_unique<Searcher>(config);
}

}  // namespace finemoe
