// A GPU's attention in prefill against sums in double precision over the same pages and rows:
// random sequences, outputs poisoned.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "backend/kernels.h"
#include "base/checked.h"
#include "device_support.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct Shape {
  uint32_t head_dim, kv_heads, group, pages, window, n;
  float key_size = 1, value_size = 1;  // magnitudes
  bool has_sink_logits = false;
  bool divided = false;  // there is room for parts of the keys
};

struct Text {
  Text(const Shape& of, Random& random)
      : s(of), page(PageShape::of(s.head_dim)), extents(s.pages / extent_pages + 1),
        before(s.pages * page.page_tokens + s.window), all(before + s.n),
        keys(std::size_t{s.kv_heads} * all * page.dim), values(keys.size()),
        pages(std::size_t{extents} * s.kv_heads * PageShape::pages_bytes()),
        scales(std::size_t{extents} * s.kv_heads * page.scales_bytes() / 2),
        sinks(std::size_t{s.kv_heads} * 2 * page.page_tokens * page.dim),
        centre(std::size_t{s.kv_heads} * page.dim),
        window(std::size_t{s.kv_heads} * 2 * (s.window + 3) * page.dim),
        q(std::size_t{s.n} * s.kv_heads * s.group * s.head_dim),
        k(std::size_t{s.n} * s.kv_heads * s.head_dim), v(k.size()) {
    const uint32_t dim = page.dim, tokens = page.page_tokens;
    const auto row = [&](float* to, float size) {
      for (uint32_t d = 0; d < dim; ++d)
        to[d] = d < s.head_dim ? size * random.normal() * (d % 11 == 5 ? 6.0f : 1.0f) : 0.0f;
    };
    for (float& x : q) x = random.normal() * 2 / s.key_size;
    for (uint32_t h = 0; h < s.kv_heads * s.group; ++h) sink_logits.push_back(4 * random.normal());
    if (s.n > 4) std::fill_n(q.data(), s.head_dim, 0.0f);  // a query that asks for nothing
    for (std::size_t i = 0; i < centre.size(); ++i)
      centre[i] = i % dim < s.head_dim ? s.key_size * random.normal() : 0.0f;
    Guarded<float> rows(std::size_t{2} * tokens * dim), unsealed(rows.size());
    Guarded<int8_t> bounds(page.bounds_bytes());
    for (uint32_t h = 0; h < s.kv_heads; ++h) {
      float *its_keys = keys.data() + std::size_t{h} * all * dim,
            *its_values = values.data() + std::size_t{h} * all * dim;
      for (uint32_t p = 0; p < s.pages; ++p) {
        const float size = p % 7 == 3 ? 2.5f : 1.0f;
        for (uint32_t t = 0; t < tokens; ++t)
          row(rows.data() + t * dim, size * s.key_size),
              row(rows.data() + (tokens + t) * dim, size * s.value_size);
        const std::size_t at = std::size_t{p / extent_pages} * s.kv_heads + h;
        int8_t* data = pages.data() + at * PageShape::pages_bytes();
        uint16_t* its_scales = scales.data() + at * page.scales_bytes() / 2;
        cpu_kernels().seal_page(page, rows.data(), rows.data() + std::size_t{tokens} * dim,
                                p % extent_pages, data, its_scales, bounds.data());
        cpu_kernels().unseal_page(page, data + std::size_t{p % extent_pages} * page_bytes,
                                  its_scales + p % extent_pages * std::size_t{2} * tokens,
                                  unsealed.data(), unsealed.data() + std::size_t{tokens} * dim);
        const float* from = p == 0 ? rows.data() : unsealed.data();
        if (p == 0)
          std::copy_n(rows.data(), rows.size(), sinks.data() + std::size_t{h} * rows.size());
        std::copy_n(from, tokens * dim, its_keys + std::size_t{p} * tokens * dim);
        std::copy_n(from + tokens * dim, tokens * dim, its_values + std::size_t{p} * tokens * dim);
      }
      float* at = window.data() + std::size_t{h} * 2 * (s.window + 3) * dim;
      for (uint32_t t = before - s.window; t < all; ++t) {
        float *key = its_keys + std::size_t{t} * dim, *value = its_values + std::size_t{t} * dim;
        row(key, s.key_size), row(value, s.value_size);
        if (t < before) {
          std::copy_n(key, dim, at + std::size_t{t + s.window - before} * dim);
          std::copy_n(value, dim, at + std::size_t{s.window + 3 + t + s.window - before} * dim);
          continue;
        }
        const std::size_t to = (std::size_t{t - before} * s.kv_heads + h) * s.head_dim;
        for (uint32_t d = 0; d < s.head_dim; ++d)
          k[to + d] = key[d] + centre[h * dim + d], key[d] = k[to + d] - centre[h * dim + d];
        std::copy_n(value, s.head_dim, v.data() + to);
      }
    }
  }

