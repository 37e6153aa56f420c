// A matrix of features × columns, stored in blocks of 128 columns so that one query is scored against 128
// stored vectors at a time, each in its own lane: the order of additions per column does not depend on the
// vector width. Values are halves (every row is rounded to f16 on entry) and take two bytes; sums are f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <span>
#include <string>
#include <vector>

namespace finemoe {

inline constexpr int kBlock = 128;

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
using WordBlocks = std::vector<std::uint32_t, CacheLineAllocator<std::uint32_t>>;

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
    enum class Values : std::uint8_t { positive, any };  // without signs a search is a third faster

    BlockMatrix(int features, int capacity, Values values);

    // Throws CoreError unless all values may be stored: in [0, 1], or in [−1, 1] with signs.
    void check(std::span<const float> values) const;
    // Overwrites one column with checked values that are exact halves; the matrix grows by whole zero-filled
    // blocks.
    void set(int column, const float* values);
    void get(int column, float* values) const;

    // Whether a row's sums go on from what they are or start at 0.
    enum class Start : std::uint8_t { sums, fresh };

    // For every row r: sums[r][c] += Σ_f queries[r][f] · m[f][c] for c < columns (padded to whole blocks);
    // the inner sum in feature order, in f32. A row's result does not depend on the others.
    void accumulate(std::span<const float* const> queries, int columns, std::span<float* const> sums,
                    Start start) const;
    void accumulate(const float* query, int columns, float* sums) const {
        accumulate(std::span(&query, 1), columns, std::span(&sums, 1), Start::sums);
    }
    // The same, and the best of each row's columns afterwards, in one pass. `tops` is scratch.
    void accumulate_best(std::span<const float* const> queries, std::span<float* const> sums, Start start,
                         const Scale& scale, FloatBlocks& tops, std::span<Best> best) const;

  private:
    // Where a column's first feature is. A word holds two columns that are 16 apart, so that each half of a
    // register of words is 16 columns.
    struct Place {
        std::size_t word, shift;
    };
    Place place(int column) const;
    void score(std::span<const float* const> queries, int columns, std::span<float* const> sums, Start start,
               const float* scale, FloatBlocks* tops) const;

    int features_;
    Values values_;
    WordBlocks words_;
};

// The best of sums as they are; `tops` is scratch.
Best best_column(float* sums, const Scale& scale, FloatBlocks& tops);

// Instruction sets that searches can use here, the widest first: the one in use unless another is chosen, for
// tests, while nothing searches.
std::vector<std::string> search_instructions();
void use_search_instructions(const std::string& name);

}  // namespace finemoe
