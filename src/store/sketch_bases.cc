#include "store/sketch_bases.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "os/calling_thread.h"
#include "store/eigenvectors.h"
#include "store/matrix_product.h"

namespace kvasir {
namespace {

constexpr uint32_t sampled_tokens = 4096;  // tokens of a head for the second moment of its keys
constexpr uint32_t summed_tokens = 256;    // tokens summed in float; these sums are added in double
constexpr double known_queries = 0.5;      // their part of the second moment of queries
// Exponent of a coordinate's variance. Of 1/4, 1/3, 3/8 and 1/2 (which makes keys vary alike in all
// coordinates) it left the least error.
constexpr double scaled_by = 1.0 / 3;
// Relative to the largest variance; coordinates below it are not enlarged.
constexpr double min_variance = 1e-6;
constexpr uint32_t block = 32;  // rows of a factor that are computed together

template <class T>
double trace_of(const T* a, uint32_t n) {
  double trace = 0;
  for (uint32_t i = 0; i < n; ++i) trace += static_cast<double>(a[std::size_t{i} * n + i]);
  return trace > 0 && trace < 1e300 ? trace : 0;  // also for NaN and infinity
}

// Writes the transpose of x [n][n]; n is a multiple of `tile`.
void transpose(const float* x, uint32_t n, float* out) {
  constexpr uint32_t tile = 8;
  for (uint32_t i = 0; i < n; i += tile)
    for (uint32_t j = 0; j < n; j += tile)
      for (uint32_t r = 0; r < tile; ++r)
        for (uint32_t c = 0; c < tile; ++c)
          out[std::size_t{j + c} * n + i + r] = x[std::size_t{i + r} * n + j + c];
}

// Makes a symmetric matrix of the part above its diagonal.
void mirror(float* a, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t j = 0; j < i; ++j) a[std::size_t{i} * n + j] = a[std::size_t{j} * n + i];
}

// Replaces a by the upper R of R^T R = a, with zeros below.
void factor(const Kernels& kernels, float* a, uint32_t n) {
  std::vector<float> product(std::size_t{block} * n);
  for (uint32_t first = 0; first < n; first += block) {
    const uint32_t end = std::min(n, first + block);
    for (uint32_t i = first; i < end; ++i) {
      float* row = a + std::size_t{i} * n;
      for (uint32_t j = first; j < i; ++j) {
        const float* above = a + std::size_t{j} * n;
        add_multiple(-above[i], above + i, n - i, row + i);
      }
      const float pivot = std::sqrt(row[i]);
      for (uint32_t c = i; c < n; ++c) row[c] /= pivot;
      std::fill_n(row, i, 0.0f);
    }
    const float* panel = a + std::size_t{first} * n;
    for (uint32_t r = end; r < n; r += block) {
      const uint32_t rows = std::min(block, n - r);
      multiply(kernels, panel + r, 1, n, rows, panel + r, n, n - r, end - first, product.data(), n);
      subtract(product.data(), n, rows, n - r, a + std::size_t{r} * n + r, n);
    }
  }
}

}  // namespace

bool KeySample::add(const Kernels& kernels, uint32_t begin, uint32_t end, Workspace* w,
                    float* moment) const {
  const PageShape& keys = pages_.shape().page;
  const uint32_t dim = keys.dim, count = count_;
  const auto stride =
      static_cast<uint32_t>(ceil_div(count, std::max(1u, sampled_tokens / keys.page_tokens)));
  w->keys.resize(std::size_t{summed_tokens} * dim);
  w->products.resize(std::size_t{moment_strip} * dim);
  w->sums.assign(std::size_t{end - begin} * dim, 0.0);
  uint32_t rows = 0;
  const auto sum = [&] {
    for (uint32_t i = begin; i < end; i += moment_strip) {
      const float* x = w->keys.data() + i;
      kernels.multiply(x, 1, dim, moment_strip, x, dim, dim - i, rows, w->products.data() + i, dim);
      for (uint32_t r = 0; r < moment_strip; ++r) {
        double* sums = w->sums.data() + std::size_t{i - begin + r} * dim;
        const float* products = w->products.data() + std::size_t{r} * dim;
        for (uint32_t c = i; c < dim; ++c) sums[c] += static_cast<double>(products[c]);
      }
    }
    rows = 0;
  };
  for (uint32_t p = 0; p < count; ++p) {
    // The keys of the sinks are outliers that are never selected.
    if (p % stride != stride - 1 || (p == 0 && count > 1)) continue;
    if (!pages_.intact_page(layer_, head_, p)) return false;
    const PageRef ref = pages_.page(layer_, head_, p);
    kernels.unseal_page(keys, ref.data, ref.scales, w->keys.data() + std::size_t{rows} * dim,
                        nullptr);
    rows += keys.page_tokens;
    if (rows >= summed_tokens) sum();
  }
  sum();
  std::transform(w->sums.begin(), w->sums.end(), moment + std::size_t{begin} * dim,
                 [](double x) { return static_cast<float>(x); });
  return true;
}

