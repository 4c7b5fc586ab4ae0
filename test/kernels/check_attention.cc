// check-kernels: attention.
#include <memory>

#include "attention_inputs.h"
#include "check_kernels.h"

namespace kvasir::test {
namespace {

uint32_t random_dim(Random& random, bool random_shape, uint32_t size) {
  return random_shape && size == usual_dim ? padded_dims[random.below(std::size(padded_dims))]
                                           : size;
}

// Standard deviation of the queries' elements that gives scores of magnitude `size`.
float query_size(float size, uint32_t dim) { return size / std::sqrt(static_cast<float>(dim)); }

struct QuantizeQueries {
  QuantizeQueries(Random& random, bool random_shape, uint32_t size)
      : dim(random_dim(random, random_shape, size)), rows(random_shape ? 1 + random.below(9) : 8),
        f32(std::size_t{rows} * dim), q(f32.size()), split(2 * f32.size()), scale(rows) {
    for (std::size_t i = 0; i < f32.size(); ++i) f32[i] = random.normal();
  }
  void call(const Kernels& k) {
    k.quantize_queries(f32.data(), rows, dim, q.data(), split.data(), scale.data());
  }
  // in steps of the scale
  double error() const {
    double worst = 0;
    for (std::size_t i = 0; i < f32.size(); ++i) {
      const std::size_t r = i / dim, at = r * 2 * dim + i % dim;
      const double step{scale[r]}, e = std::fabs(double{f32[i]} / step - static_cast<double>(q[i]));
      worst = e <= worst ? worst : e;
      if (q[i] != split[at] + split[at + dim] || split[at] < 0 || split[at + dim] > 0)
        return std::numeric_limits<double>::infinity();
    }
    return guarded(worst, q, split, scale);
  }
  static constexpr double tolerance = query_tolerance;
  uint32_t dim, rows;
  Guarded<float> f32;
  Guarded<int8_t> q, split;
  Guarded<float> scale;
};

// Queries over random pages; of the random shapes, two of three attend parts of pages with biases.
struct OverPages {
  OverPages(Random& random, bool random_shape, uint32_t size)
      : dim(random_dim(random, random_shape, size)), rows(random_shape ? 1 + random.below(40) : 32),
        pages(dim, random_shape ? 1 + random.below(40) : 64, random),
        q(scalar(), rows, dim, random, query_size(random.uniform(0.01f, 1.5f), dim)) {
    if (!random_shape || random.below(3) == 0) return;
    for (PageRef& page : pages.refs) {
      const uint64_t one = uint64_t{1} << random.below(pages.page_tokens);
      page.tokens = (random.next() & pages.all()) | one;
      page.bias = random.below(2) ? random.uniform(0, 6) : 0;
    }
  }
  uint32_t n() const { return static_cast<uint32_t>(pages.refs.size()); }
  // Scratch memory of exactly the size that the table asks for.
  std::byte* scratch_of(const Kernels& k) {
    const std::size_t bytes = k.attend_scratch(rows, dim);
    if (!scratch || scratch->size() != bytes) scratch = std::make_unique<Guarded<std::byte>>(bytes);
    return scratch->data();
  }
  uint32_t dim, rows;
  Pages pages;
  Queries q;
  std::unique_ptr<Guarded<std::byte>> scratch;
};

struct AttendPages : OverPages {
  AttendPages(Random& random, bool random_shape, uint32_t size)
      : OverPages(random, random_shape, size), state(rows, dim) {}
  void call(const Kernels& k) {
    state.clear();
    k.attend_pages(q.view, pages.refs.data(), n(), state.view(), scratch_of(k));
  }
  double error() const {
    ReferenceState want(rows, dim);
    reference::attend_pages(q.view, pages.refs.data(), n(), want.o.data(), want.m.data(),
                            want.l.data());
    return guarded(worst_row(state, want), state, *scratch);
  }
  static constexpr double tolerance = pages_tolerance;
  State state;
};

struct ScoreTokens : OverPages {
  ScoreTokens(Random& random, bool random_shape, uint32_t size)
      : OverPages(random, random_shape, size), count(std::size_t{n()} * pages.page_tokens),
        stride(count + random.below(9)), scores((rows - 1) * stride + count) {}
  void call(const Kernels& k) {
    k.score_tokens(q.view, pages.refs.data(), n(), scores.data(), stride, scratch_of(k));
  }
  double error() const {
    std::vector<double> want(rows * stride), got(rows * count), expected(rows * count);
    reference::score_tokens(q.view, pages.refs.data(), n(), want.data(), stride);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t t = 0; t < count; ++t) {
        const double a{scores[r * stride + t]}, b = want[r * stride + t];
        const bool skipped = std::isinf(b) && a == b;  // takes no part
        got[r * count + t] = skipped ? 0 : a;
        expected[r * count + t] = skipped ? 0 : b;
      }
    }
    return guarded(relative_error(got.data(), expected.data(), got.size()), scores, *scratch);
  }
  static constexpr double tolerance = token_score_tolerance;
  std::size_t count, stride;
  Guarded<float> scores;
};

