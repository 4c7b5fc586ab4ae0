#include "suggestion.h"

#include <algorithm>

namespace tool {
namespace {

// Optimal string alignment distance.
size_t edits(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string suggestion(const std::string& given, const std::vector<std::string>& names) {
  constexpr size_t max_letters = 64;  // the table grows with the square
  if (given.size() > max_letters) return "";
  const std::string* best = nullptr;
  size_t min_edits = std::max<size_t>(given.size() / 3, 1) + 1;
  for (const std::string& name : names) {
    if (name.size() > max_letters) continue;
    if (const size_t count = edits(given, name); count < min_edits) min_edits = count, best = &name;
  }
  return best == nullptr ? "" : " (did you mean '" + *best + "'?)";
}

}  // namespace tool
