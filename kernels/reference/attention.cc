// Attention in scalar double precision, in two plain passes: the maximum, then the sums.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "reference.h"

namespace kvasir::reference {

double from_bf16(uint16_t x) {
  // Sign, 8 bits of exponent, 7 of fraction.
  const int exponent = x >> 7 & 0xff, fraction = x & 0x7f;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -133) : std::ldexp(128 + fraction, exponent - 134);
  return x >> 15 ? -magnitude : magnitude;
}

double page_key(const int8_t* data, const uint16_t* scales, uint32_t dim, uint32_t token,
                uint32_t channel) {
  return data[token / 4 * dim * 4 + channel / 4 * 16 + token % 4 * 4 + channel % 4] *
         from_bf16(scales[token]);
}

// Of a page of latent attention the keys are the values.
static double value_of(const QueryRows& q, const PageRef& page, uint32_t token, uint32_t channel) {
  return q.latent ? page_key(page.data, page.scales, q.dim, token, channel)
                  : page_value(page.data, page.scales, q.dim, token, channel);
}

double page_value(const int8_t* data, const uint16_t* scales, uint32_t dim, uint32_t token,
                  uint32_t channel) {
  const uint32_t tokens = page_bytes / 2 / dim;
  return data[page_bytes / 2 + token / 4 * dim * 4 + channel * 4 + token % 4] *
         from_bf16(scales[tokens + token]);
}

// One row: scores s of n tokens, v[t * dim + d].
static void attend_row(const std::vector<double>& s, const std::vector<double>& v, uint32_t dim,
                       double* o, double* m, double* l) {
  *m = -std::numeric_limits<double>::infinity();
  *l = 0;
  for (uint32_t d = 0; d < dim; ++d) o[d] = 0;
  for (double score : s) *m = std::fmax(*m, score);
  for (std::size_t t = 0; t < s.size(); ++t) {
    const double p = std::exp(s[t] - *m);
    *l += p;
    for (uint32_t d = 0; d < dim; ++d) o[d] += p * v[t * dim + d];
  }
}

void attend_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages, double* o, double* m,
                  double* l) {
  const uint32_t dim = q.dim, page_tokens = q.page_tokens();
  std::vector<double> k, v, bias;  // [chosen tokens][dim], [chosen tokens]
  for (uint32_t p = 0; p < n_pages; ++p) {
    for (uint32_t t = 0; t < page_tokens; ++t) {
      if ((pages[p].tokens >> t & 1) == 0) continue;
      bias.push_back(double{pages[p].bias});
      for (uint32_t d = 0; d < dim; ++d) {
        k.push_back(page_key(pages[p].data, pages[p].scales, dim, t, d));
        v.push_back(value_of(q, pages[p], t, d));
      }
    }
  }
  for (std::size_t r = 0; r < q.rows; ++r) {
    std::vector<double> s(k.size() / dim);
    for (std::size_t t = 0; t < s.size(); ++t) {
      for (std::size_t d = 0; d < dim; ++d) s[t] += q.q[r * dim + d] * k[t * dim + d];
      s[t] = s[t] * double{q.scale[r]} + bias[t];
    }
    attend_row(s, v, dim, o + r * dim, m + r, l + r);
  }
}

void score_tokens(const QueryRows& q, const PageRef* pages, uint32_t n_pages, double* scores,
                  std::size_t stride) {
  const std::size_t dim = q.dim, page_tokens = q.page_tokens();
  for (std::size_t r = 0; r < q.rows; ++r)
    for (std::size_t p = 0; p < n_pages; ++p)
      for (std::size_t t = 0; t < page_tokens; ++t) {
        double sum = 0;
        for (std::size_t d = 0; d < dim; ++d)
          sum += double{static_cast<float>(q.q[r * dim + d])} *
                 page_key(pages[p].data, pages[p].scales, q.dim, static_cast<uint32_t>(t),
                          static_cast<uint32_t>(d));
        scores[r * stride + p * page_tokens + t] =
            pages[p].tokens >> t & 1 ? sum * double{q.scale[r]} + double{pages[p].bias}
                                     : -std::numeric_limits<double>::infinity();
      }
}

void attend_rows(const QueryRows& q, const float* k, const float* v, uint32_t n,
                 const uint32_t* limit, double* o, double* m, double* l) {
  const std::size_t dim = q.dim;
  const std::vector<double> values(v, v + n * dim);
  for (std::size_t r = 0; r < q.rows; ++r) {
    std::vector<double> s(limit && limit[r] < n ? limit[r] : n);
    for (std::size_t t = 0; t < s.size(); ++t) {
      for (std::size_t d = 0; d < dim; ++d)
        s[t] += double{q.f32[r * dim + d]} * double{k[t * dim + d]};
    }
    attend_row(s, values, q.dim, o + r * dim, m + r, l + r);
  }
}

void attend_window(const DeviceWindow& w, uint64_t position, const float* q, const float* k,
                   const float* v, const float* ring, double* out) {
  const std::size_t dim = w.head_dim, group = w.heads / w.kv_heads;
  const auto row_of = [&](const float* step, std::size_t which, std::size_t head, uint64_t at) {
    if (at >= position) return step + ((at - position) * w.kv_heads + head) * dim;
    return ring + ((head * 2 + which) * w.room + at % w.room) * dim;
  };
  for (std::size_t t = 0; t < w.n; ++t) {
    for (std::size_t h = 0; h < w.heads; ++h) {
      const float* row = q + (t * w.heads + h) * dim;
      const uint64_t own = position + t, first = first_seen_of(w, own);
      std::vector<double> scores;
      for (uint64_t at = first; at <= own; ++at) {
        const float* key = row_of(k, 0, h / group, at);
        double sum = 0;
        for (std::size_t d = 0; d < dim; ++d) sum += double{row[d]} * double{key[d]};
        sum /= std::sqrt(static_cast<double>(dim));
        const double cap = double{w.softcap};
        scores.push_back(cap > 0 ? cap * std::tanh(sum / cap) : sum);
      }
      double m = *std::max_element(scores.begin(), scores.end());
      if (w.sinks) m = std::max(m, double{w.sinks[h]});
      double l = w.sinks ? std::exp(double{w.sinks[h]} - m) : 0;
      double* to = out + (t * w.heads + h) * dim;
      std::fill_n(to, dim, 0.0);
      for (std::size_t i = 0; i < scores.size(); ++i) {
        const double weight = std::exp(scores[i] - m);
        const float* value = row_of(v, 1, h / group, first + i);
        l += weight;
        for (std::size_t d = 0; d < dim; ++d) to[d] += weight * double{value[d]};
      }
      for (std::size_t d = 0; d < dim; ++d) to[d] /= l;
    }
  }
}

}  // namespace kvasir::reference
