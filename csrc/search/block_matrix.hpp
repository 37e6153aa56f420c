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

// What turns sums into keys: a factor per column, and the columns' ages, by which ties are broken.
struct Scale {
    const float* factors;                   // padded to whole blocks
    const std::vector<long long>& written;  // one per column

    int columns() const { return static_cast<int>(written.size()); }
};

// Largest key = sums[c] · factors[c]. Ties: the column with the largest `written`.
struct Best {
    int column = -1;
    float key = 0.0F;
};

class BlockMatrix {
  public:
    BlockMatrix(int features, int capacity);

    // Overwrites one column; the matrix grows by whole zero-filled blocks.
    void set(int column, const float* values);
    void get(int column, float* values) const;

    // sums[c] += Σ_f query[f] · m[f][c] for c < columns (padded to whole blocks); the inner sum in feature
    // order, in f32.
    void accumulate(const float* query, int columns, float* sums) const;
    // The same, and the best of the columns afterwards, in one pass. `tops` is scratch.
    Best accumulate_best(const float* query, float* sums, const Scale& scale, FloatBlocks& tops) const;

  private:
    std::size_t index(int feature, int column) const {
        const auto block = static_cast<std::size_t>(column / kBlock);
        return (block * static_cast<std::size_t>(features_) + static_cast<std::size_t>(feature)) * kBlock +
               static_cast<std::size_t>(column % kBlock);
    }
    int features_;
    FloatBlocks data_;
};

// The best of sums as they are; `tops` is scratch.
Best best_column(float* sums, const Scale& scale, FloatBlocks& tops);

}  // namespace finemoe
