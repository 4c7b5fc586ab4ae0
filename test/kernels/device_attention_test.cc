// A GPU's attention against the reference, on random sequences: keys that are sealed by the CPU,
// pages in its memory, outputs poisoned. The choice is checked against the definition
// (select/sampling.h), by the shares that the device found.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "device_sequence.h"
#include "select/sampling.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

void check_sequence(const Shape& s, Random& random) {
  CAPTURE(s.head_dim);
  CAPTURE(s.group);
  CAPTURE(s.pages);
  CAPTURE(s.window);
  CAPTURE(s.n);
  CAPTURE(s.most);
  CAPTURE(s.sharpness);
  Sequence t(s, random);
  OnDevice d(t);
  Work w(t);
  const PageShape& page = t.page;
  const uint32_t dim = page.dim, n = page.sketch_dim(), quads = s.pages * page.page_quads(),
                 first = page.page_quads();
  OK(ops().begin_attention(stream(), d.kv, w.a, d.q.data(), d.k.data(), d.v.data()));
  OK(ops().score_sketch(stream(), d.kv, w.a));
  const Guarded<float>& scores = w.scores.get();
  std::vector<float> scored(scores.data(), scores.data() + scores.size());
  OK(ops().choose(stream(), d.kv, w.a));
  if (s.n > 1) OK(ops().gather_chosen(stream(), d.kv, w.a));
  OK(ops().attend_chosen(stream(), d.kv, w.a));
  OK(w.finish(d.kv));
  w.check_rounded();
  CHECK(w.first_bad.get()[0] == UINT32_MAX);
  const Guarded<float>&q = w.q.get(), &q_scale = w.q_scale.get(), &out = w.out.get(),
        &lse = w.lse.get(), &mass = w.mass.get();
  const std::vector<float> window = d.window_in_order();
  const Guarded<int8_t>&q8 = w.q8.get(), &projected = w.projected.get();
  const Guarded<uint32_t>&lists = w.chosen.get(), &counts = w.counts.get();
  const Guarded<float>& projected_scale = w.projected_scale.get();
  const Guarded<float>&shares = w.scores.get(), &biases = w.biases.get();
  [[maybe_unused]] const Guarded<uint32_t>& share_counts = w.share_counts.get();
  [[maybe_unused]] const Guarded<unsigned long long>& share_sums = w.share_sums.get();
  w.states.get();

  Guarded<float> x(dim), its_scale(1);
  Guarded<int8_t> its8(dim);
  uint32_t wrong = 0;
  double worst_score = 0, worst_out = 0, worst_total = 0, worst_mass = 0;
  for (uint32_t h = 0; h < s.kv_heads; ++h) {
    const float* k = window.data() + std::size_t{h} * 2 * (s.window + s.n) * dim;
    const float* v = k + std::size_t{s.window + s.n} * dim;
    for (uint32_t i = 0; i < s.n * s.head_dim; ++i) {
      const uint32_t token = i / s.head_dim, element = i % s.head_dim;
      const std::size_t from = (std::size_t{token} * s.kv_heads + h) * s.head_dim + element;
      wrong += k[(s.window + token) * dim + element] != t.k[from] - t.centre[h * dim + element];
      wrong += v[(s.window + token) * dim + element] != t.v[from];
    }
    for (uint32_t block = 0; block < w.blocks; ++block) {
      const std::size_t at = std::size_t{h} * w.blocks + block, first_row = at * w.selecting_rows;
      const QueryGroup askers = query_group_of(s.n, w.blocks, block);
      // The list: ascending, of quads that may be chosen.
      const uint32_t count = counts[2 * at], n_quads = quads > first ? quads - first : 0;
      std::vector<uint32_t> chosen_quads;
      std::vector<float> sample_biases;
      std::vector<PageRef> refs;
      REQUIRE(count <= w.most);
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t quad = lists[at * w.most + i], p = quad / page.page_quads();
        REQUIRE((quad >= first && quad < quads));
        REQUIRE((i == 0 || quad > lists[at * w.most + i - 1]));
        const std::size_t e = std::size_t{p / extent_pages} * s.kv_heads + h;
        const float bias = biases[at * w.most + i];
        chosen_quads.push_back(quad);
        sample_biases.push_back(bias);
        refs.push_back({t.pages.data() + e * PageShape::pages_bytes() +
                            p % extent_pages * std::size_t{page_bytes},
                        t.scales.data() + e * page.scales_bytes() / 2 +
                            p % extent_pages * std::size_t{2} * page.page_tokens,
                        uint64_t{15} << quad % page.page_quads() * quad_tokens, bias});
      }

      // Its shares, and that it is what a threshold takes that reads as many as it may or leaves
      // the variance, each with its weight.
      std::vector<Partial> states(std::size_t{askers.count} * s.group);
      std::vector<double> expected(n_quads);
      for (uint32_t i = 0, asking = 0; i < states.size(); ++i) {
        const uint32_t token = askers.first + i / s.group, r = i % s.group;
        const std::size_t row = (std::size_t{h} * s.n + token) * s.group + r,
                          from = (std::size_t{token} * s.kv_heads * s.group + h * s.group + r) *
                                 s.head_dim;
        const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
        for (uint32_t e = 0; e < dim; ++e) x[e] = e < s.head_dim ? t.q[from + e] * scale : 0.0f;
        cpu_kernels().quantize_queries(x.data(), 1, dim, its8.data(), nullptr, its_scale.data());
        wrong += std::fabs(q_scale[row] - its_scale[0]) > 1e-6f * its_scale[0];
        std::vector<double> coordinates(n);
        for (uint32_t e = 0; e < dim; ++e) {
          wrong += std::fabs(q[row * dim + e] - x[e]) > 1e-6f * s.sharpness ||
                   std::abs(q8[row * dim + e] - its8[e]) > 1;
          for (uint32_t c = 0; c < n; ++c)
            coordinates[c] += double{x[e]} * double{t.basis[(std::size_t{h} * dim + e) * n + c]};
        }
        double largest = 0;
        for (double c : coordinates) largest = std::max(largest, std::fabs(c));
        for (uint32_t c = 0; c < n; ++c)
          wrong += std::fabs(projected[row * n + c] - coordinates[c] * 127 / largest) > 0.51;
        wrong += std::fabs(double{projected_scale[row]} - largest / 127) > 1e-5 * largest;

        Partial& kept = states[i];
        kept.o.resize(dim);
        const QueryRows query{
            1, dim, q.data() + row * dim, q8.data() + row * dim, nullptr, q_scale.data() + row};
        reference::attend_rows(query, k, v, s.window + token + 1, nullptr, kept.o.data(), &kept.m,
                               &kept.l);
        if (s.pages > 0) {
          Partial sinks{std::vector<double>(dim)};
          const float* keys = t.sinks.data() + std::size_t{h} * 2 * page.page_tokens * dim;
          reference::attend_rows(query, keys, keys + std::size_t{page.page_tokens} * dim,
                                 page.page_tokens, nullptr, sinks.o.data(), &sinks.m, &sinks.l);
          merge(&kept, sinks);
        }
        if (s.has_sink_logits) {  // a score without a value; keys are centred
          Partial sink{std::vector<double>(dim), double{t.sink_logits[h * s.group + r]}, 1};
          for (uint32_t e = 0; e < dim; ++e)
            sink.m -= double{x[e]} * double{t.centre[std::size_t{h} * dim + e]};
          merge(&kept, sink);
        }
        if ((askers.count - 1 - i / s.group) % 4 > 0) continue;  // it does not ask
        const std::size_t score_row = first_row + asking++;
        std::vector<double> sketched(page.extent_quads());
        for (uint32_t e = 0; e * extent_pages < s.pages; ++e) {
          reference::score_sketch(
              page, 1, projected.data() + row * n, projected_scale.data() + row,
              t.sketch.data() + (std::size_t{e} * s.kv_heads + h) * page.sketch_bytes(),
              sketched.data(), page.extent_quads());
          for (uint32_t b = 0; b < page.extent_quads(); ++b)
            worst_score = std::max(
                worst_score,
                std::fabs(double{scored[score_row * w.stride + e * page.extent_quads() + b]} -
                          sketched[b]));
        }
        std::vector<double> shares_of_row(expected.size());
        reference::attention_shares(scored.data() + score_row * w.stride + first,
                                    static_cast<uint32_t>(expected.size()),
                                    static_cast<float>(kept.m - std::log(2.0)),
                                    static_cast<float>(kept.l), shares_of_row.data());
        for (std::size_t b = 0; b < expected.size(); ++b) expected[b] += shares_of_row[b];
      }
      double all_shares = 0;  // a tenth of the mean is the least of several tokens
      for (double share : expected) all_shares += share;
      for (double& share : expected)
        share = std::max(share, s.n > 1 ? 0.1 * all_shares / n_quads : 0);
      const double variance = double{s.variance} * askers.selecting() * askers.selecting();
      const float* shares_of_row = shares.data() + first_row * w.stride;
      for (std::size_t b = 0; b < expected.size(); ++b)
        wrong +=
            std::fabs(double{shares_of_row[first + b]} - expected[b]) > 1e-4 * expected[b] + 1e-12;
#ifndef KVASIR_EMULATED_DEVICE  // the CPU finds its threshold without
      if (s.pages > 0 && n_quads > 0) {
        std::vector<uint32_t> bin_counts(share_bins);
        std::vector<unsigned long long> bin_sums(share_bins);
        for (uint32_t i = 0; i < n_quads; ++i) {
          // Of a float's bits: sixteen bins from a power of two to the next; a share counts as
          // rounded to thirteen bits behind the first one.
          constexpr uint32_t shift = 19, first_bin = (127 - 43) << 4, step = 1 << 10;
          if (!(shares_of_row[first + i] >= 0x1p-43f)) continue;
          const uint32_t bits =
              (std::bit_cast<uint32_t>(shares_of_row[first + i]) + step / 2) / step * step;
          const uint32_t bin = std::min((bits >> shift) - first_bin, share_bins - 1);
          ++bin_counts[bin], bin_sums[bin] += static_cast<unsigned long long>(std::llrint(
                                 double{std::bit_cast<float>(bits)} * double{share_unit}));
        }
        for (uint32_t bin = 0; bin < share_bins; ++bin)
          wrong += share_counts[at * share_bins + bin] != bin_counts[bin] ||
                   share_sums[at * share_bins + bin] != bin_sums[bin];
      }
#endif
      // All that was taken has at least the threshold, all else less; samples' weights say which it
      // is.
      double low = 0, high = HUGE_VAL, threshold = 0;
      for (uint32_t i = 0, j = 0; i < n_quads; ++i) {
        const double share = double{shares_of_row[first + i]},
                     priority = share /
                                reference::sample_random(first + i, sample_seed(sequence_layer, h));
        const bool taken = j < chosen_quads.size() && chosen_quads[j] == first + i;
        if (!taken) {
          low = std::max(low, priority);
          continue;
        }
        high = std::min(high, priority);
        if (sample_biases[j] > 0) {
          const double score = share * std::exp(double{sample_biases[j]});
          wrong += threshold > 0 && std::fabs(score - threshold) > 1e-5 * threshold;
          threshold = score;
        }
        wrong += sample_biases[j] < 0;
        ++j;
      }
      CHECK((chosen_quads.empty() || high >= std::max(low, threshold) * (1 - 1e-5)));
      if (threshold > 0) CHECK(low <= threshold * (1 + 1e-5));
      // Without a threshold every chosen quad has weight 1: the threshold is between `low` and
      // `high`.
      const double from = threshold > 0 ? threshold : std::max(low, 1e-38),
                   to = threshold > 0 ? threshold : std::min(high, 1e30);
      const auto sum_of = [&](auto f) {
        double sum = 0;
        for (uint32_t i = 0; i < n_quads; ++i) sum += f(double{shares_of_row[first + i]});
        return sum;
      };
      const auto expected_at = [&](double at_least) {
        return sum_of([&](double share) { return std::min(1.0, share / at_least); });
      };
      const auto left_at = [&](double at_least) {
        return sum_of([&](double share) { return share * std::max(at_least - share, 0.0); });
      };
      const double positive = sum_of([](double share) { return share >= 0x1p-43 ? 1.0 : 0.0; });
      const double least = std::min<double>(s.least, positive),
                   most = std::min<double>(s.most, positive);
      if (s.most == 0 || n_quads <= s.least) {
        CHECK(count == (s.most == 0 ? 0 : n_quads));
      } else {
        CHECK(expected_at(from) >= least * 0.998);
        CHECK(expected_at(to) <= s.most * 1.002);
        if (expected_at(from) < most * 0.999) CHECK(left_at(from) <= variance * 1.004 + 1e-12);
        if (expected_at(to) > least * 1.001) CHECK(left_at(to) >= variance * 0.996);
      }
      CHECK(static_cast<double>(count) <= expected_at(from) + 8 * std::sqrt(expected_at(from)) + 8);

      // The output, of what was chosen.
      for (uint32_t i = 0; i < states.size(); ++i) {
        const uint32_t token = askers.first + i / s.group, head = h * s.group + i % s.group;
        const std::size_t row = (std::size_t{h} * s.n + token) * s.group + i % s.group;
        const QueryRows query{
            1, dim, q.data() + row * dim, q8.data() + row * dim, nullptr, q_scale.data() + row};
        Partial state = states[i], certain = states[i];
        for (const bool sampled : {false, true}) {
          std::vector<PageRef> some;
          for (const PageRef& ref : refs)
            if ((ref.bias > 0) == sampled) some.push_back(ref);
          if (some.empty()) continue;
          Partial pages{std::vector<double>(dim)};
          reference::attend_pages(query, some.data(), static_cast<uint32_t>(some.size()),
                                  pages.o.data(), &pages.m, &pages.l);
          merge(&state, pages);
          if (!sampled) merge(&certain, pages);
        }
        const float* its_out =
            out.data() + (std::size_t{token} * s.kv_heads * s.group + head) * s.head_dim;
        double norm = 0, difference = 0;
        for (uint32_t j = 0; j < s.head_dim; ++j) {
          const double e = state.o[j] / state.l;
          norm += e * e, difference += (double{its_out[j]} - e) * (double{its_out[j]} - e);
        }
        worst_out = std::max(worst_out, std::sqrt(difference / norm));
        const std::size_t place = std::size_t{token} * s.kv_heads * s.group + head;
        worst_total =
            std::max(worst_total, std::fabs(double{lse[place]} - (state.m + std::log(state.l))));
        worst_mass = std::max(
            worst_mass,
            std::fabs(double{mass[place]} - certain.l / state.l * std::exp(certain.m - state.m)));
      }
    }
  }
  CHECK(wrong == 0);
  CHECK(worst_score < 1e-4 * s.sharpness);
  CHECK(worst_out < 1e-4 * s.sharpness);
  CHECK(worst_total < 1e-4 * s.sharpness);
  CHECK(worst_mass < 1e-4);
}

}  // namespace

