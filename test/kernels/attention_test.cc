// Attention kernels of every instruction set against the double-precision reference.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "attention_inputs.h"

using namespace kvasir;
using test::Guarded;
using test::Pages;
using test::pages_tolerance;
using test::Queries;
using test::Random;
using test::ReferenceState;
using test::rows_tolerance;
using test::State;
using test::worst_row;

namespace {

void attend(const Kernels& k, const QueryRows& q, const PageRef* pages, std::size_t n,
            State& state) {
  Guarded<std::byte> scratch(k.attend_scratch(q.rows, q.dim));
  k.attend_pages(q, pages, static_cast<uint32_t>(n), state.view(), scratch.data());
  CHECK(scratch.guards_intact());
  CHECK(state.guards_intact());
}

void attend(const Kernels& k, const QueryRows& q, const float* keys, const float* values,
            uint32_t n, const uint32_t* limit, State& state) {
  Guarded<std::byte> scratch(k.attend_scratch(q.rows, q.dim));
  k.attend_rows(q, keys, values, n, limit, state.view(), scratch.data());
  CHECK(scratch.guards_intact());
  CHECK(state.guards_intact());
}

QueryRows one_row(const QueryRows& q, uint32_t row) {
  const std::size_t at = std::size_t{row} * q.dim;
  return {1, q.dim, q.f32 + at, q.q + at, q.split + 2 * at, q.scale + row};
}

}  // namespace

TEST_CASE("attention over pages differs from the exact softmax by the weights' rounding only") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      for (uint32_t i = 0; i < 12; ++i) {
        Random random(dim * 100 + i);
        const uint32_t rows = 1 + random.below(i < 9 ? 9 : 40), n = 1 + random.below(40);
        Pages pages(dim, n, random);
        Queries q(*k, rows, dim, random,
                  random.uniform(0.01f, 1.5f) / std::sqrt(static_cast<float>(dim)));
        if (i % 3 == 1) {
          for (PageRef& page : pages.refs)
            page.tokens = (random.next() & pages.all()) | uint64_t{1}
                                                              << random.below(pages.page_tokens);
        }
        if (i % 3 == 2) {
          for (PageRef& page : pages.refs)
            page.tokens = uint64_t{1} << random.below(pages.page_tokens);
        }
        if (i % 2 == 1) {
          for (PageRef& page : pages.refs) page.bias = random.below(2) ? random.uniform(0, 6) : 0;
        }
        State state(rows, dim);
        attend(*k, q.view, pages.refs.data(), n, state);
        ReferenceState want(rows, dim);
        reference::attend_pages(q.view, pages.refs.data(), n, want.o.data(), want.m.data(),
                                want.l.data());
        CAPTURE(k->name);
        CAPTURE(dim);
        CAPTURE(rows);
        CAPTURE(n);
        CHECK(worst_row(state, want) < pages_tolerance);
        CHECK(test::relative_error(state.m.data(), want.m.data(), rows) < 1e-6);
        CHECK(test::relative_error(state.l.data(), want.l.data(), rows) < 3e-6);
      }
    }
  }
}

TEST_CASE(
    "single quads, each with its own bias and some of its tokens, chosen all over the pages, are "
    "attended as the softmax over just these") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      for (uint32_t i = 0; i < 8; ++i) {
        Random random(dim * 31 + i);
        const uint32_t rows = 1 + random.below(9), n = 200, page_tokens = page_bytes / 2 / dim;
        Pages pages(dim, n, random);
        Queries q(*k, rows, dim, random,
                  random.uniform(0.01f, 1.0f) / std::sqrt(static_cast<float>(dim)));
        std::vector<PageRef> chosen;  // ascending, a page several times, as a selector's lists are
        for (const PageRef& page : pages.refs) {
          for (uint32_t first = 0; first < page_tokens; first += quad_tokens) {
            if (random.below(i % 2 == 0 ? 3 : 30) != 0) continue;
            const uint64_t some = i < 4 ? 15 : 1 + random.below(15);
            chosen.push_back({page.data, page.scales, some << first, random.uniform(0, 5)});
          }
          if (random.below(20) == 0) chosen.push_back(page);  // whole, from any place of a tile on
        }
        State state(rows, dim);
        attend(*k, q.view, chosen.data(), chosen.size(), state);
        ReferenceState want(rows, dim);
        reference::attend_pages(q.view, chosen.data(), static_cast<uint32_t>(chosen.size()),
                                want.o.data(), want.m.data(), want.l.data());
        CAPTURE(k->name);
        CAPTURE(dim);
        CAPTURE(rows);
        CAPTURE(chosen.size());
        CHECK(worst_row(state, want) < pages_tolerance);
        CHECK(test::relative_error(state.m.data(), want.m.data(), rows) < 1e-6);
        CHECK(test::relative_error(state.l.data(), want.l.data(), rows) < 3e-6);
      }
    }
  }
}

