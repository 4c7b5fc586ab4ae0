// check-kernels: the store and the selectors' scores.
#include "check_kernels.h"
#include "store_inputs.h"

namespace kvasir::test {
namespace {

uint32_t random_head_dim(Random& random, bool random_shape, uint32_t size) {
  return random_shape && size == usual_dim ? head_dims[random.below(std::size(head_dims))] : size;
}

struct SealPage {
  SealPage(Random& random, bool random_shape, uint32_t size)
      : extent(random_head_dim(random, random_shape, size)), want(extent.shape.head_dim),
        page(random.below(extent_pages)), keys(page_bytes / 2), values(page_bytes / 2) {
    fill_random(extent.shape, random, keys);
    fill_random(extent.shape, random, values);
    want.seal(scalar(), keys, values, page);
  }
  void call(const Kernels& k) { extent.seal(k, keys, values, page); }
  // The scalar table is the oracle of the bytes; test-kernels bounds its own error.
  double error() const { return extent.guards_intact() && extent == want ? 0 : 1; }
  static constexpr double tolerance = 0;  // 1: any byte differs
  Extent extent, want;
  uint32_t page;
  Guarded<float> keys, values;
};

struct UnsealPage {
  UnsealPage(Random& random, bool random_shape, uint32_t size)
      : extent(random_head_dim(random, random_shape, size)), page(random.below(extent_pages)),
        keys(page_bytes / 2), values(page_bytes / 2) {
    fill_extent(scalar(), random, extent);
  }
  void call(const Kernels& k) {
    k.unseal_page(extent.shape, extent.page(page), extent.page_scales(page), keys.data(),
                  values.data());
  }
  double error() const {
    uint32_t different = 0;
    for (uint32_t i = 0; i < page_bytes / 2; ++i) {
      const uint32_t t = i / extent.shape.dim, d = i % extent.shape.dim;
      different += double{keys[i]} != extent.key(page, t, d);
      different += double{values[i]} != extent.value(page, t, d);
    }
    return guarded(different, keys, values);
  }
  static constexpr double tolerance = 0;  // values that differ
  Extent extent;
  uint32_t page;
  Guarded<float> keys, values;
};

struct ScoreBounds {
  ScoreBounds(Random& random, bool random_shape, uint32_t size)
      : extent(random_head_dim(random, random_shape, size)),
        rows(random_shape ? 1 + random.below(9) : 8), blocks(extent.shape.extent_blocks()),
        stride(blocks + random.below(9)), q(scalar(), rows, extent.shape.dim, random, 1),
        scores((rows - 1) * stride + blocks) {
    fill_extent(scalar(), random, extent);
  }
  void call(const Kernels& k) {
    k.score_bounds(extent.shape, q.view, extent.bounds.data(),
                   rows % 2 ? extent.bounds.data() : nullptr, scores.data(), stride);
  }
  double error() const {
    std::vector<double> want(rows * stride);
    reference::score_bounds(extent.shape, q.view, extent.bounds.data(), want.data(), stride);
    double worst = 0;
    for (std::size_t r = 0; r < rows; ++r)
      worst = std::max(
          worst, relative_error(scores.data() + r * stride, want.data() + r * stride, blocks));
    return guarded(worst, scores);
  }
  static constexpr double tolerance = summary_score_tolerance;
  Extent extent;
  uint32_t rows;
  std::size_t blocks, stride;
  Queries q;
  Guarded<float> scores;
};

struct Multiply {
  Multiply(Random& random, bool random_shape)
      : rows(random_shape ? 1 + random.below(41) : 128),
        cols(random_shape ? 16 + random.below(250) : 128), n(random_shape ? random.below(40) : 40),
        stride(cols + random.below(9)), out_stride(cols + random.below(9)),
        a(rows * (n + std::size_t{9})), b(n * stride + 1), out(rows * out_stride) {
    const bool transposed = random.below(2) != 0;
    row = transposed ? 1 : n + random.below(9);
    step = transposed ? rows : 1;
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = random.normal();
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = random.normal();
  }
  void call(const Kernels& k) {
    k.multiply(a.data(), row, step, rows, b.data(), stride, cols, n, out.data(), out_stride);
  }
  double error() const {
    std::vector<double> want(out.size());
    reference::multiply(a.data(), row, step, rows, b.data(), stride, cols, n, want.data(),
                        out_stride);
    double worst = 0;
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < out_stride; ++c) {
        const float x = out[r * out_stride + c];
        const double e = c < cols        ? std::fabs(double{x} - want[r * out_stride + c])
                         : std::isnan(x) ? 0  // poisoned as it was
                                         : std::numeric_limits<double>::infinity();
        worst = e <= worst ? worst : e;
      }
    }
    return guarded(worst, out);
  }
  static constexpr double tolerance = multiply_tolerance;
  uint32_t rows, cols, n;
  std::size_t stride, out_stride, row = 0, step = 0;
  Guarded<float> a, b, out;
};