// The best scores of blocks, the last of which may have fewer pages.
struct RaiseByPages : OverPages {
  RaiseByPages(Random& random, bool random_shape, uint32_t size)
      : OverPages(random, random_shape, size), block_pages(64 / pages.page_tokens),
        blocks((n() + block_pages - 1) / block_pages), stride(blocks + random.below(9)),
        known((rows - 1) * stride + blocks), scores(known.size()) {
    for (PageRef& page : pages.refs) page.tokens = pages.all(), page.bias = 0;
    for (float& x : known)
      x = random.below(3) ? -std::numeric_limits<float>::infinity() : random.normal();
  }
  void call(const Kernels& k) {
    std::copy(known.begin(), known.end(), scores.data());
    k.raise_by_pages(q.view, pages.refs.data(), n(), block_pages, scores.data(), stride,
                     scratch_of(k));
  }
  double error() const {
    const std::size_t all = std::size_t{n()} * pages.page_tokens;
    std::vector<double> of_tokens(rows * all), want(known.begin(), known.end()), got(known.size());
    reference::score_tokens(q.view, pages.refs.data(), n(), of_tokens.data(), all);
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t t = 0; t < all; ++t) {
        double& best = want[r * stride + t / 64];
        best = std::max(best, of_tokens[r * all + t]);
      }
    for (std::size_t i = 0; i < want.size(); ++i) {
      got[i] = double{scores[i]};
      if (std::isinf(want[i]) && got[i] == want[i]) want[i] = got[i] = 0;  // between the rows
    }
    return guarded(relative_error(got.data(), want.data(), got.size()), scores, *scratch);
  }
  static constexpr double tolerance = token_score_tolerance;
  uint32_t block_pages, blocks;
  std::size_t stride;
  std::vector<float> known;
  Guarded<float> scores;
};

// Keys one by one, whose scores are those of whole pages, bit for bit.
struct ScoreKeys : OverPages {
  ScoreKeys(Random& random, bool random_shape, uint32_t size)
      : OverPages(random, random_shape, size), count(random_shape ? 1 + random.below(70) : 256),
        stride(count + random.below(9)), scores((rows - 1) * stride + count) {
    for (PageRef& page : pages.refs) page.tokens = pages.all(), page.bias = 0;
    for (uint32_t i = 0; i < count; ++i) {
      tokens.push_back(random.below(n() * pages.page_tokens));
      const PageRef& page = pages.refs[tokens[i] / pages.page_tokens];
      const uint32_t t = tokens[i] % pages.page_tokens, bits = uint32_t{page.scales[t]} << 16;
      float scale;
      std::memcpy(&scale, &bits, sizeof scale);
      keys.push_back({page.data + PageShape::of(dim).key_at(t), scale});
    }
  }
  void call(const Kernels& k) {
    k.score_keys(q.view, keys.data(), count, PageShape::key_stride, scores.data(), stride);
  }
  double error() const {
    const std::size_t all = std::size_t{n()} * pages.page_tokens;
    std::vector<double> want(rows * all), got(rows * count), expected(rows * count);
    reference::score_tokens(q.view, pages.refs.data(), n(), want.data(), all);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t i = 0; i < count; ++i) {
        got[r * count + i] = double{scores[r * stride + i]};
        expected[r * count + i] = want[r * all + tokens[i]];
      }
    }
    return guarded(relative_error(got.data(), expected.data(), got.size()), scores);
  }
  static constexpr double tolerance = token_score_tolerance;
  uint32_t count, stride;
  Guarded<float> scores;
  std::vector<uint32_t> tokens;
  std::vector<KeyRef> keys;
};

struct AttendRows {
  AttendRows(Random& random, bool random_shape, uint32_t size)
      : dim(random_dim(random, random_shape, size)), rows(random_shape ? 1 + random.below(40) : 8),
        n(random_shape ? 1 + random.below(300) : 256),
        q(scalar(), rows, dim, random, query_size(random.uniform(0.1f, 2.0f), dim)),
        keys(std::size_t{n} * dim), values(keys.size()), state(rows, dim) {
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = random.normal();
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal();
    for (uint32_t r = 0; r < rows && random_shape; ++r) limit.push_back(random.below(n + 3));
  }
  const uint32_t* limits() const { return limit.empty() ? nullptr : limit.data(); }
  void call(const Kernels& k) {
    const std::size_t bytes = k.attend_scratch(rows, dim);
    if (!scratch || scratch->size() != bytes) scratch = std::make_unique<Guarded<std::byte>>(bytes);
    state.clear();
    k.attend_rows(q.view, keys.data(), values.data(), n, limits(), state.view(), scratch->data());
  }
  double error() const {
    ReferenceState want(rows, dim);
    reference::attend_rows(q.view, keys.data(), values.data(), n, limits(), want.o.data(),
                           want.m.data(), want.l.data());
    return guarded(worst_row(state, want), state, *scratch);
  }
  static constexpr double tolerance = rows_tolerance;
  uint32_t dim, rows, n;
  Queries q;
  Guarded<float> keys, values;
  std::vector<uint32_t> limit;
  State state;
  std::unique_ptr<Guarded<std::byte>> scratch;
};

