// A matrix of features × columns, stored in blocks of 64 columns so that one query is scored against 64
// stored vectors at a time, each in its own lane: the order of additions per column does not depend on the
// vector width.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace finemoe {

inline constexpr int kBlock = 64;

template <typename T>
struct CacheLineAllocator {
    using value_type = T;
    CacheLineAllocator() = default;
    template <typename U>
    explicit CacheLineAllocator(const CacheLineAllocator<U>&) {}
    T* allocate(std::size_t n) {
        return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64}));
    }
    void deallocate(T* p, std::size_t) { ::operator delete(p, std::align_val_t{64}); }
    bool operator==(const CacheLineAllocator&) const { return true; }
};
using FloatBlocks = std::vector<float, CacheLineAllocator<float>>;

inline int blocks_for(int columns) { return (columns + kBlock - 1) / kBlock; }

class BlockMatrix {
  public:
    BlockMatrix(int features, int capacity);

    // Overwrites one column; the matrix grows by whole zero-filled blocks.
    void set(int column, const float* values);
    void get(int column, float* values) const;
    float at(int feature, int column) const { return data_[index(feature, column)]; }

    // sums[c] += Σ_f query[f] · m[f][c] for the first `blocks` blocks; the inner sum in feature order, in
    // f32.
    void accumulate(const float* query, int blocks, float* sums) const;
    // The same for one column.
    float dot(const float* query, int column) const;

  private:
    std::size_t index(int feature, int column) const {
        const auto block = static_cast<std::size_t>(column / kBlock);
        return (block * static_cast<std::size_t>(features_) + static_cast<std::size_t>(feature)) * kBlock +
               static_cast<std::size_t>(column % kBlock);
    }
    int features_;
    FloatBlocks data_;
};

// Largest sums[c] · scale[c] over c < columns. Ties: the column with the largest `written`.
struct Best {
    int column = -1;
    float key = 0.0F;
};
Best best_column(const float* sums, const float* scale, const std::vector<long long>& written, int columns);

}  // namespace finemoe
