// Leading eigenvectors: of matrices whose eigenvalues are known, alike or zero among them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "store/eigenvectors.h"

using namespace kvasir;

namespace {

// U D U^T with a U that is orthonormal: reflections of the diagonal.
std::vector<float> matrix_of(std::vector<double> values, uint32_t seed) {
  const auto n = static_cast<uint32_t>(values.size());
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> a(std::size_t{n} * n);
  for (uint32_t i = 0; i < n; ++i) a[i * n + i] = values[i];
  for (uint32_t reflection = 0; reflection < 8; ++reflection) {
    std::vector<double> v(n), av(n);
    double square = 0, share = 0;
    for (double& x : v) x = normal(random), square += x * x;
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t j = 0; j < n; ++j) av[i] += a[i * n + j] * v[j];
    for (uint32_t i = 0; i < n; ++i) share += v[i] * av[i];
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t j = 0; j < n; ++j)
        a[i * n + j] += -2 / square * (v[i] * av[j] + av[i] * v[j]) +
                        4 * share / (square * square) * v[i] * v[j];
  }
  return {a.begin(), a.end()};
}

void check(const std::vector<double>& values, uint32_t m, uint32_t seed) {
  const auto n = static_cast<uint32_t>(values.size());
  const std::vector<float> a = matrix_of(values, seed);
  std::vector<float> used = a, u;
  std::vector<double> found;
  leading_eigenvectors(cpu_kernels(), &used, n, m, &u, &found);
  REQUIRE(u.size() == std::size_t{n} * m);
  std::vector<double> sorted = values;
  std::sort(sorted.rbegin(), sorted.rend());
  const double unit = std::max(sorted[0], 1e-30);
  double of_values = 0, of_vectors = 0, of_lengths = 0;
  for (uint32_t j = 0; j < m; ++j) {
    of_values = std::max(of_values, std::fabs(found[j] - sorted[j]) / unit);
    for (uint32_t i = 0; i < n; ++i) {
      double product = 0;
      for (uint32_t k = 0; k < n; ++k)
        product += static_cast<double>(a[i * n + k]) * static_cast<double>(u[k * m + j]);
      of_vectors = std::max(
          of_vectors, std::fabs(product - found[j] * static_cast<double>(u[i * m + j])) / unit);
    }
    for (uint32_t k = 0; k <= j; ++k) {
      double product = j == k ? -1 : 0;
      for (uint32_t i = 0; i < n; ++i)
        product += static_cast<double>(u[i * m + j]) * static_cast<double>(u[i * m + k]);
      of_lengths = std::max(of_lengths, std::fabs(product));
    }
  }
  CAPTURE(n);
  CAPTURE(seed);
  CHECK(of_values < 1e-5);
  CHECK(of_vectors < 1e-5);
  CHECK(of_lengths < 1e-5);
  CHECK(std::is_sorted(found.rbegin(), found.rend()));
}

}  // namespace

TEST_CASE(
    "leading eigenvectors of matrices of one vector, and of one and next to nothing, are numbers "
    "and orthonormal") {
  for (const uint32_t n : {33u, 64u, 128u}) {
    for (const float value : {1.0f, 0.37f, 3e8f, 1e-12f}) {
      // of all but the first row and column
      for (const float other : {value, 0.0f, 1e-20f * value}) {
        std::vector<float> a(std::size_t{n} * n, other), u;
        for (uint32_t i = 0; other == value && i < n; ++i) a[i] = a[std::size_t{i} * n] = value;
        a[0] = value;
        std::vector<double> found;
        leading_eigenvectors(cpu_kernels(), &a, n, n / 2, &u, &found);
        CAPTURE(n);
        CAPTURE(value);
        CAPTURE(other);
        CHECK(std::fabs(found[0] - static_cast<double>(value) * (other == value ? n : 1)) <
              1e-4 * found[0]);
        double of_lengths = 0;
        for (uint32_t j = 0; j < n / 2; ++j)
          for (uint32_t k = 0; k <= j; ++k) {
            double product = j == k ? -1 : 0;
            for (uint32_t i = 0; i < n; ++i)
              product +=
                  static_cast<double>(u[i * (n / 2) + j]) * static_cast<double>(u[i * (n / 2) + k]);
            of_lengths = std::isfinite(product) ? std::max(of_lengths, std::fabs(product)) : 1e9;
          }
        CHECK(of_lengths < 1e-4);
      }
    }
  }
}

TEST_CASE("leading eigenvectors belong to the largest eigenvalues, in their order") {
  for (const uint32_t n : {1u, 2u, 3u, 32u, 64u, 128u, 256u}) {
    std::vector<double> falling(n), few(n), alike(n, 2.0), steep(n);
    for (uint32_t i = 0; i < n; ++i)
      falling[i] = 1.0 / (1 + (i * 7) % n), few[i] = i % 5 == 0 ? 3 : 0,
      steep[i] = std::exp(-0.5 * i);
    for (const std::vector<double>& values :
         {falling, few, alike, steep, std::vector<double>(n, 0.0)})
      check(values, (3 * n + 7) / 8, n);
  }
}
