// Co-execution of a GPU and the CPU, against the reference: the partials of sinks and window, quads
// with some attended tokens, neighbouring quads, partials of the CPU, and quads that are moved to
// their places for some layers together.
#include <cstring>
#include <numeric>

#include "device_sequence.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr double close = 1e-4;

// A quad's tokens, as far as they are present.
PageRef ref_of(const Sequence& t, uint32_t head, uint32_t quad, uint64_t present, float bias) {
  const uint32_t p = quad / t.page.page_quads();
  const std::size_t e = std::size_t{p / extent_pages} * t.shape.kv_heads + head;
  return {
      t.pages.data() + e * PageShape::pages_bytes() + p % extent_pages * std::size_t{page_bytes},
      t.scales.data() + e * t.page.scales_bytes() / 2 +
          p % extent_pages * std::size_t{2} * t.page.page_tokens,
      present << quad % t.page.page_quads() * quad_tokens, bias};
}

Partial attended(const QueryRows& query, const std::vector<PageRef>& refs) {
  Partial s{std::vector<double>(query.dim)};
  if (!refs.empty())
    reference::attend_pages(query, refs.data(), static_cast<uint32_t>(refs.size()), s.o.data(),
                            &s.m, &s.l);
  return s;
}

// What the output of a row is, and whether the device has it.
struct Expected {
  Partial all;
  double own = 0;  // of all.l

  void add(const Partial& s, double own_sum) {
    const double before = all.m;
    merge(&all, s);
    own = (before == -HUGE_VAL ? 0 : own * std::exp(before - all.m)) +
          (s.m == -HUGE_VAL ? 0 : own_sum * std::exp(s.m - all.m));
  }
  void check(const float* out, float total, float mass, uint32_t head_dim) const {
    double norm = 0, difference = 0;
    for (uint32_t d = 0; d < head_dim; ++d) {
      const double e = all.o[d] / all.l;
      norm += e * e, difference += (double{out[d]} - e) * (double{out[d]} - e);
    }
    CHECK(std::sqrt(difference / norm) < close);
    CHECK(std::fabs(double{total} - (all.m + std::log(all.l))) < close);
    CHECK(std::fabs(double{mass} - own / all.l) < close);
  }
};