TEST_CASE("scores of tokens are the reference's, and those by which pages are attended") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      for (uint32_t i = 0; i < 10; ++i) {
        Random random(dim * 10 + i);
        const uint32_t rows = 1 + random.below(9), n = 1 + random.below(40),
                       page_tokens = page_bytes / 2 / dim;
        Pages pages(dim, n, random);
        Queries q(*k, rows, dim, random, 0.2f);
        if (i % 2 == 1)
          for (PageRef& page : pages.refs)
            page.tokens = (random.next() & pages.all()) | uint64_t{1} << random.below(page_tokens),
            page.bias = random.uniform(0, 6);
        const std::size_t count = std::size_t{n} * page_tokens, stride = count + i;
        Guarded<float> scores((rows - 1) * stride + count);
        Guarded<std::byte> scratch(k->attend_scratch(rows, dim));
        k->score_tokens(q.view, pages.refs.data(), n, scores.data(), stride, scratch.data());
        std::vector<double> want(rows * stride);
        reference::score_tokens(q.view, pages.refs.data(), n, want.data(), stride);
        State state(rows, dim);
        attend(*k, q.view, pages.refs.data(), n, state);
        CAPTURE(k->name);
        CAPTURE(dim);
        CHECK(scores.guards_intact());
        CHECK(scratch.guards_intact());
        for (std::size_t r = 0; r < rows; ++r) {
          float* row = scores.data() + r * stride;
          CHECK(*std::max_element(row, row + count) == state.m[r]);
          for (std::size_t t = 0; t < count; ++t) {
            const bool out = std::isinf(want[r * stride + t]);
            if (out != (row[t] == -std::numeric_limits<float>::infinity()))
              FAIL("token ", t, " is in where it is out, or the reverse");
            if (out) row[t] = 0, want[r * stride + t] = 0;
          }
          CHECK(test::relative_error(row, want.data() + r * stride, count) <
                test::token_score_tolerance);
        }
      }
    }
  }
}

