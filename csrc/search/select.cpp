#include "search/select.hpp"

namespace finemoe {

// Few experts are taken, so repeated scans beat a sort.
void select_experts(std::span<const float> p, double delta, int top_k, std::vector<char>& chosen,
                    std::vector<char>& taken) {
    taken.assign(p.size(), 0);
    double mass = 0.0;
    for (std::size_t count = 0; count < p.size(); ++count) {
        std::size_t best = p.size();
        for (std::size_t j = 0; j < p.size(); ++j) {
            if (taken[j] == 0 && (best == p.size() || p[j] > p[best])) {
                best = j;
            }
        }
        if (count >= static_cast<std::size_t>(top_k) && (mass >= delta || p[best] <= 0.0F)) {
            return;
        }
        taken[best] = 1;
        chosen[best] = 1;
        mass += static_cast<double>(p[best]);
    }
}

}  // namespace finemoe