struct SealSketch {
  SealSketch(Random& random, bool random_shape, uint32_t size)
      : extent(random_head_dim(random, random_shape, size)), page(random.below(extent_pages)),
        basis(std::size_t{extent.shape.dim} * extent.shape.sketch_dim()),
        sketch(extent.shape.sketch_bytes()) {
    fill_extent(scalar(), random, extent);
    for (std::size_t i = 0; i < basis.size(); ++i)
      basis[i] = random.normal() / std::sqrt(static_cast<float>(extent.shape.dim));
    std::memset(sketch.data(), 0, sketch.size());
  }
  void call(const Kernels& k) {
    k.seal_sketch(extent.shape, basis.data(), extent.page(page), extent.page_scales(page), page,
                  sketch.data());
  }
  // In steps of a quad, a seventh of its largest value.
  double error() const {
    const PageShape& shape = extent.shape;
    double worst = 0;
    for (uint32_t quad = 0; quad < shape.page_quads(); ++quad)
      worst = std::max(worst, sketch_error(extent, basis, sketch.data(), page, quad));
    return guarded(worst, sketch);
  }
  static constexpr double tolerance = sketch_tolerance;
  Extent extent;
  uint32_t page;
  Guarded<float> basis;
  Guarded<int8_t> sketch;
};

struct ScoreSketch {
  ScoreSketch(Random& random, bool random_shape, uint32_t size)
      : shape(PageShape::of(random_head_dim(random, random_shape, size))),
        rows(random_shape ? 1 + random.below(40) : 24), quads(shape.extent_quads()),
        stride(quads + random.below(9)), sketch(shape.sketch_bytes()),
        q(std::size_t{rows} * shape.sketch_dim()), q_scale(rows),
        scores((rows - 1) * stride + quads) {
    fill_sketch(shape, random, sketch);
    for (std::size_t i = 0; i < q.size(); ++i)
      q[i] = static_cast<int8_t>(static_cast<int>(random.below(255)) - 127);
    for (uint32_t r = 0; r < rows; ++r) q_scale[r] = random.uniform(0, 1);
  }
  void call(const Kernels& k) {
    k.score_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(),
                   rows % 2 ? sketch.data() : nullptr, scores.data(), stride);
  }
  double error() const {
    std::vector<double> want(rows * stride);
    reference::score_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(), want.data(),
                            stride);
    double worst = 0;
    for (std::size_t r = 0; r < rows; ++r)
      worst = std::max(worst,
                       relative_error(scores.data() + r * stride, want.data() + r * stride, quads));
    return guarded(worst, scores);
  }
  static constexpr double tolerance = summary_score_tolerance;
  PageShape shape;
  uint32_t rows;
  std::size_t quads, stride;
  Guarded<int8_t> sketch, q;
  Guarded<float> q_scale, scores;
};