TEST_CASE("a device's attention agrees with the reference on odd sequences") {
  if (!stream()) return;
  Random random(11);
  for (const uint32_t head_dim : {48u, 64u, 80u, 128u, 192u, 256u}) {
    for (const uint32_t group : {1u, 2u, 3u, 4u, 7u, 8u, 9u, 16u}) {
      const uint32_t pages = 2 + random.below(70), most = 1 + random.below(40);
      check_sequence(
          {head_dim, 1 + random.below(3), group, pages, random.below(200), 1, most, most, 0},
          random);
      check_sequence({head_dim, 1 + random.below(3), group, pages, 1 + random.below(70),
                      1 + random.below(4), most / 4, most * 4, random.uniform(0.0001f, 1)},
                     random);
      check_sequence(
          {head_dim, 1, group, pages, 1 + random.below(70), 5 + random.below(60), most, most, 0},
          random);
    }
  }
}

TEST_CASE("learned scores without values take their share of a device's attention") {
  if (!stream()) return;
  Random random(15);
  for (const uint32_t head_dim : {64u, 80u, 128u, 256u})
    for (const uint32_t group : {1u, 3u, 8u})
      for (const uint32_t n : {1u, 3u, 20u})
        for (const uint32_t pages : {0u, 40u})
          check_sequence({head_dim, 2, group, pages, 30, n, 10, 40, 0.02f, 1, true}, random);
}

