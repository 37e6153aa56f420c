// Stored iterations: expert maps (layer-major), prefix norms, unit embeddings, and the order they were
// written in.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "search/block_matrix.hpp"

namespace finemoe {

class MapStore {
  public:
    // Of which rows `inverse_norms(l)` is: rows 0 … l, or row l alone.
    enum class Norms : std::uint8_t { prefix, row };

    MapStore(int layers, int experts, int embedding_width, int capacity, Norms norms);

    int size() const { return static_cast<int>(written_.size()); }
    int capacity() const { return capacity_; }
    // size() rounded up to whole blocks
    std::size_t padded() const { return static_cast<std::size_t>(blocks_for(size())) * kBlock; }

    // map [L, J] in [0, 1]; unit embedding [h], empty: none; both exact halves. `place` < size() overwrites,
    // == size() appends. CoreError, with nothing changed, for other values.
    void put(int place, const float* map, std::span<const float> unit_embedding);
    // The same with the age of a recorded store.
    void restore(int place, const float* map, std::span<const float> unit_embedding, long long written);

    void row(int place, int layer, float* out) const {
        maps_[static_cast<std::size_t>(layer)].get(place, out);
    }
    void embedding(int place, float* out) const { embeddings_.get(place, out); }

    const BlockMatrix& layer(int l) const { return maps_[static_cast<std::size_t>(l)]; }
    const BlockMatrix& embeddings() const { return embeddings_; }
    // 1 / norm of rows 0 … layer (or of that row), per map
    Scale inverse_norms(int l) const { return {inverse_[static_cast<std::size_t>(l)].data(), written_}; }
    Scale ones() const { return {ones_.data(), written_}; }
    const std::vector<long long>& written() const { return written_; }

  private:
    int layers_, experts_, width_, capacity_;
    Norms norms_;
    std::vector<BlockMatrix> maps_;
    std::vector<FloatBlocks> inverse_;
    BlockMatrix embeddings_;
    FloatBlocks ones_;
    std::vector<long long> written_;
    long long writes_ = 0;
};

// f32(1 / √sum), 0 for 0: the factor that turns a dot product into a cosine.
float inverse_norm(double sum_of_squares);

// u = f16(f32(x / norm)), the norm in f64. False for a zero vector, which counts as no embedding.
bool unit_embedding(std::span<const std::uint16_t> half, float* out);

}  // namespace finemoe