struct RaiseBySketch {
  RaiseBySketch(Random& random, bool random_shape, uint32_t size)
      : shape(PageShape::of(random_head_dim(random, random_shape, size))),
        rows(random_shape ? 1 + random.below(40) : 64), quads(shape.extent_quads()),
        first(random_shape ? random.below(quads) : 0),
        end(random_shape ? first + 1 + random.below(quads - first) : quads),
        tiles((end + tile_blocks - 1) / tile_blocks), stride(tiles + random.below(9)),
        sketch(shape.sketch_bytes()), q(std::size_t{rows} * shape.sketch_dim()), q_scale(rows),
        known((rows - 1) * stride + tiles), scores(known.size()) {
    fill_sketch(shape, random, sketch);
    for (std::size_t i = 0; i < q.size(); ++i)
      q[i] = static_cast<int8_t>(static_cast<int>(random.below(255)) - 127);
    for (uint32_t r = 0; r < rows; ++r) q_scale[r] = random.uniform(0, 1);
    for (float& x : known)
      x = random.below(3) ? -std::numeric_limits<float>::infinity() : 1e3f * random.normal();
  }
  void call(const Kernels& k) {
    std::copy(known.begin(), known.end(), scores.data());
    k.raise_by_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(),
                      rows % 2 ? sketch.data() : nullptr, first, end, scores.data(), stride);
  }
  double error() const {
    std::vector<double> of_quads(std::size_t{rows} * quads), want(known.begin(), known.end());
    reference::score_sketch(shape, rows, q.data(), q_scale.data(), sketch.data(), of_quads.data(),
                            quads);
    for (std::size_t r = 0; r < rows; ++r)
      for (uint32_t i = first; i < end; ++i) {
        double& best = want[r * stride + i / tile_blocks];
        best = std::max(best, of_quads[r * quads + i]);
      }
    double worst = 0;
    for (std::size_t i = 0; i < want.size(); ++i)
      if (double{scores[i]} != want[i])  // infinities may be equal
        worst = std::max(worst, relative_error(&scores[i], &want[i], 1));
    return guarded(worst, scores);
  }
  static constexpr double tolerance = summary_score_tolerance;
  PageShape shape;
  uint32_t rows, quads, first, end, tiles;
  std::size_t stride;
  Guarded<int8_t> sketch, q;
  Guarded<float> q_scale;
  std::vector<float> known;
  Guarded<float> scores;
};

struct AttentionShares {
  AttentionShares(Random& random, bool random_shape)
      : n(random_shape ? 1 + random.below(3000) : 4096),
        rows(random_shape ? 1 + random.below(5) : 4), stride(n + random.below(9)),
        scores((rows - 1) * stride + n), shares(scores.size()) {
    const float spread = random.below(3) == 0 ? 40 : 3;
    for (std::size_t i = 0; i < scores.size(); ++i)
      scores[i] =
          random.below(9) == 0 ? -std::numeric_limits<float>::infinity() : spread * random.normal();
    for (uint32_t r = 0; r < rows; ++r) {
      const bool none = random.below(5) == 0;
      m.push_back(none ? -std::numeric_limits<float>::infinity() : spread * random.normal());
      l.push_back(none ? 0 : random.uniform(1, 90));
    }
  }
  void call(const Kernels& k) {
    std::memcpy(shares.data(), scores.data(), scores.size() * sizeof(float));
    k.attention_shares(shares.data(), rows, stride, n, m.data(), l.data());
  }
  // per row, whose shares sum to at most 1
  double error() const {
    std::vector<double> want(n), of_row(n);
    for (uint32_t r = 0; r < rows; ++r) {
      reference::attention_shares(scores.data() + r * stride, n, m[r], l[r], of_row.data());
      for (uint32_t i = 0; i < n; ++i) want[i] += of_row[i];
    }
    double difference = 0;
    for (uint32_t i = 0; i < n; ++i) difference += std::fabs(double{shares[i]} - want[i]);
    return guarded(difference / rows, shares);
  }
  static constexpr double tolerance = shares_tolerance;
  uint32_t n, rows;
  std::size_t stride;
  Guarded<float> scores, shares;
  std::vector<float> m, l;
};