std::vector<uint32_t> moment_parts(uint32_t dim, uint32_t parts) {
  std::vector<uint32_t> bounds = {0};
  const uint64_t strips = dim / moment_strip, all = strips * (strips + 1) / 2;
  uint64_t done = 0;
  for (uint64_t i = 0; i < strips; ++i) {
    done += strips - i;
    if (done * parts >= all * bounds.size())
      bounds.push_back(static_cast<uint32_t>((i + 1) * moment_strip));
  }
  return bounds;
}

void factor_queries(const Kernels& kernels, std::span<const double> known, uint32_t n, float* r) {
  const double trace = trace_of(known.data(), n), part = trace > 0 ? known_queries : 0,
               factor_of_known = trace > 0 ? part * n / trace : 0;
  for (std::size_t i = 0; i < std::size_t{n} * n; ++i)
    r[i] = static_cast<float>((part > 0 ? factor_of_known * known[i] : 0) +
                              (i % (n + std::size_t{1}) == 0 ? 1 - part : 0));
  factor(kernels, r, n);
}

BasisFinder::BasisFinder(const Kernels& kernels, uint32_t n, uint32_t m)
    : kernels_(kernels), n_(n), m_(m), l_(std::size_t{n} * n), moment_(l_.size()),
      directions_(std::size_t{n} * m), base_(directions_.size()), product_(l_.size()),
      variances_(m) {}

// Makes the trace of the keys' moment n, and the moment symmetric.
void BasisFinder::scale(float* keys) const {
  const double trace = trace_of(keys, n_), factor = trace > 0 ? n_ / trace : 0;
  for (std::size_t i = 0; i < std::size_t{n_} * n_; ++i)
    keys[i] = trace > 0 ? static_cast<float>(static_cast<double>(keys[i]) * factor) : 0;
  mirror(keys, n_);
}

// L^T K L. R and L have zeros on one side of the diagonal, which are skipped.
void BasisFinder::make_moment(const float* keys, const float* r) {
  const uint32_t n = n_;
  transpose(r, n, l_.data());
  for (uint32_t i = 0; i < n; i += block)  // R K
    multiply(kernels_, r + std::size_t{i} * n + i, n, 1, std::min(block, n - i),
             keys + std::size_t{i} * n, n, n, n - i, product_.data() + std::size_t{i} * n, n);
  for (uint32_t c = 0; c < n; c += block) {  // its product with L, above the diagonal
    const uint32_t cols = std::min(block, n - c);
    multiply(kernels_, product_.data() + c, n, 1, c + cols, l_.data() + std::size_t{c} * n + c, n,
             cols, n - c, moment_.data() + c, n);
  }
  mirror(moment_.data(), n);
}

// R^-1 W in place of W, from the last rows up.
void BasisFinder::solve(const float* r) {
  for (uint32_t first = (n_ - 1) / block * block;; first -= block) {
    const uint32_t end = std::min(n_, first + block), rows = end - first;
    float* w = directions_.data() + std::size_t{first} * m_;
    multiply(kernels_, r + std::size_t{first} * n_ + end, n_, 1, rows,
             directions_.data() + std::size_t{end} * m_, m_, m_, n_ - end, product_.data(), m_);
    subtract(product_.data(), m_, rows, m_, w, m_);
    for (uint32_t i = rows; i-- > 0;) {
      const float* row = r + std::size_t{first + i} * n_ + first;
      for (uint32_t k = i + 1; k < rows; ++k)
        add_multiple(-row[k], w + std::size_t{k} * m_, m_, w + std::size_t{i} * m_);
      for (uint32_t j = 0; j < m_; ++j) w[std::size_t{i} * m_ + j] /= row[i];
    }
    if (first == 0) return;
  }
}

void BasisFinder::find(float* keys, const float* r, float* key_basis, float* query_basis) {
  scale(keys);
  make_moment(keys, r);
  // The rotations of eigenvectors make numbers of all sizes.
  const os::SubnormalsAsZero mode;
  leading_eigenvectors(kernels_, &moment_, n_, m_, &directions_, &variances_);
  for (uint32_t i = 0; i < n_; i += block) {  // L W
    const uint32_t rows = std::min(block, n_ - i);
    multiply(kernels_, l_.data() + std::size_t{i} * n_, n_, 1, rows, directions_.data(), m_, m_,
             i + rows, base_.data() + std::size_t{i} * m_, m_);
  }
  solve(r);
  const double largest = variances_[0];
  for (uint32_t j = 0; j < m_; ++j) {
    const double v = std::max(variances_[j] / largest, min_variance),
                 scale = largest > 0 ? std::pow(v, scaled_by) : 1;
    for (uint32_t i = 0; i < n_; ++i) {
      const std::size_t at = std::size_t{i} * m_ + j;
      key_basis[at] = static_cast<float>(static_cast<double>(base_[at]) / scale);
      query_basis[at] = static_cast<float>(static_cast<double>(directions_[at]) * scale);
    }
  }
}

}  // namespace kvasir