TEST_CASE(
    "a device's attention of sequences with few pages, with budgets of nothing and of everything") {
  if (!stream()) return;
  Random random(12);
  for (const uint32_t pages : {0u, 1u, 2u, 15u, 16u, 17u, 33u})
    for (const uint32_t most : {0u, 1u, 100000u})
      for (const uint32_t head_dim : {64u, 128u, 256u})
        check_sequence({head_dim, 2, 3, pages, 20, 2, most / 4, most, 0.09f}, random);
  check_sequence({128, 2, 4, 1300, 130, 1, 30, 480, 0.02f}, random);
  // so many lists and parts of them that one part finds a list's threshold for all
  check_sequence({64, 6, 16, 1300, 20, 64, 10, 40, 0.02f}, random);
}

TEST_CASE(
    "a device's attention of queries that one key takes all of, or a few: nothing has so small a "
    "share that it crowds them out") {
  if (!stream()) return;
  Random random(13);
  for (const float sharpness : {3.0f, 8.0f, 20.0f})
    for (const uint32_t head_dim : {64u, 128u, 256u}) {
      check_sequence({head_dim, 2, 1, 300, 20, 1, 40, 40, 0, sharpness}, random);
      check_sequence({head_dim, 2, 3, 300, 20, 1, 10, 160, 0.02f, sharpness}, random);
    }
}