  const Shape s;
  const PageShape page;
  const uint32_t extents, before, all;
  std::vector<float> keys, values;  // what attention is defined by: [kv_heads][all][dim]
  std::vector<int8_t> pages;
  std::vector<uint16_t> scales;
  std::vector<float> sinks, centre, window, q, k, v, sink_logits;
};

struct Attended {
  std::vector<float> out, lse;
};

Attended attend(const Text& t) {
  const Shape& s = t.s;
  const uint32_t room = static_cast<uint32_t>(round_up(t.all, prefill_keys)) + prefill_keys,
                 q_room = static_cast<uint32_t>(round_up(s.n * s.group, prefill_rows));
  const std::size_t extent_bytes = s.kv_heads * PageShape::pages_bytes(),
                    extent_scales = s.kv_heads * t.page.scales_bytes();
  Memory<int8_t> pages(t.pages.data(), t.pages.size());
  Memory<uint16_t> scales(t.scales.data(), t.scales.size());
  std::vector<uint64_t> pages_at, scales_at;
  for (uint32_t e = 0; e < t.extents; ++e) {
    pages_at.push_back(reinterpret_cast<uint64_t>(pages.data()) + e * extent_bytes);
    scales_at.push_back(reinterpret_cast<uint64_t>(scales.data()) + e * extent_scales);
  }
  Memory<uint64_t> device_pages_at(pages_at.data(), t.extents),
      device_scales_at(scales_at.data(), t.extents);
  Memory<float> sinks(t.sinks.data(), t.sinks.size()), centre(t.centre.data(), t.centre.size()),
      window(t.window.data(), t.window.size());
  Memory<float> q(t.q.data(), t.q.size()), k(t.k.data(), t.k.size()), v(t.v.data(), t.v.size());
  Memory<uint16_t> keys(std::size_t{s.kv_heads} * room * t.page.dim), values(keys.get().size()),
      half_q(std::size_t{s.kv_heads} * q_room * t.page.dim);
  Memory<float> q_scale(std::size_t{s.kv_heads} * q_room), largest(std::size_t{s.kv_heads} * 2),
      out(t.q.size()), lse(std::size_t{s.n} * s.kv_heads * s.group),
      sink_logits(t.sink_logits.data(), t.sink_logits.size()),
      sink_scores(std::size_t{s.kv_heads} * q_room);
  const uint32_t part_room = s.divided ? 16 * s.kv_heads * q_room : 0;
  Memory<float> parts(std::max(1u, part_room) * prefill_part_floats(t.page.dim));
  const DevicePrefill r{s.kv_heads,
                        s.group,
                        s.head_dim,
                        t.page.dim,
                        t.page.page_tokens,
                        s.n,
                        s.pages,
                        s.window,
                        device_pages_at.data(),
                        device_scales_at.data(),
                        0,
                        0,
                        sinks.data(),
                        centre.data(),
                        window.data(),
                        s.window + 3,
                        room,
                        q_room,
                        keys.data(),
                        values.data(),
                        half_q.data(),
                        q_scale.data(),
                        largest.data(),
                        s.has_sink_logits ? sink_logits.data() : nullptr,
                        s.has_sink_logits ? sink_scores.data() : nullptr,
                        0,
                        0,
                        false,
                        0,
                        s.divided ? parts.data() : nullptr,
                        part_room};
  OK(ops().prepare_prefill(stream(), r, q.data(), k.data(), v.data()));
  OK(ops().attend_prefill(stream(), r, out.data(), lse.data()));
  const Guarded<float>&out_values = out.get(), &out_lse = lse.get();
  keys.get(), values.get(), half_q.get(), q_scale.get(), largest.get();  // guards
  return {{out_values.data(), out_values.data() + out_values.size()},
          {out_lse.data(), out_lse.data() + out_lse.size()}};
}

// A row by the CPU's kernels, over the pages after the sinks and the rows in full precision.
std::vector<float> by_processor(const Text& t, uint32_t head, const float* q, uint32_t seen) {
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

void check_text(const Shape& s, Random& random) {
  CAPTURE(s.head_dim);
  CAPTURE(s.group);
  CAPTURE(s.pages);
  CAPTURE(s.window);
  CAPTURE(s.n);
  CAPTURE(s.key_size);
  const Text t(s, random);
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
