// Random choices that depend on a seed text alone, the same on every platform (the standard's
// distributions differ), and a hash for names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tool {

// FNV-1a, 64 bits. `previous` chains several parts.
constexpr uint64_t hash_of(std::string_view text, uint64_t previous = 0xcbf29ce484222325u) {
  for (const char c : text) previous = (previous ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return previous;
}

inline std::string hex(uint64_t value) {
  std::string digits(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) digits[i] = "0123456789abcdef"[value & 15];
  return digits;
}

// SplitMix64.
class Random {
 public:
  explicit Random(std::string_view seed) : state_(hash_of(seed)) {}

  uint64_t bits() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // [0, 1)
  double real() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // [0, n)
  size_t below(size_t n) { return static_cast<size_t>(real() * static_cast<double>(n)); }
  // [min, max]
  size_t between(size_t min, size_t max) { return min + below(max - min + 1); }

  template <typename List>
  const auto& pick(const List& list) {
    return std::data(list)[below(std::size(list))];
  }
  template <typename Value>
  void shuffle(std::vector<Value>* values) {
    for (size_t i = values->size(); i > 1; --i) std::swap((*values)[i - 1], (*values)[below(i)]);
  }
  // `count` different numbers below n, in random order.
  std::vector<size_t> sample(size_t n, size_t count) {
    std::vector<size_t> numbers(n);
    std::iota(numbers.begin(), numbers.end(), size_t{0});
    shuffle(&numbers);
    numbers.resize(count < n ? count : n);
    return numbers;
  }

 private:
  uint64_t state_;
};

}  // namespace tool
