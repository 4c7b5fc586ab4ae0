// Helpers of the tests of the store without a model: a text with the result of exact attention, and
// steps of it.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "helpers.h"

namespace api_test {

struct CloseCache {
  void operator()(kv_cache* c) const { kv_cache_close(c); }
};
using Cache = std::unique_ptr<kv_cache, CloseCache>;
using Floats = std::vector<float>;

inline kv_cache_shape shape_of(uint32_t layers, uint32_t heads, uint32_t kv_heads,
                               uint32_t head_dim) {
  kv_cache_shape s{};
  s.struct_size = sizeof s;
  s.layers = layers, s.heads = heads, s.kv_heads = kv_heads, s.head_dim = head_dim;
  s.max_tokens = 4096;
  return s;
}

inline kv_cache_options options_of(const char* strategy, uint64_t budget = 0,
                                   uint32_t threads = 2) {
  kv_cache_options o;
  kv_init(&o, sizeof o);
  o.threads = threads;
  if (budget != 0) o.decode = budgeted(strategy, static_cast<double>(budget));
  else o.decode = api_test::strategy(strategy);
  return o;
}

// groups of three, a head that is padded
inline const kv_cache_shape small = shape_of(2, 6, 2, 40);

inline Cache open_cache(const kv_cache_shape& shape, const kv_cache_options& options) {
  kv_cache* cache = nullptr;
  REQUIRE_OK(kv_cache_open(&shape, &options, &cache, error));
  return Cache(cache);
}

// Keys, values and queries of a text, the same for every caller. The keys of a head have a common
// part, and queries are near some of them.
struct Text {
  kv_cache_shape shape;
  std::vector<Floats> k, v, q;  // [layers] of [tokens][heads][head_dim]

  Text(const kv_cache_shape& s, uint32_t tokens) : shape(s), k(s.layers), v(s.layers), q(s.layers) {
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    const auto fill = [&](Floats* out, uint32_t heads, float common) {
      Floats mean(std::size_t{heads} * s.head_dim);
      for (float& x : mean) x = common * normal(random);
      out->resize(mean.size() * tokens);
      for (std::size_t i = 0; i < out->size(); ++i)
        (*out)[i] = mean[i % mean.size()] + normal(random);
    };
    for (uint32_t l = 0; l < s.layers; ++l)
      fill(&k[l], s.kv_heads, 1.0f), fill(&v[l], s.kv_heads, 0.0f), fill(&q[l], s.heads, 0.3f);
  }
  const float* key(uint32_t layer, std::size_t token) const {
    return k[layer].data() + token * shape.kv_heads * shape.head_dim;
  }
  const float* value(uint32_t layer, std::size_t token) const {
    return v[layer].data() + token * shape.kv_heads * shape.head_dim;
  }
  const float* query(uint32_t layer, std::size_t token) const {
    return q[layer].data() + token * shape.heads * shape.head_dim;
  }
  std::size_t row() const { return std::size_t{shape.heads} * shape.head_dim; }

  // Of tokens first .. first + n - 1, in plain double precision.
  Floats exact(uint32_t layer, std::size_t first, uint32_t n, double scale = 0,
               double cap = 0) const {
    if (scale == 0) scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
    Floats out(n * row());
    for (std::size_t i = 0; i < n; ++i)
      for (uint32_t h = 0; h < shape.heads; ++h) {
        const std::size_t kv = h / (shape.heads / shape.kv_heads) * shape.head_dim;
        const float* ask = query(layer, first + i) + std::size_t{h} * shape.head_dim;
        std::vector<double> sum(shape.head_dim);
        double all = 0;
        for (std::size_t t = 0; t <= first + i; ++t) {
          double score = 0;
          for (uint32_t d = 0; d < shape.head_dim; ++d)
            score += static_cast<double>(ask[d]) * static_cast<double>(key(layer, t)[kv + d]);
          score *= scale;
          const double weight = std::exp(cap > 0 ? cap * std::tanh(score / cap) : score);
          all += weight;
          for (uint32_t d = 0; d < shape.head_dim; ++d)
            sum[d] += weight * static_cast<double>(value(layer, t)[kv + d]);
        }
        for (uint32_t d = 0; d < shape.head_dim; ++d)
          out[i * row() + std::size_t{h} * shape.head_dim + d] = static_cast<float>(sum[d] / all);
      }
    return out;
  }
};

// One step; [layers] outputs. q_too: queries come with the update.
inline std::vector<Floats> step(kv_cache* cache, const Text& text, std::size_t first, uint32_t n,
                                const kv_cache_attention_options* options = nullptr,
                                bool q_too = false) {
  std::vector<Floats> out(text.shape.layers, Floats(n * text.row()));
  for (uint32_t l = 0; l < text.shape.layers; ++l) {
    REQUIRE_OK(kv_cache_update(cache, l, KV_F32, text.key(l, first), text.value(l, first),
                               q_too ? text.query(l, first) : nullptr, n, error));
    REQUIRE_OK(kv_cache_attention(cache, l, KV_F32, text.query(l, first), out[l].data(), n, options,
                                  nullptr, error));
  }
  return out;
}

inline void read(kv_cache* cache, const Text& text, std::size_t first, std::size_t end,
                 bool q_too = false) {
  for (std::size_t at = first; at < end; at += 64)
    step(cache, text, at, static_cast<uint32_t>(std::min<std::size_t>(64, end - at)), nullptr,
         q_too);
}

inline double largest_difference(const Floats& a, const Floats& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i] - b[i])));
  return most;
}

inline kv_cache_stats stats_of(kv_cache* cache) {
  kv_cache_stats stats;
  kv_init(&stats, sizeof stats);
  REQUIRE_OK(kv_cache_get_stats(cache, &stats, error));
  return stats;
}

// Values have magnitude 1. Exact but for rounding where nothing is sealed; keys and values of pages
// have 7 bits, and outputs are means of many.
constexpr double window_tolerance = 2e-4, page_tolerance = 0.03;

}  // namespace api_test
