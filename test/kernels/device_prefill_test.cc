// A GPU's attention in prefill against sums in double precision over the same pages and rows:
// random sequences, outputs poisoned.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "prefill_text.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// A row by the CPU's kernels, over the pages after the sinks and the rows in full precision.
std::vector<float> by_processor(const PrefillText& t, uint32_t head, const float* q,
                                uint32_t seen) {
  const Kernels& cpu = cpu_kernels();
  const uint32_t dim = t.page.dim, tokens = t.page.page_tokens;
  Guarded<float> x(dim), scale(1), o(dim), m(1), l(1), out(dim);
  Guarded<int8_t> q8(dim);
  Guarded<std::byte> scratch(cpu.attend_scratch(1, dim));
  for (uint32_t d = 0; d < dim; ++d)
    x[d] = d < t.s.head_dim ? q[d] / std::sqrt(static_cast<float>(t.s.head_dim)) : 0.0f, o[d] = 0;
  m[0] = -HUGE_VALF, l[0] = 0;
  cpu.quantize_queries(x.data(), 1, dim, q8.data(), nullptr, scale.data());
  const QueryRows row{1, dim, x.data(), q8.data(), nullptr, scale.data()};
  const float *keys = t.keys.data() + std::size_t{head} * t.all * dim,
              *values = t.values.data() + std::size_t{head} * t.all * dim;
  const uint32_t sealed = t.s.pages * tokens, sinks = std::min(sealed, tokens);
  const auto rows = [&](uint32_t first, uint32_t count) {
    Guarded<float> k(std::size_t{count} * dim), v(k.size());
    std::copy_n(keys + std::size_t{first} * dim, k.size(), k.data());
    std::copy_n(values + std::size_t{first} * dim, v.size(), v.data());
    cpu.attend_rows(row, k.data(), v.data(), count, nullptr, {o.data(), m.data(), l.data()},
                    scratch.data());
  };
  if (sinks > 0) rows(0, sinks);
  rows(sealed, seen - sealed);
  Guarded<int8_t> pages(t.pages.size());
  std::copy_n(t.pages.data(), t.pages.size(), pages.data());
  std::vector<PageRef> refs;
  for (uint32_t p = 1; p < t.s.pages; ++p) {
    const std::size_t at = std::size_t{p / extent_pages} * t.s.kv_heads + head;
    refs.push_back(
        {pages.data() + at * PageShape::pages_bytes() + p % extent_pages * std::size_t{page_bytes},
         t.scales.data() + at * t.page.scales_bytes() / 2 +
             p % extent_pages * std::size_t{2} * tokens,
         ~uint64_t{0} >> (64 - tokens)});
  }
  if (!refs.empty())
    cpu.attend_pages(row, refs.data(), static_cast<uint32_t>(refs.size()),
                     {o.data(), m.data(), l.data()}, scratch.data());
  cpu.finish({o.data(), m.data(), l.data()}, 1, dim, dim, out.data(), dim);
  return {out.data(), out.data() + dim};
}

double worst_of_device = 0, worst_of_processor = 0;