void check_hybrid(const Shape& s, Random& random) {
  CAPTURE(s.head_dim);
  CAPTURE(s.group);
  CAPTURE(s.pages);
  Sequence t(s, random);
  OnDevice d(t);
  Work w(t);
  const uint32_t dim = t.page.dim, quads = s.pages * t.page.page_quads(),
                 first = t.page.page_quads(), most = quads, heads = s.kv_heads * s.group;
  const std::size_t row_floats = dim + state_sums;
  Shared<uint32_t> lists(std::size_t{s.kv_heads} * most), counts(2 * s.kv_heads);
  Shared<float> biases(std::size_t{s.kv_heads} * most), cpu_states(heads * row_floats),
      near_sums(2 * heads);
  Shared<uint8_t> present(std::size_t{s.kv_heads} * most);
  for (uint32_t h = 0; h < s.kv_heads; ++h)
    for (uint32_t quad = first; quad < quads; ++quad) {
      if (random.below(3) > 0) continue;
      const std::size_t at = std::size_t{h} * most + counts.data()[2 * h]++;
      lists.data()[at] = quad;
      present.data()[at] = static_cast<uint8_t>(1 + random.below(15));
      biases.data()[at] = random.below(2) ? 0 : random.uniform(0.1f, 2);
    }
  for (std::size_t i = 0; i < cpu_states.size(); ++i) cpu_states.data()[i] = random.normal();
  for (uint32_t r = 0; r < heads; ++r) {
    float* sums = cpu_states.data() + r * row_floats + dim;
    sums[1] = random.uniform(0.5f, 20), sums[2] = sums[1] * random.uniform(0, 1);
    // nothing
    if (r % 5 == 1) std::fill_n(sums - dim, dim, 0.0f), sums[0] = -HUGE_VALF, sums[1] = sums[2] = 0;
  }
  w.a.projected = nullptr;
  w.a.max_quads = most;
  w.a.lists = lists.data(), w.a.biases = biases.data(), w.a.present = present.data(),
  w.a.list_counts = counts.data();
  w.a.near_sums = near_sums.data();
  OK(ops().begin_attention(stream(), d.kv, w.a, d.q.data(), d.k.data(), d.v.data()));
  OK(ops().attend_sinks_and_window(stream(), d.kv, w.a));
  const Guarded<int8_t>& q8 = w.q8.get();
  const Guarded<float>&q = w.q.get(), &q_scale = w.q_scale.get(), &window = d.window.get();
  // as it was poisoned
  for (const std::size_t i : {std::size_t{0}, w.projected.size() - 1})
    CHECK(w.projected.get()[i] == -1);

  enum class How { sinks_and_window, listed, neighbours };
  for (const How how : {How::sinks_and_window, How::listed, How::neighbours}) {
    for (const bool with_cpu : {false, true}) {
      CAPTURE(static_cast<int>(how));
      CAPTURE(with_cpu);
      const uint32_t from = first + (quads - first) / 3;
      DeviceAttention a = w.a;
      a.parts = how == How::sinks_and_window ? near_parts : attention_parts;
      a.cpu_states = with_cpu ? cpu_states.data() : nullptr;
      Shared<uint32_t> neighbours(2 * s.kv_heads);
      if (how == How::neighbours) {
        for (uint32_t h = 0; h < s.kv_heads; ++h)
          neighbours.data()[2 * h] = quads - from, neighbours.data()[2 * h + 1] = from;
        a.lists = nullptr, a.biases = nullptr, a.present = nullptr,
        a.list_counts = neighbours.data();
      }
      if (how != How::sinks_and_window) OK(ops().attend_chosen(stream(), d.kv, a));
      OK(ops().finish_attention(stream(), d.kv, a, w.made, {1e30f, 5, w.first_bad.data()},
                                w.lse.data(), w.mass.data()));
      const Guarded<float>&out = w.out.get(), &lse = w.lse.get(), &mass = w.mass.get();
      w.check_rounded();
      for (uint32_t h = 0; h < s.kv_heads; ++h) {
        const float *k = window.data() + std::size_t{h} * 2 * (s.window + 1) * dim,
                    *sink = t.sinks.data() + std::size_t{h} * 2 * t.page.page_tokens * dim;
        for (uint32_t r = 0; r < s.group; ++r) {
          const std::size_t row = std::size_t{h} * s.group + r;
          const QueryRows query{
              1, dim, q.data() + row * dim, q8.data() + row * dim, nullptr, q_scale.data() + row};
          Expected e{Partial{std::vector<double>(dim)}};
          Partial kept{std::vector<double>(dim)};
          reference::attend_rows(query, sink, sink + std::size_t{t.page.page_tokens} * dim,
                                 t.page.page_tokens, nullptr, kept.o.data(), &kept.m, &kept.l);
          e.add(kept, kept.l);
          kept = Partial{std::vector<double>(dim)};
          reference::attend_rows(query, k, k + std::size_t{s.window + 1} * dim, s.window + 1,
                                 nullptr, kept.o.data(), &kept.m, &kept.l);
          e.add(kept, kept.l);
          CHECK(std::fabs(double{near_sums.data()[row]} - e.all.m) < close);
          CHECK(std::fabs(double{near_sums.data()[heads + row]} - e.all.l) < close * e.all.l);
          for (uint32_t i = 0; how == How::listed && i < counts.data()[2 * h]; ++i) {
            const std::size_t at = std::size_t{h} * most + i;
            const Partial part = attended(
                query, {ref_of(t, h, lists.data()[at], present.data()[at], biases.data()[at])});
            e.add(part, biases.data()[at] > 0 ? 0 : part.l);
          }
          for (uint32_t quad = from; how == How::neighbours && quad < quads; ++quad) {
            const Partial part = attended(query, {ref_of(t, h, quad, 15, 0)});
            e.add(part, part.l);
          }
          if (const float* sums = cpu_states.data() + row * row_floats;
              with_cpu && sums[dim + 1] > 0) {
            Partial state{{sums, sums + dim}, double{sums[dim]}, double{sums[dim + 1]}};
            e.add(state, double{sums[dim + 2]});
          }
          e.check(out.data() + row * s.head_dim, lse[row], mass[row], s.head_dim);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE(
    "a device attends with the CPU: a part of a quad, neighbouring quads, and what the CPU has "
    "attended") {
  if (!stream()) return;
  Random random(31);
  for (const uint32_t head_dim : {48u, 64u, 80u, 128u, 256u})
    for (const uint32_t group : {1u, 3u, 4u, 9u, 16u})
      check_hybrid({head_dim, 1 + random.below(3), group, 2 + random.below(60), random.below(200),
                    1, 1, 1, 0},
                   random);
}

TEST_CASE(
    "a device reads quads for some layers together, and attends them from there as where they lay, "
    "to the bit") {
  if (!stream()) return;
  Random random(32);
  constexpr uint32_t layers = 3, kv_heads = 2;
  for (const uint32_t head_dim : {64u, 80u, 128u, 256u}) {
    CAPTURE(head_dim);
    // Layers' heads lie one behind the other.
    const Shape s{head_dim, layers * kv_heads, 4, 40, 70, 1, 1, 1, 0};
    Sequence t(s, random);
    OnDevice d(t);
    DeviceKv kv = d.kv;
    kv.kv_heads = kv_heads;
    const uint32_t quads = s.pages * t.page.page_quads(), room = quads + 5;
    const std::size_t quad_bytes = quad_bytes_of(t.page.dim),
                      all = std::size_t{layers} * kv_heads * room;
    Shared<uint32_t> count(1), wanted(room), places(room), found(std::size_t{kv_heads} * room),
        counts(2 * kv_heads);
    Shared<uint8_t> present(std::size_t{kv_heads} * room);
    std::vector<uint32_t> order(room);
    std::iota(order.begin(), order.end(), 0u);
    for (uint32_t i = room; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    for (uint32_t quad = t.page.page_quads(); quad < quads; quad += 1 + random.below(5)) {
      const uint32_t i = (*count.data())++;
      wanted.data()[i] = quad, places.data()[i] = order[i];
      for (uint32_t h = 0; h < kv_heads; ++h)
        found.data()[h * room + i] = (order[i] + 1) | hot_present,
                                present.data()[h * room + i] = static_cast<uint8_t>(1 + quad % 15);
    }
    for (uint32_t h = 0; h < kv_heads; ++h) counts.data()[2 * h] = *count.data();
    Memory<uint8_t> put(all * quad_bytes);
    OK(ops().gather_group(
        stream(), kv,
        {layers, room, count.data(), wanted.data(), places.data(), room, put.data()}));
    OK(ops().wait(stream()));
    const Guarded<uint8_t>& there = put.get();
    std::vector<uint8_t> expected(all * quad_bytes, 0xff);
    for (uint32_t h = 0; h < layers * kv_heads; ++h)
      for (uint32_t i = 0; i < *count.data(); ++i) {
        const PageRef ref = ref_of(t, h, wanted.data()[i], 15, 0);
        const std::size_t in_page = wanted.data()[i] % t.page.page_quads(),
                          half = std::size_t{quad_tokens} * t.page.dim,
                          scales = quad_tokens * sizeof(uint16_t);
        uint8_t* to = expected.data() + (std::size_t{h} * room + places.data()[i]) * quad_bytes;
        std::memcpy(to, ref.data + in_page * half, half);
        std::memcpy(to + half, ref.data + page_bytes / 2 + in_page * half, half);
        std::memcpy(to + 2 * half, ref.scales + in_page * quad_tokens, scales);
        std::memcpy(to + 2 * half + scales, ref.scales + t.page.page_tokens + in_page * quad_tokens,
                    scales);
      }
    CHECK(std::equal(expected.begin(), expected.end(), there.data()));

    const Shape one{head_dim, kv_heads, 4, 40, 70, 1, 1, 1, 0};
    Sequence of_one(one, random);
    Work w(of_one);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      DeviceKv layer_kv = kv;
      layer_kv.pages_offset = layer * kv_heads * PageShape::pages_bytes(),
      layer_kv.scales_offset = layer * kv_heads * t.page.scales_bytes();
      std::vector<std::vector<float>> outs;
      Shared<uint32_t> lists(std::size_t{kv_heads} * room);
      for (uint32_t h = 0; h < kv_heads; ++h)
        std::copy_n(wanted.data(), room, lists.data() + h * room);
      for (const bool packed : {false, true}) {
        DeviceAttention a = w.a;
        a.projected = nullptr, a.biases = nullptr, a.max_quads = room;
        a.present = present.data(), a.list_counts = counts.data(),
        a.lists = packed ? nullptr : lists.data();
        if (packed)
          a.hot = {room, quad_bytes, put.data() + layer * kv_heads * room * quad_bytes, nullptr,
                   found.data()};
        OK(ops().begin_attention(stream(), layer_kv, a, d.q.data(), d.k.data(), d.v.data()));
        OK(ops().attend_sinks_and_window(stream(), layer_kv, a));
        OK(ops().attend_chosen(stream(), layer_kv, a));
        OK(ops().finish_attention(stream(), layer_kv, a, w.made, {1e30f, 5, w.first_bad.data()},
                                  w.lse.data(), w.mass.data()));
        const Guarded<float>& out = w.out.get();
        outs.emplace_back(out.data(), out.data() + out.size());
      }
      CHECK(outs[0] == outs[1]);
    }
  }
}