TEST_CASE("keys that are scored one by one get the scores that their pages' tokens get") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      Random random(dim + 1);
      const uint32_t rows = 5, n = 9, page_tokens = page_bytes / 2 / dim, count = n * page_tokens;
      Pages pages(dim, n, random);
      for (PageRef& p : pages.refs) p.tokens = ~uint64_t{0};
      Queries q(*k, rows, dim, random, 0.2f);
      std::vector<float> want(rows * count);
      Guarded<std::byte> scratch(k->attend_scratch(rows, dim));
      k->score_tokens(q.view, pages.refs.data(), n, want.data(), count, scratch.data());
      for (uint32_t wanted : {1u, 7u, 16u, 33u}) {
        std::vector<KeyRef> keys;
        std::vector<uint32_t> tokens;
        for (uint32_t i = 0; i < wanted; ++i) {
          tokens.push_back(random.below(count));
          const PageRef& page = pages.refs[tokens.back() / page_tokens];
          const uint32_t t = tokens.back() % page_tokens, bits = uint32_t{page.scales[t]} << 16;
          float scale;
          std::memcpy(&scale, &bits, sizeof scale);
          keys.push_back({page.data + PageShape::of(dim).key_at(t), scale});
        }
        const std::size_t stride = wanted + 3;
        Guarded<float> scores((rows - 1) * stride + wanted);
        k->score_keys(q.view, keys.data(), wanted, PageShape::key_stride, scores.data(), stride);
        CAPTURE(k->name);
        CAPTURE(dim);
        CHECK(scores.guards_intact());
        std::vector<int8_t> copies(std::size_t{wanted} * dim);  // the same keys as rows
        std::vector<KeyRef> row_keys(keys);
        for (uint32_t i = 0; i < wanted; ++i) {
          for (uint32_t d = 0; d < dim; ++d)
            copies[i * dim + d] = keys[i].data[d / 4 * PageShape::key_stride + d % 4];
          row_keys[i].data = copies.data() + i * dim;
        }
        std::vector<float> of_rows(rows * stride);
        k->score_keys(q.view, row_keys.data(), wanted, 4, of_rows.data(), stride);
        for (uint32_t r = 0; r < rows; ++r)
          for (uint32_t i = 0; i < wanted; ++i)
            CHECK(of_rows[r * stride + i] == want[r * count + tokens[i]]);
        for (uint32_t r = 0; r < rows; ++r)
          for (uint32_t i = 0; i < wanted; ++i)
            CHECK(scores.data()[r * stride + i] == want[r * count + tokens[i]]);
      }
    }
  }
}

TEST_CASE("a page whose bias is ln n counts as n such pages") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      Random random(dim + 3);
      Pages pages(dim, 6, random);
      Queries q(*k, 3, dim, random, 0.2f);
      std::vector<PageRef> once(pages.refs), often(pages.refs);
      once[1].bias = std::log(3.0f), once[4].bias = std::log(7.0f);
      for (uint32_t i = 0; i < 6; ++i) often.push_back(pages.refs[4]);
      for (uint32_t i = 0; i < 2; ++i) often.push_back(pages.refs[1]);
      State state(3, dim);
      attend(*k, q.view, once.data(), once.size(), state);
      ReferenceState want(3, dim);
      reference::attend_pages(q.view, often.data(), static_cast<uint32_t>(often.size()),
                              want.o.data(), want.m.data(), want.l.data());
      CAPTURE(k->name);
      CAPTURE(dim);
      CHECK(worst_row(state, want) < pages_tolerance);
      for (uint32_t r = 0; r < 3; ++r)
        CHECK(static_cast<double>(state.m[r]) + std::log(static_cast<double>(state.l[r])) ==
              doctest::Approx(want.m[r] + std::log(want.l[r])).epsilon(1e-5));
    }
  }
}

TEST_CASE("a row's attention over pages does not depend on its neighbours") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      Random random(dim);
      const uint32_t rows = 9, n = 21;
      Pages pages(dim, n, random);
      Queries q(*k, rows, dim, random, 0.2f);
      State all_rows(rows, dim);
      attend(*k, q.view, pages.refs.data(), n, all_rows);
      for (uint32_t r = 0; r < rows; ++r) {
        State alone(1, dim);
        attend(*k, one_row(q.view, r), pages.refs.data(), n, alone);
        CHECK(std::memcmp(alone.o.data(), all_rows.o.data() + std::size_t{r} * dim,
                          dim * sizeof(float)) == 0);
        CHECK(alone.m[0] == all_rows.m[r]);
        CHECK(alone.l[0] == all_rows.l[r]);
      }
    }
  }
}