// Shares, some of them zero or NaN, and a threshold among them.
struct Shares {
  Shares(Random& random, bool random_shape)
      : n(random_shape ? 1 + random.below(10007) : 4096), shares(n),
        threshold(std::exp(random.uniform(-14, 0))) {
    for (std::size_t i = 0; i < n; ++i)
      shares[i] = i % 5 == 0 ? 0 : std::exp(random.uniform(-30, 2));
    if (n > 40) shares[7] = shares[n - 1] = std::nanf("");
  }
  uint32_t n;
  Guarded<float> shares;
  float threshold;
};

struct SumShares : Shares {
  using Shares::Shares;
  void call(const Kernels& k) { got = k.sum_shares(shares.data(), n, threshold); }
  double error() const {
    const ShareSums want = share_sums(shares.data(), n, threshold);
    if (got.at_least != want.at_least) return std::numeric_limits<double>::infinity();
    return std::max(relative_error(&got.below, &want.below, 1),
                    relative_error(&got.squares, &want.squares, 1));
  }
  static constexpr double tolerance = share_sums_tolerance;
  ShareSums got{};
};

struct Sample : Shares {
  Sample(Random& random, bool random_shape)
      : Shares(random, random_shape), first(random.below(1u << 20)),
        seed(static_cast<uint32_t>(random.next())), taken(n) {}
  void call(const Kernels& k) {
    count = k.sample(shares.data(), n, first, seed, threshold, taken.data());
  }
  double error() const {
    const uint32_t wrong =
        wrong_samples(shares.data(), n, first, seed, threshold, taken.data(), count);
    return guarded(count <= n ? wrong : n, taken);
  }
  static constexpr double tolerance = 0;  // samples that are wrong
  uint32_t first, seed, count = 0;
  Guarded<uint32_t> taken;
};

struct TopK {
  TopK(Random& random, bool random_shape)
      : n(random_shape ? 1 + random.below(17000) : 8192),
        wanted(random_shape ? random.below(n + 1) : n / 50), scores(n), out(wanted),
        scratch(std::size_t{n} * 4) {
    const bool ties = random.below(2) != 0;
    for (std::size_t i = 0; i < n; ++i)
      scores[i] = ties ? static_cast<float>(random.below(5)) - 2 : random.normal();
  }
  void call(const Kernels& k) {
    found = k.top_k(scores.data(), n, wanted, out.data(), scratch.data());
  }
  double error() const {
    std::vector<uint32_t> want(wanted);
    const uint32_t expected = reference::top_k(scores.data(), n, wanted, want.data());
    uint32_t different = found != expected;
    for (uint32_t i = 0; i < expected; ++i) different += out[i] != want[i];
    return guarded(different, out, scratch);
  }
  static constexpr double tolerance = 0;  // indices that differ
  uint32_t n, wanted, found = 0;
  Guarded<float> scores;
  Guarded<uint32_t> out;
  Guarded<std::byte> scratch;
};

}  // namespace

void check_seal_page(Check& check) { run_sizes<SealPage>(check); }
void check_unseal_page(Check& check) { run_sizes<UnsealPage>(check); }
void check_score_bounds(Check& check) { run_sizes<ScoreBounds>(check); }
void check_multiply(Check& check) { check.run<Multiply>(""); }
void check_seal_sketch(Check& check) { run_sizes<SealSketch>(check); }
void check_score_sketch(Check& check) { run_sizes<ScoreSketch>(check); }
void check_raise_by_sketch(Check& check) { run_sizes<RaiseBySketch>(check); }
void check_attention_shares(Check& check) { check.run<AttentionShares>(""); }
void check_sum_shares(Check& check) { check.run<SumShares>(""); }
void check_sample(Check& check) { check.run<Sample>(""); }
void check_top_k(Check& check) { check.run<TopK>(""); }

}  // namespace kvasir::test