TEST_CASE(
    "quads that steps before have read stay in the device's memory, and what is attended stays the "
    "same bits") {
  if (!stream()) return;
  Random random(14);
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 4u, 9u}) {
      for (const uint32_t room : {8u, 24u, 1024u}) {
        CAPTURE(head_dim);
        CAPTURE(group);
        CAPTURE(room);
        const bool all_fit = room > 100;
        const Shape s{head_dim, 2, group, 60, 30, 1, 20, 20, 0};
        Sequence t(s, random);
        OnDevice d(t);
        Work hot(t), plain(t);
        const std::size_t quad_bytes = std::size_t{8} * t.page.dim + 16;
        Memory<uint8_t> hot_quads(s.kv_heads * room * quad_bytes);
        Memory<unsigned long long> entries(std::size_t{s.kv_heads} * room);
        const std::vector<unsigned long long> none(std::size_t{s.kv_heads} * room);
        entries.put(none.data());
        Memory<uint32_t> places(std::size_t{s.kv_heads} * hot.a.max_quads);
        hot.a.hot = {room, quad_bytes, hot_quads.data(), entries.data(), places.data()};
        uint32_t steps = 0;
        const auto step = [&](Work& w, uint32_t since = 0, uint32_t changed_from = UINT32_MAX,
                              uint32_t changed_since = 0) {
          const DeviceCounts c{s.pages,      s.window,      ++steps,    since,
                               changed_from, changed_since, d.first_row};
          d.counts.put(&c);
          OK(ops().begin_attention(stream(), d.kv, w.a, d.q.data(), d.k.data(), d.v.data()));
          OK(ops().score_sketch(stream(), d.kv, w.a));
          OK(ops().choose(stream(), d.kv, w.a));
          OK(ops().attend_chosen(stream(), d.kv, w.a));
          OK(w.finish(d.kv));
          const Guarded<float>& out = w.out.get();
          return std::vector<float>(out.data(), out.data() + out.size());
        };
        const auto numbers = [&](Work& w, uint32_t head) {
          const Guarded<uint32_t>&lists = w.chosen.get(), &counts = w.counts.get();
          std::vector<uint32_t> out;
          for (uint32_t i = 0; i < counts[2 * head]; ++i) out.push_back(lists[head * w.most + i]);
          return out;
        };
        const auto found_by = [&](uint32_t head) { return hot.counts.get()[2 * head + 1]; };
        // Of a head's list those that have a place now, and none of which is another's.
        const auto kept = [&](uint32_t head) {
          const std::vector<uint32_t> list = numbers(hot, head);
          const Guarded<uint32_t>& found = places.get();
          std::vector<uint32_t> out, places;
          for (uint32_t i = 0; i < list.size(); ++i)
            if (const uint32_t place = found[head * hot.a.max_quads + i] & ~hot_present)
              out.push_back(list[i]), places.push_back(place);
          std::sort(places.begin(), places.end());
          CHECK(std::adjacent_find(places.begin(), places.end()) == places.end());
          if (!places.empty()) CHECK(places.back() <= room);
          return out;
        };

        const auto first = step(plain);
        CHECK(plain.first_bad.get()[0] == UINT32_MAX);
        OK(plain.finish(d.kv, 1e-12f));  // every number is too large
        CHECK(plain.first_bad.get()[0] == 5);
        CHECK(step(hot) == first);
        std::vector<std::vector<uint32_t>> before;
        for (uint32_t h = 0; h < s.kv_heads; ++h) {
          CHECK(found_by(h) == 0);
          before.push_back(kept(h));
          REQUIRE(before[h].size() > 6);
          if (all_fit) CHECK(before[h] == numbers(hot, h));
        }
        // What stays is not read again: in its place there is now something else.
        std::vector<int8_t> pages(t.pages.data(), t.pages.data() + t.pages.size());
        std::vector<uint16_t> scales(t.scales.data(), t.scales.data() + t.scales.size());
        for (uint32_t h = 0; h < s.kv_heads; ++h) {
          for (const uint32_t quad : before[h]) {
            const uint32_t p = quad / t.page.page_quads(), in_page = quad % t.page.page_quads();
            const std::size_t in_extent =
                                  (std::size_t{p / extent_pages} * s.kv_heads + h) * extent_pages +
                                  p % extent_pages,
                              bytes = std::size_t{4} * t.page.dim;
            for (const std::size_t half : {std::size_t{0}, std::size_t{page_bytes / 2}})
              std::fill_n(t.pages.data() + in_extent * page_bytes + half + in_page * bytes, bytes,
                          int8_t{77});
            for (const uint32_t half : {0u, t.page.page_tokens})
              std::fill_n(t.scales.data() + in_extent * 2 * t.page.page_tokens + half + in_page * 4,
                          4, uint16_t{0x4000});
          }
        }
        const auto found_all = [&] {
          for (uint32_t h = 0; h < s.kv_heads; ++h) CHECK(found_by(h) == before[h].size());
        };
        // Where several quads want a place the one that has it may lose it to one that comes before
        // it.
        if (all_fit) {
          CHECK(step(hot) == first);
          found_all();
        }
        // Of quads that are others now none is taken from there; of the rest all are.
        std::vector<uint32_t> in_the_middle;
        for (uint32_t h = 0; h < s.kv_heads; ++h)
          in_the_middle.push_back(before[h][before[h].size() / 2]);
        const uint32_t from = *std::min_element(in_the_middle.begin(), in_the_middle.end());
        const auto other = step(hot, 0, from, steps + 1);
        CHECK(other != first);
        for (uint32_t h = 0; h < s.kv_heads && all_fit; ++h)
          CHECK(found_by(h) == static_cast<std::size_t>(
                                   std::lower_bound(before[h].begin(), before[h].end(), from) -
                                   before[h].begin()));
        if (all_fit) {  // what that step has read stays
          CHECK(step(hot, 0, from, steps) == other);
          found_all();
        }
        CHECK(step(hot, steps + 1) != first);  // all are read
        std::copy(pages.begin(), pages.end(), t.pages.data());
        std::copy(scales.begin(), scales.end(), t.scales.data());
        CHECK(step(hot, steps + 1) == first);
        const uint32_t since = steps;

        // Another query chooses others, of which some were there; the first one finds again what it
        // had.
        const std::vector<float> asked(t.q.data(), t.q.data() + t.q.size());
        for (float& x : t.q) x += random.normal() / 2;
        d.q.put(t.q.data());
        const auto second = step(plain);
        CHECK(second != first);
        for (int i = 0; i < 2; ++i) CHECK(step(hot, since) == second);
        for (uint32_t h = 0; h < s.kv_heads && all_fit; ++h)
          CHECK(found_by(h) == numbers(hot, h).size());
        d.q.put(asked.data());
        CHECK(step(hot, since) == first);
        if (all_fit) found_all();
      }
    }
  }
}
