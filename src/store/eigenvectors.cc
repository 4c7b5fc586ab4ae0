#include "store/eigenvectors.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "store/matrix_product.h"

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

[[gnu::noinline]] void rotate(float c, float s, uint32_t n, float* __restrict x,
                              float* __restrict y) {
  for (uint32_t i = 0; i < n; ++i) {
    const float both = c * x[i] + s * y[i];
    y[i] = c * y[i] - s * x[i];
    x[i] = both;
  }
}

// Reflections H = 1 - beta v v^T of neighbouring columns that are applied together.
constexpr uint32_t panel = 16;
constexpr uint32_t strip = 32;  // rows of a product that is subtracted from a matrix

// The reflections of a panel. A -= sum of left[i] right[i]^T applies them to the rows and columns
// behind it: v w^T and w v^T of each.
struct Panel {
  explicit Panel(uint32_t size) : n(size), left(2 * panel * n), right(left.size()) {}
  float* left_row(uint32_t i) { return left.data() + std::size_t{i} * n; }
  float* right_row(uint32_t i) { return right.data() + std::size_t{i} * n; }
  uint32_t n;
  std::vector<float> left, right;  // [2 * panel][n]
};

// Makes a reflection that maps v to a multiple of its first element, which it returns. v becomes
// the direction, with 1 as its first element. nothing: the square of a rounding error, which has no
// direction; *beta is then 0.
double reflect(float* v, uint32_t size, double nothing, float* beta) {
  const double rest = static_cast<double>(dot(v + 1, v + 1, size - 1)),
               first = static_cast<double>(v[0]);
  *beta = 0;
  if (!(rest > nothing)) return first;
  const double norm =
      first > 0 ? -std::sqrt(first * first + rest) : std::sqrt(first * first + rest);
  const double pivot = first - norm;
  *beta = static_cast<float>(2 / (1 + rest / (pivot * pivot)));
  for (uint32_t i = 1; i < size; ++i) v[i] = static_cast<float>(static_cast<double>(v[i]) / pivot);
  v[0] = 1;
  return norm;
}

// w = beta A v - (beta / 2) (w . v) v of reflection j of a panel that begins at row `first`. A is
// the matrix behind the panel's earlier reflections. w: [n].
void find_update(const Kernels& kernels, const float* a, uint32_t first, uint32_t j, float beta,
                 Panel* p, float* w, float* product) {
  const uint32_t n = p->n, begin = first + j + 1, size = n - begin,
                 aligned = begin / 16 * 16;  // columns before `begin` are not used
  const float* v = p->left_row(2 * j) + begin;
  multiply(kernels, v, 0, 1, 1, a + std::size_t{begin} * n + aligned, n, n - aligned, size,
           w + aligned, n);
  float shares[2 * panel];
  for (uint32_t i = 0; i < 2 * j; ++i) shares[i] = dot(p->right_row(i) + begin, v, size);
  multiply(kernels, shares, 0, 1, 1, p->left.data() + begin, n, size, 2 * j, product, n);
  for (uint32_t i = 0; i < size; ++i) w[begin + i] = beta * (w[begin + i] - product[i]);
  add_multiple(-beta / 2 * dot(w + begin, v, size), v, size, w + begin);
}

