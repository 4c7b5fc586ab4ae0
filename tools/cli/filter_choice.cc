#include "filter_choice.h"

#include <algorithm>
#include <limits>

namespace tool {
namespace {

constexpr double impossible = std::numeric_limits<double>::infinity();

// Dynamic programming: for every filter layer f, the smallest loss of the layers from f on, with
// `left` filters after it and `dense` layers with full attention.
class Search {
 public:
  Search(const std::vector<std::vector<double>>& covered, uint32_t count, uint32_t max_dense)
      : covered_(covered), layers_(static_cast<uint32_t>(covered.size())), dense_(max_dense),
        best_(layers_ * count * (dense_ + 1), {impossible, 0}) {
    for (uint32_t left = 0; left < count; ++left)
      for (uint32_t f = layers_; f-- > 0;)
        for (uint32_t dense = 0; dense <= dense_; ++dense)
          at(f, left, dense) = find(f, left, dense);
  }

  struct Entry {
    double lost;
    uint32_t next;  // filter layer; layers_: none
  };
  // With exactly `dense` dense layers, f included.
  Entry& at(uint32_t f, uint32_t left, uint32_t dense) {
    return best_[(f * std::size_t{dense_ + 1} + dense) +
                 left * std::size_t{layers_} * (dense_ + 1)];
  }

 private:
  Entry find(uint32_t f, uint32_t left, uint32_t dense) {
    Entry best{impossible, layers_};
    double lost = 0;  // by the layers f + 2 .. next - 1, which read the tokens of f
    for (uint32_t next = f + 1; next <= layers_; ++next) {
      if (next > f + 2) lost += 1 - covered_[f][next - 1];
      const uint32_t own = std::min(2u, next - f);
      if (own > dense) break;
      if (next == layers_ ? left > 0 || own != dense : left == 0) continue;
      const double all = lost + (next == layers_ ? 0 : at(next, left - 1, dense - own).lost);
      if (all < best.lost) best = {all, next};
    }
    return best;
  }

  const std::vector<std::vector<double>>& covered_;
  const uint32_t layers_, dense_;
  std::vector<Entry> best_;  // [count][layers][dense + 1]
};

}  // namespace

FilterChoice choose_filters(const std::vector<std::vector<double>>& covered, uint32_t count,
                            uint32_t max_dense) {
  const auto layers = static_cast<uint32_t>(covered.size());
  FilterChoice choice;
  choice.lost = impossible;
  if (count == 0 || layers == 0) return choice;
  Search search(covered, count, std::min(max_dense, layers));
  uint32_t first = layers, dense = 0;
  for (uint32_t total = 1; total <= std::min(max_dense, layers); ++total)
    for (uint32_t f = 0; f < total; ++f)
      if (const double lost = search.at(f, count - 1, total - f).lost; lost < choice.lost)
        choice.lost = lost, choice.dense = total, first = f, dense = total - f;
  for (uint32_t f = first, left = count; f < layers; --left) {
    choice.filters.push_back(f);
    const uint32_t next = search.at(f, left - 1, dense).next;
    dense -= std::min(2u, next - f);
    f = next;
  }
  return choice;
}

}  // namespace tool