// Random states, some of them empty.
struct States {
  States(Random& random, bool random_shape, uint32_t size)
      : dim(random_dim(random, random_shape, size)), rows(random_shape ? 1 + random.below(9) : 8) {}
  void fill(State& state, Random& random, bool may_be_empty) const {
    for (std::size_t i = 0; i < state.o.size(); ++i) state.o[i] = random.normal();
    for (std::size_t r = 0; r < rows; ++r) {
      state.m[r] = random.uniform(-9, 9);
      state.l[r] = random.uniform(1, 50);
      if (!may_be_empty || random.below(4) != 0) continue;
      state.m[r] = -std::numeric_limits<float>::infinity();
      state.l[r] = 0;
      for (std::size_t d = 0; d < dim; ++d) state.o[r * dim + d] = 0;
    }
  }
  uint32_t dim, rows;
};

struct Merge : States {
  Merge(Random& random, bool random_shape, uint32_t size)
      : States(random, random_shape, size), a(rows, dim), b(rows, dim), merged(rows, dim) {
    fill(a, random, random_shape);
    fill(b, random, random_shape);
  }
  void call(const Kernels& k) {
    std::memcpy(merged.o.data(), a.o.data(), a.o.size() * sizeof(float));
    std::memcpy(merged.m.data(), a.m.data(), rows * sizeof(float));
    std::memcpy(merged.l.data(), a.l.data(), rows * sizeof(float));
    k.merge(merged.view(), b.view(), rows, dim);
  }
  double error() const {
    ReferenceState want(rows, dim);
    for (std::size_t r = 0; r < rows; ++r) {
      const double m = std::max(double{a.m[r]}, double{b.m[r]});
      const double of_a = a.l[r] > 0 ? std::exp(double{a.m[r]} - m) : 0;
      const double of_b = b.l[r] > 0 ? std::exp(double{b.m[r]} - m) : 0;
      want.m[r] = m;
      want.l[r] = double{a.l[r]} * of_a + double{b.l[r]} * of_b;
      for (std::size_t i = r * dim; i < (r + 1) * dim; ++i)
        want.o[i] = double{a.o[i]} * of_a + double{b.o[i]} * of_b;
    }
    return guarded(worst_row(merged, want), merged, b);
  }
  static constexpr double tolerance = merge_tolerance;
  State a, b, merged;
};

struct Finish : States {
  Finish(Random& random, bool random_shape, uint32_t size)
      : States(random, random_shape, size), head_dim(random_shape ? 1 + random.below(dim) : dim),
        stride(head_dim + random.below(9)), state(rows, dim), out((rows - 1) * stride + head_dim) {
    fill(state, random, random_shape);
  }
  void call(const Kernels& k) { k.finish(state.view(), rows, dim, head_dim, out.data(), stride); }
  double error() const {
    std::vector<double> got, want;
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t d = 0; d < head_dim; ++d) {
        got.push_back(double{out[r * stride + d]});
        const double l{state.l[r]};
        want.push_back(l > 0 ? double{state.o[r * dim + d]} / l : 0);
      }
    }
    return guarded(relative_error(got.data(), want.data(), got.size()), out);
  }
  static constexpr double tolerance = finish_tolerance;
  uint32_t head_dim;
  std::size_t stride;
  State state;
  Guarded<float> out;
};

}  // namespace

void check_quantize_queries(Check& check) { run_sizes<QuantizeQueries>(check); }
void check_attend_pages(Check& check) { run_sizes<AttendPages>(check); }
void check_score_tokens(Check& check) { run_sizes<ScoreTokens>(check); }
void check_raise_by_pages(Check& check) { run_sizes<RaiseByPages>(check); }
void check_score_keys(Check& check) { run_sizes<ScoreKeys>(check); }
void check_attend_rows(Check& check) { run_sizes<AttendRows>(check); }
void check_merge(Check& check) { run_sizes<Merge>(check); }
void check_finish(Check& check) { run_sizes<Finish>(check); }

}  // namespace kvasir::test