TEST_CASE("attention over full-precision tokens is the exact softmax, whatever the limits") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      for (uint32_t i = 0; i < 12; ++i) {
        Random random(dim * 77 + i);
        const uint32_t rows = 1 + random.below(i < 9 ? 9 : 70),
                       n = 1 + random.below(i < 6 ? 40 : 300);
        Queries q(*k, rows, dim, random,
                  random.uniform(0.1f, 2.0f) / std::sqrt(static_cast<float>(dim)));
        Guarded<float> keys(std::size_t{n} * dim), values(std::size_t{n} * dim);
        for (std::size_t j = 0; j < keys.size(); ++j) keys[j] = random.normal();
        for (std::size_t j = 0; j < values.size(); ++j) values[j] = random.normal();
        std::vector<uint32_t> limit(rows);
        for (uint32_t r = 0; r < rows; ++r)
          limit[r] = i % 3 == 0 ? random.below(n + 3) : std::min(n, n / 2 + r);
        const uint32_t* limits = i % 3 == 2 ? nullptr : limit.data();
        State state(rows, dim);
        attend(*k, q.view, keys.data(), values.data(), n, limits, state);
        ReferenceState want(rows, dim);
        reference::attend_rows(q.view, keys.data(), values.data(), n, limits, want.o.data(),
                               want.m.data(), want.l.data());
        CAPTURE(k->name);
        CAPTURE(dim);
        CAPTURE(rows);
        CAPTURE(n);
        CHECK(worst_row(state, want) < rows_tolerance);
        for (uint32_t r = 0; r < rows; ++r) {
          if (limits && limits[r] == 0) {
            CHECK(state.m[r] == -std::numeric_limits<float>::infinity());
            CHECK(state.l[r] == 0);
          } else {
            CHECK(std::fabs(double{state.m[r]} - want.m[r]) < 2e-5);
            CHECK(std::fabs(double{state.l[r]} / want.l[r] - 1) < 2e-5);
          }
        }
        for (uint32_t r = 0; r < rows; ++r) {
          State alone(1, dim);
          attend(*k, one_row(q.view, r), keys.data(), values.data(), n,
                 limits ? limits + r : nullptr, alone);
          CHECK(std::memcmp(alone.o.data(), state.o.data() + std::size_t{r} * dim,
                            dim * sizeof(float)) == 0);
          CHECK(alone.l[0] == state.l[r]);
        }
      }
    }
  }
}

TEST_CASE("attention over nothing leaves a state as it was, bit for bit") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(3);
    Pages pages(64, 5, random);
    Queries q(*k, 3, 64, random, 0.2f);
    State state(3, 64), before(3, 64);
    CHECK(state == before);
    attend(*k, q.view, nullptr, 0, state);
    attend(*k, q.view, nullptr, nullptr, 0, nullptr, state);
    CHECK(state == before);
    attend(*k, q.view, pages.refs.data(), 5, state);
    attend(*k, q.view, pages.refs.data(), 5, before);
    attend(*k, q.view, nullptr, 0, state);
    attend(*k, q.view, nullptr, nullptr, 0, nullptr, state);
    Guarded<float> some(64 * 7);
    for (std::size_t i = 0; i < some.size(); ++i) some[i] = 1;
    const uint32_t none[3] = {0, 0, 0};
    attend(*k, q.view, some.data(), some.data(), 7, none, state);
    CHECK(state == before);
  }
}

TEST_CASE("pages of zeros give the average of their values: zero") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      Random random(4);
      Pages pages(dim, 3, random);
      std::memset(pages.data.data(), 0, pages.data.size());
      std::memset(pages.scales.data(), 0, pages.scales.size() * 2);
      Queries q(*k, 2, dim, random, 1);
      State state(2, dim);
      attend(*k, q.view, pages.refs.data(), 3, state);
      for (uint32_t r = 0; r < 2; ++r) {
        CHECK(state.m[r] == 0);
        CHECK(state.l[r] == static_cast<float>(3 * pages.page_tokens));
        for (std::size_t d = 0; d < dim; ++d) CHECK(state.o[r * dim + d] == 0);
      }
    }
  }
}

TEST_CASE("equal scores give the plain average") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(8);
    Pages pages(64, 11, random);
    Queries q(*k, 5, 64, random, 0);  // zero queries: every score is 0
    State state(5, 64);
    attend(*k, q.view, pages.refs.data(), 11, state);
    ReferenceState want(5, 64);
    reference::attend_pages(q.view, pages.refs.data(), 11, want.o.data(), want.m.data(),
                            want.l.data());
    CHECK(worst_row(state, want) < 1e-3);  // the average of many is small relative to its terms
    CHECK(state.l[0] == 11 * 32);
  }
}