// a becomes Q T Q^T with Q = H_0 H_1 ..., H_k = 1 - beta_k v_k v_k^T. Row k of a keeps v_k behind
// the diagonal. T has the diagonal, and off-diagonal elements off_diagonal[i] at (i, i + 1). A
// panel of reflections changes the rows behind it at once (Golub and Van Loan, section 5.2.3).
void make_tridiagonal(const Kernels& kernels, float* a, uint32_t n, double* diagonal,
                      double* off_diagonal, float* beta) {
  std::vector<float> w(n), product(std::size_t{strip} * n);
  Panel p(n);
  double trace = 0;
  for (uint32_t k = 0; k < n; ++k) trace += std::fabs(static_cast<double>(a[k * n + k]));
  const double nothing = negligible * trace * (negligible * trace);
  for (uint32_t first = 0; first < n; first += panel) {
    const uint32_t end = std::min(n, first + panel);
    std::fill(p.left.begin(), p.left.end(), 0.0f);
    std::fill(p.right.begin(), p.right.end(), 0.0f);
    for (uint32_t k = first; k < end; ++k) {
      const uint32_t j = k - first;
      float* row = a + std::size_t{k} * n + k;
      multiply(kernels, p.left.data() + k, 0, n, 1, p.right.data() + k, n, n - k, 2 * j,
               product.data(), n);
      subtract(product.data(), n, 1, n - k, row, n);
      diagonal[k] = static_cast<double>(row[0]);
      if (k + 1 == n) break;
      off_diagonal[k] = reflect(row + 1, n - k - 1, nothing, &beta[k]);
      if (!(beta[k] > 0)) continue;
      std::copy_n(row + 1, n - k - 1, p.left_row(2 * j) + k + 1);
      std::copy_n(row + 1, n - k - 1, p.right_row(2 * j + 1) + k + 1);
      find_update(kernels, a, first, j, beta[k], &p, w.data(), product.data());
      std::copy_n(w.data() + k + 1, n - k - 1, p.left_row(2 * j + 1) + k + 1);
      std::copy_n(w.data() + k + 1, n - k - 1, p.right_row(2 * j) + k + 1);
    }
    for (uint32_t r = end; r < n; r += strip) {
      const uint32_t rows = std::min(strip, n - r);
      multiply(kernels, p.left.data() + r, 1, n, rows, p.right.data() + end, n, n - end, 2 * panel,
               product.data(), n);
      subtract(product.data(), n, rows, n - end, a + std::size_t{r} * n + end, n);
    }
  }
}

// u = H_0 H_1 ... u for u [n][m], a panel of reflections at a time: their product is 1 - V^T S V
// with an upper triangular S (the same, section 5.2.3).
void apply_reflections(const Kernels& kernels, const float* a, const float* beta, uint32_t n,
                       uint32_t m, float* u) {
  std::vector<float> v(std::size_t{panel} * n), shares(std::size_t{panel} * m),
      mixed(shares.size()), product(std::size_t{strip} * m);
  for (uint32_t first = (n - 1) / panel * panel;; first -= panel) {
    const uint32_t count = std::min(panel, n - 1 - first), size = n - 1 - first;
    std::fill(v.begin(), v.end(), 0.0f);
    float s[panel][panel] = {};
    for (uint32_t j = 0; j < count; ++j) {
      const uint32_t k = first + j;
      float* row = v.data() + std::size_t{j} * n + j;
      if (!(beta[k] > 0)) continue;
      std::copy_n(a + std::size_t{k} * n + k + 1, n - k - 1, row);
      s[j][j] = beta[k];
      float products[panel];
      for (uint32_t i = 0; i < j; ++i)
        products[i] = dot(v.data() + std::size_t{i} * n + j, row, n - k - 1);
      for (uint32_t i = 0; i < j; ++i)
        for (uint32_t l = i; l < j; ++l) s[i][j] -= beta[k] * s[i][l] * products[l];
    }
    float* behind = u + (std::size_t{first} + 1) * m;
    multiply(kernels, v.data(), n, 1, count, behind, m, m, size, shares.data(), m);
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (uint32_t i = 0; i < count; ++i)
      for (uint32_t j = i; j < count; ++j)
        add_multiple(s[i][j], shares.data() + std::size_t{j} * m, m,
                     mixed.data() + std::size_t{i} * m);
    for (uint32_t r = 0; r < size; r += strip) {
      const uint32_t rows = std::min(strip, size - r);
      multiply(kernels, v.data() + r, 1, n, rows, mixed.data(), m, m, count, product.data(), m);
      subtract(product.data(), m, rows, m, behind + std::size_t{r} * m, m);
    }
    if (first == 0) return;
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

void leading_eigenvectors(const Kernels& kernels, std::vector<float>* a, uint32_t n, uint32_t m,
                          std::vector<float>* vectors, std::vector<double>* values) {
  std::vector<double> diagonal(n), off_diagonal(n);
  std::vector<float> beta(n);
  make_tridiagonal(kernels, a->data(), n, diagonal.data(), off_diagonal.data(), beta.data());
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
  apply_reflections(kernels, a->data(), beta.data(), n, m, u);
}

}  // namespace kvasir
