// Search over request-level activation matrices (MoE-Infinity): the mean of the rows' cosines. Rows count by
// themselves, so a layer with many tokens weighs no more than one with few.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "search/search_engine.hpp"

namespace finemoe {

// q[j] = f16(count / sum of the counts), as f32; all 0 where there are none.
void activation_row(std::span<const std::int64_t> counts, float* q);

class ActivationSearcher final : public SearchEngine {
  public:
    explicit ActivationSearcher(const CoreConfig& config);
    SearchResult run(const SearchRequest& request) override;

    // Adds a whole request's tokens per expert, [L, J].
    void add(std::span<const std::int64_t> counts);

  private:
    void follow(const std::shared_ptr<const IterationRows>& iteration, int layers);
    void update(const SearchRequest& request);
    void refresh_sums(int place, const float* map);

    // Running sums of the iteration being followed: per row, the cosines of its layers so far with every
    // matrix, and the inverse norms of its rows [L].
    std::shared_ptr<const IterationRows> followed_;
    int layers_done_ = 0;
    std::vector<FloatBlocks> sums_;
    std::vector<std::vector<float>> inverse_;
    FloatBlocks dots_, tops_;
};

}  // namespace finemoe