TEST_CASE("scores of ten thousand neither overflow nor lose the largest") {
  for (const Kernels* k : test::all_kernels()) {
    for (float size : {50.0f, 300.0f, 3000.0f}) {
      Random random(21);
      Pages pages(128, 30, random);
      Queries q(*k, 4, 128, random, size);
      State state(4, 128);
      attend(*k, q.view, pages.refs.data(), 30, state);
      ReferenceState want(4, 128);
      reference::attend_pages(q.view, pages.refs.data(), 30, want.o.data(), want.m.data(),
                              want.l.data());
      CAPTURE(k->name);
      CAPTURE(want.m[0]);
      // A score's own rounding, 2^-24 of it three times over, is an error of the weight's exponent.
      CHECK(worst_row(state, want) < pages_tolerance + want.m[0] * 4e-7);
      CHECK(test::relative_error(state.m.data(), want.m.data(), 4) < 1e-6);
    }
  }
}

TEST_CASE(
    "far apart tiles: what comes after a much larger score changes nothing, what comes before it "
    "vanishes") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(22);
    const uint32_t n = 12;
    Pages pages(64, n, random);  // 4 pages a tile
    // page 5: K scales of 16384
    for (uint32_t i = 0; i < 32; ++i) pages.scales[std::size_t{5} * 64 + i] = 0x4680;
    Queries q(*k, 2, 64, random, 1);
    State state(2, 64);
    attend(*k, q.view, pages.refs.data(), n, state);
    ReferenceState want(2, 64);
    reference::attend_pages(q.view, pages.refs.data(), n, want.o.data(), want.m.data(),
                            want.l.data());
    CHECK(worst_row(state, want) < 1e-4);
    CHECK(std::isfinite(state.l[0]));
  }
}

TEST_CASE("two parts merged are the whole, in either order; empty parts change no bit") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t dim : test::padded_dims) {
      Random random(dim + 5);
      const uint32_t rows = 3, n = 16;
      Pages pages(dim, n, random);
      Queries q(*k, rows, dim, random, 0.3f);
      ReferenceState want(rows, dim);
      reference::attend_pages(q.view, pages.refs.data(), n, want.o.data(), want.m.data(),
                              want.l.data());
      for (uint32_t cut : {0u, 5u, 16u}) {
        State first(rows, dim), second(rows, dim), other(rows, dim);
        attend(*k, q.view, pages.refs.data(), cut, first);
        attend(*k, q.view, pages.refs.data() + cut, n - cut, second);
        attend(*k, q.view, pages.refs.data(), cut, other);
        State whole(rows, dim);
        attend(*k, q.view, pages.refs.data(), n, whole);
        k->merge(first.view(), second.view(), rows, dim);
        k->merge(second.view(), other.view(), rows, dim);
        CHECK(first.guards_intact());
        CHECK(worst_row(first, want) < pages_tolerance);
        CHECK(worst_row(second, want) < pages_tolerance);
        if (cut == 0 || cut == n) {
          CHECK(first == whole);
          CHECK(second == whole);
        }
      }
      State a(rows, dim), b(rows, dim);
      k->merge(a.view(), b.view(), rows, dim);
      CHECK(a == b);
    }
  }
}

