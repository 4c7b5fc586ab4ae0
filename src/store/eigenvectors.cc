#include "store/eigenvectors.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

namespace kvasir {
namespace {

// Off-diagonal elements, relative to the trace, that count as zero: the matrix is in float.
constexpr double negligible = 1e-9;
constexpr uint32_t max_iterations = 60;  // per value: two or three are usual

// A rotation of rows `row` and row + 1.
struct Rotation {
  uint32_t row;
  float c, s;
};

// The sum of a[i] b[i] in several parts for vectors. Not inlined: with its remainder the loop is
// large.
[[gnu::noinline]] float dot(const float* a, const float* b, uint32_t n) {
  constexpr uint32_t parts = 8;
  float sums[parts] = {};
  uint32_t i = 0;
  for (; i + parts <= n; i += parts)
    for (uint32_t p = 0; p < parts; ++p) sums[p] += a[i + p] * b[i + p];
  float rest = 0;
  for (; i < n; ++i) rest += a[i] * b[i];
  return (((sums[0] + sums[1]) + (sums[2] + sums[3])) +
          ((sums[4] + sums[5]) + (sums[6] + sums[7]))) +
         rest;
}

// y += factor x.
[[gnu::noinline]] void add(float factor, const float* __restrict x, uint32_t n,
                           float* __restrict y) {
  for (uint32_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

[[gnu::noinline]] void rotate(float c, float s, uint32_t n, float* __restrict x,
                              float* __restrict y) {
  for (uint32_t i = 0; i < n; ++i) {
    const float both = c * x[i] + s * y[i];
    y[i] = c * y[i] - s * x[i];
    x[i] = both;
  }
}

// a becomes Q T Q^T with Q = H_0 H_1 ..., H_k = 1 - beta_k v_k v_k^T. Row k of a keeps v_k behind
// the diagonal. T has the diagonal, and off-diagonal elements off_diagonal[i] at (i, i + 1).
void make_tridiagonal(float* a, uint32_t n, double* diagonal, double* off_diagonal, float* beta) {
  std::vector<float> p(n);
  double trace = 0;
  for (uint32_t k = 0; k < n; ++k) trace += std::fabs(static_cast<double>(a[k * n + k]));
  // Bound of squares: a reflection of a rounding error has no direction.
  const double nothing = negligible * trace * (negligible * trace);
  for (uint32_t k = 0; k < n; ++k) {
    diagonal[k] = static_cast<double>(a[k * n + k]);
    if (k + 1 == n) break;
    float* v = a + k * n + k + 1;
    const uint32_t size = n - k - 1;
    float* below = a + (std::size_t{k} + 1) * n + k + 1;  // [size][size], in rows of n
    const double rest = static_cast<double>(dot(v + 1, v + 1, size - 1)),
                 first = static_cast<double>(v[0]);
    beta[k] = 0;
    off_diagonal[k] = first;
    if (!(rest > nothing)) continue;
    const double norm =
        first > 0 ? -std::sqrt(first * first + rest) : std::sqrt(first * first + rest);
    off_diagonal[k] = norm;
    v[0] = static_cast<float>(first - norm);
    beta[k] =
        static_cast<float>(2 / (static_cast<double>(v[0]) * static_cast<double>(v[0]) + rest));
    for (uint32_t i = 0; i < size; ++i) p[i] = beta[k] * dot(below + std::size_t{i} * n, v, size);
    const float share = beta[k] / 2 * dot(p.data(), v, size);
    add(-share, v, size, p.data());
    for (uint32_t i = 0; i < size; ++i) {
      float* row = below + std::size_t{i} * n;
      add(-v[i], p.data(), size, row);
      add(-p[i], v, size, row);
    }
  }
}

// Implicit QL steps. They leave the eigenvalues in the diagonal. T = G_0 G_1 ... D ... G_1^T G_0^T
// for the returned rotations.
std::vector<Rotation> make_diagonal(uint32_t n, double* diagonal, double* off_diagonal) {
  std::vector<Rotation> rotations;
  rotations.reserve(std::size_t{n} * n);
  const double negligible_size =
      negligible * std::accumulate(diagonal, diagonal + n, 0.0,
                                   [](double sum, double x) { return sum + std::fabs(x); });
  for (uint32_t first = 0; first + 1 < n; ++first)
    for (uint32_t step = 0; step < max_iterations; ++step) {
      uint32_t last = first;
      while (last + 1 < n && std::fabs(off_diagonal[last]) > negligible_size) ++last;
      if (last == first) break;
      const double half = (diagonal[first + 1] - diagonal[first]) / (2 * off_diagonal[first]),
                   root = std::sqrt(half * half + 1);
      double g = diagonal[last] - diagonal[first] +
                 off_diagonal[first] / (half + (half < 0 ? -root : root)),
             s = 1, c = 1, p = 0, r = 1;
      uint32_t i = last;
      while (i > first && r > 0) {
        --i;
        const double f = s * off_diagonal[i], b = c * off_diagonal[i];
        off_diagonal[i + 1] = r = std::sqrt(f * f + g * g);
        if (!(r > 0)) {
          diagonal[i + 1] -= p;
          break;
        }
        s = f / r, c = g / r;
        const double from = diagonal[i + 1] - p, t = (diagonal[i] - from) * s + 2 * c * b;
        p = s * t;
        diagonal[i + 1] = from + p;
        g = c * t - b;
        rotations.push_back({i, static_cast<float>(c), static_cast<float>(s)});
      }
      off_diagonal[last] = 0;
      if (!(r > 0)) continue;
      diagonal[first] -= p;
      off_diagonal[first] = g;
    }
  return rotations;
}

}  // namespace

void leading_eigenvectors(std::vector<float>* a, uint32_t n, uint32_t m,
                          std::vector<float>* vectors, std::vector<double>* values) {
  std::vector<double> diagonal(n), off_diagonal(n);
  std::vector<float> beta(n), shares(m);
  make_tridiagonal(a->data(), n, diagonal.data(), off_diagonal.data(), beta.data());
  const std::vector<Rotation> rotations = make_diagonal(n, diagonal.data(), off_diagonal.data());
  vectors->assign(std::size_t{n} * m, 0.0f);
  values->resize(m);
  float* u = vectors->data();
  for (uint32_t j = 0; j < m; ++j) {
    const auto largest = std::max_element(diagonal.begin(), diagonal.end());
    u[static_cast<std::size_t>(largest - diagonal.begin()) * m + j] = 1;
    (*values)[j] = std::exchange(*largest, -HUGE_VAL);
  }
  // Applies them only to the requested vectors, the last rotation first.
  for (std::size_t at = rotations.size(); at-- > 0;) {
    const Rotation r = rotations[at];
    rotate(r.c, r.s, m, u + std::size_t{r.row} * m, u + (std::size_t{r.row} + 1) * m);
  }
  for (uint32_t k = n - 1; k-- > 0;) {
    const float* v = a->data() + k * n;
    std::fill(shares.begin(), shares.end(), 0.0f);
    for (uint32_t i = k + 1; i < n; ++i) add(v[i], u + std::size_t{i} * m, m, shares.data());
    for (uint32_t i = k + 1; i < n; ++i)
      add(-beta[k] * v[i], shares.data(), m, u + std::size_t{i} * m);
  }
}

}  // namespace kvasir
