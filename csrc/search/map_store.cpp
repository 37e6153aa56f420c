#include "search/map_store.hpp"

#include <algorithm>
#include <cmath>

#include "f16.hpp"

namespace finemoe {

float inverse_norm(double sum_of_squares) {
    return sum_of_squares > 0.0 ? static_cast<float>(1.0 / std::sqrt(sum_of_squares)) : 0.0F;
}

bool unit_embedding(std::span<const std::uint16_t> half, float* out) {
    double squares = 0.0;
    for (const std::uint16_t h : half) {
        const double x = half_to_float(h);
        squares += x * x;
    }
    if (squares <= 0.0) {
        return false;
    }
    const double norm = std::sqrt(squares);
    for (std::size_t i = 0; i < half.size(); ++i) {
        out[i] = round_to_half(static_cast<float>(half_to_float(half[i]) / norm));
    }
    return true;
}

MapStore::MapStore(int layers, int experts, int embedding_width, int capacity, Norms norms)
    : layers_(layers),
      experts_(experts),
      width_(embedding_width),
      capacity_(capacity),
      norms_(norms),
      inverse_(static_cast<std::size_t>(layers)),
      embeddings_(embedding_width, capacity, BlockMatrix::Values::any) {
    maps_.reserve(static_cast<std::size_t>(layers));
    for (int l = 0; l < layers; ++l) {
        maps_.emplace_back(experts, capacity, BlockMatrix::Values::positive);
    }
}

void MapStore::restore(int place, const float* map, std::span<const float> unit_embedding,
                       long long written) {
    maps_.front().check({map, static_cast<std::size_t>(layers_) * static_cast<std::size_t>(experts_)});
    embeddings_.check(unit_embedding);
    if (place == size()) {
        written_.push_back(0);
        for (auto& inverse : inverse_) {
            inverse.resize(padded(), 0.0F);
        }
        ones_.resize(padded(), 1.0F);
    }
    const auto at = static_cast<std::size_t>(place);
    double squares = 0.0;
    for (int l = 0; l < layers_; ++l) {
        const float* row = map + static_cast<std::ptrdiff_t>(l) * experts_;
        maps_[static_cast<std::size_t>(l)].set(place, row);
        squares = norms_ == Norms::row ? 0.0 : squares;
        for (int j = 0; j < experts_; ++j) {
            squares += static_cast<double>(row[j]) * static_cast<double>(row[j]);
        }
        inverse_[static_cast<std::size_t>(l)][at] = inverse_norm(squares);
    }
    if (width_ > 0) {
        const std::vector<float> none(unit_embedding.empty() ? static_cast<std::size_t>(width_) : 0U, 0.0F);
        embeddings_.set(place, unit_embedding.empty() ? none.data() : unit_embedding.data());
    }
    written_[at] = written;
    writes_ = std::max(writes_, written);
}

void MapStore::put(int place, const float* map, std::span<const float> unit_embedding) {
    restore(place, map, unit_embedding, writes_ + 1);
}

}  // namespace finemoe