TEST_CASE("finish divides, keeps to head_dim and returns zeros for a row without tokens") {
  for (const Kernels* k : test::all_kernels()) {
    for (uint32_t head_dim : {1u, 7u, 48u, 64u}) {
      const uint32_t rows = 3, dim = 64, stride = 70;
      Random random(head_dim);
      State state(rows, dim);
      for (std::size_t i = 0; i < state.o.size(); ++i) state.o[i] = random.normal();
      for (uint32_t r = 0; r < 2; ++r) {
        state.m[r] = 1;
        state.l[r] = 2.5f + static_cast<float>(r);
      }
      Guarded<float> out(std::size_t{rows - 1} * stride + head_dim);
      k->finish(state.view(), rows, dim, head_dim, out.data(), stride);
      CHECK(out.guards_intact());
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t d = 0; d < head_dim; ++d) {
          const float want = r < 2 ? state.o[r * dim + d] / state.l[r] : 0;
          CHECK(out[r * stride + d] == doctest::Approx(want).epsilon(test::finish_tolerance));
        }
        if (r + 1 < rows) {
          // not touched
          for (std::size_t d = head_dim; d < stride; ++d) CHECK(std::isnan(out[r * stride + d]));
        }
      }
    }
  }
}

TEST_CASE("instruction sets agree on attention over pages far closer than the weights' rounding") {
  // Scores and products are the same integers everywhere. A weight's rounding may differ by one
  // step of 1/16383 where the exponentials differ in their last bits, which is rare.
  for (uint32_t dim : test::padded_dims) {
    Random random(dim);
    const uint32_t rows = 7, n = 33;
    Pages pages(dim, n, random);
    Queries q(cpu_kernels(), rows, dim, random, 0.2f);
    State first(rows, dim);
    attend(*test::all_kernels().front(), q.view, pages.refs.data(), n, first);
    ReferenceState want(rows, dim);
    for (std::size_t i = 0; i < first.o.size(); ++i) want.o[i] = double{first.o[i]};
    for (std::size_t r = 0; r < rows; ++r) {
      want.m[r] = double{first.m[r]};
      want.l[r] = double{first.l[r]};
    }
    for (const Kernels* k : test::all_kernels()) {
      State state(rows, dim);
      attend(*k, q.view, pages.refs.data(), n, state);
      CAPTURE(k->name);
      CAPTURE(dim);
      CHECK(worst_row(state, want) < 2e-5);
      for (std::size_t r = 0; r < rows; ++r) CHECK(std::fabs(state.m[r] / first.m[r] - 1) < 3e-7f);
    }
  }
}

TEST_CASE("AVX-VNNI attends pages with the bits of AVX2, AMX with those of AVX-512") {
  for (const Kernels* k : test::all_kernels()) {
    const bool tiles = std::string(k->name) == "avx512amx";
    if (!tiles && std::string(k->name).rfind("avxvnni", 0) != 0) continue;
    const Kernels* other = cpu_kernels_by_name(tiles ? "avx512vnni" : "avx2");
    for (uint32_t dim : test::padded_dims) {
      Random random(dim);
      const uint32_t rows = 7 + random.below(40), n = 21;
      Pages pages(dim, n, random);
      Queries q(*k, rows, dim, random, 0.05f);
      State state(rows, dim), want(rows, dim);
      attend(*k, q.view, pages.refs.data(), n, state);
      attend(*other, q.view, pages.refs.data(), n, want);
      CAPTURE(dim);
      CHECK(std::memcmp(state.view().o, want.view().o, rows * dim * sizeof(float)) == 0);
      CHECK(std::memcmp(state.view().m, want.view().m, rows * sizeof(float)) == 0);
      CHECK(std::memcmp(state.view().l, want.view().l, rows * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("damaged scales give wrong numbers but no wild reads") {
  for (const Kernels* k : test::all_kernels()) {
    Random random(77);
    Pages pages(64, 9, random);
    for (std::size_t i = 0; i < pages.scales.size(); ++i)
      pages.scales[i] = static_cast<uint16_t>(random.next());
    Queries q(*k, 5, 64, random, 1);
    State state(5, 64);
    attend(*k, q.view, pages.refs.data(), 9, state);
    // NaN, -inf
    for (std::size_t i = 0; i < pages.scales.size(); ++i) pages.scales[i] = i % 2 ? 0x7fc0 : 0xff80;
    state.clear();
    attend(*k, q.view, pages.refs.data(), 9, state);
    Guarded<float> out(5 * 64);
    k->finish(state.view(), 5, 64, 64, out.data(), 64);
    CHECK(out.guards_intact());
  }
}