void check_text(const PrefillShape& s, Random& random) {
  CAPTURE(s.head_dim);
  CAPTURE(s.group);
  CAPTURE(s.pages);
  CAPTURE(s.window);
  CAPTURE(s.n);
  CAPTURE(s.key_size);
  const PrefillText t(s, random);
  const Attended attended = attend(t);
  double worst = 0, worst_total = 0;
  const uint32_t step = std::max(1u, s.n / 24);
  for (uint32_t token = 0; token < s.n; ++token) {
    if (token % step != 0 && token + 1 != s.n) continue;
    for (uint32_t head = 0; head < s.kv_heads * s.group; ++head) {
      const uint32_t h = head / s.group, seen = t.before + token + 1;
      const float* q = t.q.data() + (std::size_t{token} * s.kv_heads * s.group + head) * s.head_dim;
      const float *keys = t.keys.data() + std::size_t{h} * t.all * t.page.dim,
                  *values = t.values.data() + std::size_t{h} * t.all * t.page.dim;
      std::vector<double> scores(seen), o(s.head_dim);
      double most = -HUGE_VAL, sum = 0;
      for (uint32_t i = 0; i < seen; ++i) {
        double dot = 0;
        for (uint32_t d = 0; d < s.head_dim; ++d)
          dot += double{q[d]} * double{keys[std::size_t{i} * t.page.dim + d]};
        most = std::max(most, scores[i] = dot / std::sqrt(static_cast<double>(s.head_dim)));
      }
      for (uint32_t i = 0; i < seen; ++i) {
        const double p = std::exp(scores[i] - most);
        sum += p;
        for (uint32_t d = 0; d < s.head_dim; ++d)
          o[d] += p * double{values[std::size_t{i} * t.page.dim + d]};
      }
      if (s.has_sink_logits) {  // a score without a value; keys are centred
        double score = 0;
        for (uint32_t d = 0; d < s.head_dim; ++d)
          score -= double{q[d]} * double{t.centre[std::size_t{h} * t.page.dim + d]};
        score = score / std::sqrt(static_cast<double>(s.head_dim)) + double{t.sink_logits[head]};
        const double before = most;
        most = std::max(most, score);
        for (double& x : o) x *= std::exp(before - most);
        sum = sum * std::exp(before - most) + std::exp(score - most);
      }
      const std::size_t at = std::size_t{token} * s.kv_heads * s.group + head;
      const auto error = [&](const float* output) {
        double norm = 0, difference = 0;
        for (uint32_t d = 0; d < s.head_dim; ++d) {
          const double e = o[d] / sum, x = (double{output[d]} - e);
          norm += e * e, difference += x * x;
        }
        return std::sqrt(difference / norm);
      };
      const double its_error = error(attended.out.data() + at * s.head_dim);
      worst = std::isnan(its_error) ? HUGE_VAL : std::max(worst, its_error);
      worst_total =
          std::max(worst_total, std::fabs(double{attended.lse[at]} - (most + std::log(sum))));
      if (token % 3 == 0 && !s.has_sink_logits)
        worst_of_processor =
            std::max(worst_of_processor, error(by_processor(t, h, q, seen).data()));
    }
  }
  worst_of_device = std::max(worst_of_device, worst);
  // Halves round queries, keys, values and weights by 2^-12 of themselves. A score, here of up to
  // 100, has two roundings: at most 2^-11 of it, 5e-2, of which most cancel. The CPU rounds queries
  // to 8 bits.
  CHECK(worst < 3e-2);
  CHECK(worst_total < 3e-2);
}

}  // namespace

TEST_CASE(
    "a device attends a text that is read as sums in double precision do, at least as near as the "
    "CPU") {
  if (!stream()) return;
  Random random(21);
  worst_of_device = worst_of_processor = 0;
  for (const uint32_t head_dim : {40u, 64u, 80u, 128u, 192u, 256u})
    for (const uint32_t group : {1u, 2u, 3u, 4u, 7u, 16u}) {
      check_text({head_dim, 1 + random.below(3), group, random.below(40), random.below(90),
                  1 + random.below(200)},
                 random);
      check_text({head_dim, 2, group, random.below(3), random.below(3), 1 + random.below(70)},
                 random);
    }
  check_text({128, 1, 4, 300, 70, 513}, random);
  check_text({64, 2, 1, 70, 64, 64}, random);
  check_text({256, 1, 4, 300, 70, 257}, random);
  MESSAGE("worst error of an output row: ", worst_of_device, ", the CPU's ", worst_of_processor);
  CHECK(worst_of_device <= worst_of_processor);
}

TEST_CASE("a device divides the keys of a small step, and merges the parts") {
  if (!stream()) return;
  Random random(24);
  for (const uint32_t head_dim : {64u, 128u, 192u, 256u})
    for (const bool has_sink_logits : {false, true}) {
      const uint32_t pages = 2 * 2048 / PageShape::of(head_dim).page_tokens + 7;
      check_text({head_dim, 1, 3, pages, 70, 65, 1, 1, has_sink_logits, true}, random);
      check_text({head_dim, 2, 8, 4 * pages, 1, 130, 1, 1, has_sink_logits, true}, random);
    }
}

TEST_CASE("learned scores without values take their share of a device's prefill attention") {
  if (!stream()) return;
  Random random(23);
  for (const uint32_t head_dim : {64u, 80u, 128u})
    for (const uint32_t group : {1u, 8u})
      for (const uint32_t pages : {0u, 20u})
        check_text({head_dim, 2, group, pages, 30, 90, 1, 1, true}, random);
}

TEST_CASE("keys and values of any size are attended on a device") {
  if (!stream()) return;
  Random random(22);
  for (const float key_size : {1e-12f, 1e5f})
    for (const float value_size : {1e-15f, 1e-4f, 1e8f})
      check_text({128, 2, 4, 21, 30, 100, key_size, value_size}, random);
}
