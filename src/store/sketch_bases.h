// The bases A and B of a head's sketch, from the second moments of its keys and queries.
// key_sketch.h has the mathematics.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/kernels.h"
#include "store/page_store.h"

namespace kvasir {

// Rows of the second moment of keys that are computed together; PageShape::dim is a multiple.
constexpr uint32_t moment_strip = 32;

// A sample of a head's keys in the first `count` pages.
class KeySample {
 public:
  KeySample(const PageStore& pages, uint32_t count, uint32_t layer, uint32_t head)
      : pages_(pages), count_(count), layer_(layer), head_(head) {}

  // Scratch memory of a thread.
  struct Workspace {
    std::vector<double> sums;           // [rows][dim]
    std::vector<float> keys, products;  // [summed_tokens][dim], [moment_strip][dim]
  };
  // moment [dim][dim] = the sum of k k^T over the sample, in rows [begin, end), right of each
  // strip's diagonal. Bounds are multiples of moment_strip: how rows are divided into calls changes
  // no number. Returns false if a page of a mapped file is damaged.
  bool add(const Kernels& kernels, uint32_t begin, uint32_t end, Workspace* w, float* moment) const;

 private:
  const PageStore& pages_;
  uint32_t count_, layer_, head_;
};

// Bounds of `parts` parts of about the same work for KeySample::add: [parts + 1].
std::vector<uint32_t> moment_parts(uint32_t dim, uint32_t parts);

// R with R^T R = the second moment of the queries that the sketch serves, [n][n], zeros below the
// diagonal. known: that of the known queries; zeros: none.
void factor_queries(const Kernels& kernels, std::span<const double> known, uint32_t n, float* r);

// Finds the bases of a head: [n][m] each. An object is of one thread.
class BasisFinder {
 public:
  BasisFinder(const Kernels& kernels, uint32_t n, uint32_t m);
  // keys: KeySample::add of all rows, overwritten. r: factor_queries.
  void find(float* keys, const float* r, float* key_basis, float* query_basis);

 private:
  void scale(float* keys) const;
  void make_moment(const float* keys, const float* r);
  void solve(const float* r);

  const Kernels& kernels_;
  uint32_t n_, m_;
  std::vector<float> l_, moment_, directions_, base_, product_;
  std::vector<double> variances_;
};

}  // namespace kvasir
