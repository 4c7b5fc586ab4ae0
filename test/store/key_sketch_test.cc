// The sketch of keys: its scores, its updates with the pages, in forks and in files.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "cache_samples.h"
#include "pool.h"
#include "replacing.h"
#include "store/key_sketch.h"
#include "temp_folder.h"

using namespace kvasir;
using kvasir::test::pool;

namespace {

constexpr uint32_t layers = 2, heads = 2, head_dim = 64;
const StoreShape shape{layers, heads, PageShape::of(head_dim)};
constexpr uint32_t sketch_page_tokens = 32;

// Keys whose directions have very different sizes, as trained models' have.
void seal_pages(PageStore* store, uint32_t count, uint32_t seed) {
  const uint32_t first = store->pages(), dim = shape.page.dim;
  REQUIRE(store->reserve(first + count).ok());
  Array<float> k(sketch_page_tokens * dim), v(sketch_page_tokens * dim);
  for (uint32_t l = 0; l < layers; ++l)
    for (uint32_t h = 0; h < heads; ++h)
      for (uint32_t p = first; p < first + count; ++p) {
        std::mt19937 random(seed * 7919 + p * 31 + l * 5 + h);
        std::normal_distribution<float> normal;
        for (uint32_t i = 0; i < sketch_page_tokens * dim; ++i) {
          k[i] = normal(random) * std::exp(-0.08f * static_cast<float>((i % dim + 11 * h) % dim));
          v[i] = normal(random);
        }
        store->seal(cpu_kernels(), l, h, p, k.data(), v.data());
      }
  store->commit(first + count);
}

std::vector<int8_t> contents(const KeySketch& s) {
  std::vector<int8_t> out;
  const uint32_t extents = (s.pages() + extent_pages - 1) / extent_pages;
  for (uint32_t l = 0; l < layers; ++l)
    for (uint32_t h = 0; h < heads; ++h) {
      for (uint32_t e = 0; e < extents; ++e)
        out.insert(out.end(), s.extent(l, h, e), s.extent(l, h, e) + shape.page.sketch_bytes());
      const auto* basis = reinterpret_cast<const int8_t*>(s.query_basis(l, h));
      out.insert(out.end(), basis,
                 basis + shape.page.dim * shape.page.sketch_dim() * sizeof(float));
    }
  return out;
}

// The correlation of estimated and exact best scores of all quads, for random queries, whose
// coordinates are weighed where weights are given.
double agreement(const KeySketch& sketch, const PageStore& pages, uint32_t layer, uint32_t head,
                 const std::vector<float>& weights = {}) {
  const uint32_t dim = shape.page.dim, n = shape.page.sketch_dim();
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  double xy = 0, xx = 0, yy = 0, x1 = 0, y1 = 0, count = 0;
  for (uint32_t query = 0; query < 8; ++query) {
    Array<float> q(dim), low(n);
    for (float& x : q) x = normal(random);
    for (uint32_t d = 0; d < weights.size(); ++d) q[d] *= weights[d];
    for (uint32_t d = 0; d < dim; ++d)
      for (uint32_t c = 0; c < n; ++c) low[c] += q[d] * sketch.query_basis(layer, head)[d * n + c];
    float largest = 0;
    for (float x : low) largest = std::max(largest, std::fabs(x));
    Array<int8_t> low8(n);
    for (uint32_t c = 0; c < n; ++c)
      low8[c] = static_cast<int8_t>(std::lrint(low[c] * 127 / largest));
    const float scale = largest / 127;
    for (uint32_t e = 0; e < pages.extents(); ++e) {
      Array<float> scores(shape.page.extent_quads());
      cpu_kernels().score_sketch(shape.page, 1, low8.data(), &scale, sketch.extent(layer, head, e),
                                 nullptr, scores.data(), scores.size());
      for (uint32_t b = 0; b < scores.size(); ++b) {
        const uint32_t p = e * extent_pages + b / shape.page.page_quads();
        if (p >= pages.pages()) continue;
        const PageRef ref = pages.page(layer, head, p);
        Array<float> k(sketch_page_tokens * dim), v(sketch_page_tokens * dim);
        cpu_kernels().unseal_page(shape.page, ref.data, ref.scales, k.data(), v.data());
        double best = -1e30;
        for (uint32_t t = 0; t < quad_tokens; ++t) {
          double s = 0;
          for (uint32_t d = 0; d < dim; ++d)
            s += static_cast<double>(q[d] *
                                     k[(b % shape.page.page_quads() * quad_tokens + t) * dim + d]);
          best = std::max(best, s);
        }
        const auto x = static_cast<double>(scores[b]);
        xy += x * best, xx += x * x, yy += best * best, x1 += x, y1 += best, ++count;
      }
    }
  }
  return (xy - x1 * y1 / count) / std::sqrt((xx - x1 * x1 / count) * (yy - y1 * y1 / count));
}

// Appends what is written to `out`.
auto into(std::vector<uint8_t>* out) {
  return [out](const void* data, std::size_t size) {
    out->insert(out->end(), static_cast<const uint8_t*>(data),
                static_cast<const uint8_t*>(data) + size);
    return Status();
  };
}

// A section in a file, mapped for a store of so many pages.
Status map_section(const TempFolder& folder, const std::vector<uint8_t>& section, uint32_t pages,
                   KeySketch* out) {
  const std::string path = folder.file("a.kv");
  if (Status s =
          samples::save(path, {{samples::SectionKind::sketch, KeySketch::section_version, section}},
                        pages * sketch_page_tokens);
      !s.ok())
    return s;
  std::shared_ptr<const CacheFile> file;
  if (Status s = CacheFile::open(path, &file); !s.ok()) return s;
  return KeySketch::map(shape, std::move(file), pages, nullptr, nullptr, out);
}

}  // namespace

TEST_CASE("a sketch's estimates go with the exact scores") {
  PageStore pages(shape);
  seal_pages(&pages, 40, 1);
  KeySketch sketch(shape);
  CHECK_FALSE(sketch.built());
  REQUIRE(sketch.build(pages, nullptr, cpu_kernels(), &pool(), nullptr).ok());
  CHECK(sketch.pages() == 40);
  CHECK(sketch.built_pages() == 40);
  for (uint32_t l = 0; l < layers; ++l)
    for (uint32_t h = 0; h < heads; ++h) CHECK(agreement(sketch, pages, l, h) > 0.9);
}

TEST_CASE("known queries turn the sketch to the directions that they look at") {
  // Queries that look at twelve directions, of which the leading components of the keys alone have
  // four.
  PageStore pages(shape);
  seal_pages(&pages, 40, 1);
  constexpr uint32_t dim = 64, first = 20, looked_at = 12;
  const auto direction = [](uint32_t head, uint32_t i) {
    return (first + i + dim - 11 * head) % dim;
  };
  const KeySketch::QueryMoment asked = [&](uint32_t, uint32_t head, double* moment) {
    for (uint32_t i = 0; i < looked_at; ++i) moment[direction(head, i) * (dim + 1)] += 3;
  };
  KeySketch plain(shape), turned(shape);
  REQUIRE(plain.build(pages, nullptr, cpu_kernels(), &pool(), nullptr).ok());
  REQUIRE(turned.build(pages, asked, cpu_kernels(), &pool(), nullptr).ok());
  for (uint32_t l = 0; l < layers; ++l)
    for (uint32_t h = 0; h < heads; ++h) {
      std::vector<float> weights(dim);
      for (uint32_t i = 0; i < looked_at; ++i) weights[direction(h, i)] = 1;
      CHECK(agreement(turned, pages, l, h, weights) > agreement(plain, pages, l, h, weights) + 0.1);
      // and queries that nobody knew are still served
      CHECK(agreement(turned, pages, l, h) > 0.85);
    }
}

TEST_CASE("the first coordinates of a sketch say most") {
  PageStore pages(shape);
  seal_pages(&pages, 64, 1);
  KeySketch sketch(shape);
  REQUIRE(sketch.build(pages, nullptr, cpu_kernels(), &pool(), nullptr).ok());
  const uint32_t dim = shape.page.dim, n = shape.page.sketch_dim();
  for (uint32_t l = 0; l < layers; ++l)
    for (uint32_t h = 0; h < heads; ++h)
      for (uint32_t c = 0; c < n; ++c) {
        // Channels are independent, so that coordinate c is the one with the c-th largest variance:
        // but the next one's is 1.17 times smaller, and a sample's moment mixes neighbours.
        const float* basis = sketch.query_basis(l, h);
        double near = 0, all = 0;
        for (uint32_t d = 0; d < dim; ++d) {
          const double square = std::pow(static_cast<double>(basis[d * n + c]), 2);
          const uint32_t rank = (d + 11 * h) % dim;
          all += square, near += rank + 6 >= c && rank <= c + 6 ? square : 0;
        }
        CHECK(near > 0.9 * all);
      }
}

TEST_CASE("a sketch is the same on any number of threads") {
  PageStore pages(shape);
  seal_pages(&pages, 20, 2);
  KeySketch one(shape), two(shape);
  REQUIRE(one.build(pages, nullptr, cpu_kernels(), &pool(1), nullptr).ok());
  REQUIRE(two.build(pages, nullptr, cpu_kernels(), &pool(2), nullptr).ok());
  CHECK(contents(one) == contents(two));
}

TEST_CASE("a sketch that is found layer by layer is the one that is found at once") {
  PageStore pages(shape);
  seal_pages(&pages, 70, 4);
  KeySketch at_once(shape), by_layer(shape);
  REQUIRE(at_once.build(pages, nullptr, cpu_kernels(), &pool(2), nullptr).ok());
  KeySketch::Build build;
  by_layer.begin(&build);
  for (uint32_t l = 0; l < layers; ++l) {
    CHECK_FALSE(build.complete());
    by_layer.add_layer(pages, 70, l, nullptr, cpu_kernels(), &pool(2), nullptr, &build);
  }
  REQUIRE(build.complete());
  REQUIRE(by_layer.take(pages, cpu_kernels(), &pool(2), nullptr, std::move(build)));
  CHECK(contents(by_layer) == contents(at_once));
  CHECK(by_layer.built_pages() == 70);
  Cancel cancel;
  cancel.fire();
  by_layer.begin(&build);
  for (uint32_t l = 0; l < layers; ++l)
    by_layer.add_layer(pages, 70, l, nullptr, cpu_kernels(), &pool(2), &cancel, &build);
  CHECK_FALSE(build.complete());
  CHECK_FALSE(by_layer.take(pages, cpu_kernels(), &pool(2), nullptr, std::move(build)));
  CHECK(contents(by_layer) == contents(at_once));
}

TEST_CASE("a long layer gets its sketch in parts, and no call covers much more than one") {
  constexpr uint32_t all = 2600, part = all / 4;
  PageStore pages(shape);
  seal_pages(&pages, all, 4);
  KeySketch at_once(shape), in_parts(shape);
  REQUIRE(at_once.build(pages, nullptr, cpu_kernels(), &pool(2), nullptr).ok());
  KeySketch::Build build;
  in_parts.begin(&build);
  build.begin_step(1);
  const auto add_all = [&] {
    for (uint32_t l = 0; l < layers; ++l)
      in_parts.add_layer(pages, all, l, nullptr, cpu_kernels(), &pool(2), nullptr, &build);
  };
  const auto sum = [&] {
    return std::accumulate(build.covered().begin(), build.covered().end(), 0u);
  };
  add_all();
  build.stop_covering();
  const uint32_t stopped = sum();
  in_parts.cover_next(pages, all, cpu_kernels(), &pool(2), nullptr, &build);
  CHECK(sum() == stopped);
  CHECK(sum() <= layers * part);
  build.begin_step(1);
  add_all();
  uint32_t calls = 0;
  for (uint32_t before; sum() < layers * all && calls < 100; ++calls) {
    before = sum();
    in_parts.cover_next(pages, all, cpu_kernels(), &pool(2), nullptr, &build);
    CHECK(sum() > before);
    CHECK(sum() <= before + part);
  }
  CHECK(sum() == layers * all);
  CHECK(calls <= 4 * layers + 1);
  REQUIRE(in_parts.take(pages, cpu_kernels(), &pool(2), nullptr, std::move(build)));
  CHECK(contents(in_parts) == contents(at_once));
}

TEST_CASE("a sketch that is found in several steps has the bases of each step's pages") {
  constexpr uint32_t all_layers = 20, all_heads = 16, steps = 3;  // each layer is a group
  const StoreShape many{all_layers, all_heads, shape.page};
  PageStore pages(many);
  const auto seal_to = [&](uint32_t end) {
    const uint32_t first = pages.pages(), dim = many.page.dim;
    REQUIRE(pages.reserve(end).ok());
    Array<float> k(sketch_page_tokens * dim);
    std::mt19937 random(end);
    std::normal_distribution<float> normal;
    for (uint32_t l = 0; l < all_layers; ++l)
      for (uint32_t h = 0; h < all_heads; ++h)
        for (uint32_t p = first; p < end; ++p) {
          for (float& x : k) x = normal(random);
          pages.seal(cpu_kernels(), l, h, p, k.data(), k.data());
        }
    pages.commit(end);
  };
  KeySketch sketch(many);
  KeySketch::Build build;
  sketch.begin(&build);
  std::vector<KeySketch> at_once;  // of the pages of each step, then extended
  for (uint32_t s = 0; s < steps; ++s) {
    seal_to(20 + 20 * s);
    KeySketch& whole = at_once.emplace_back(many);
    REQUIRE(whole.build(pages, nullptr, cpu_kernels(), &pool(2), nullptr).ok());
    build.begin_step(steps - s);
    CHECK_FALSE(build.complete());
    for (uint32_t l = 0; l < all_layers; ++l)
      sketch.add_layer(pages, pages.pages(), l, nullptr, cpu_kernels(), &pool(2), nullptr, &build);
    CHECK(build.layers_found() == (s == 0 ? 6 : s == 1 ? 13 : 20));  // a third, a half, the rest
    for (const uint32_t covered : build.covered())
      CHECK((covered == 0 || covered == pages.pages()));
  }
  seal_to(70);  // of a step that added nothing
  PageStore fewer(many);
  KeySketch::Build copy(build);
  CHECK_FALSE(sketch.take(fewer, cpu_kernels(), &pool(2), nullptr, std::move(copy)));
  CHECK_FALSE(sketch.built());
  REQUIRE(sketch.take(pages, cpu_kernels(), &pool(2), nullptr, std::move(build)));
  CHECK(sketch.pages() == 70);
  CHECK(sketch.built_pages() == 70);
  for (KeySketch& whole : at_once) {
    REQUIRE(whole.reserve(70).ok());
    REQUIRE(whole.append(pages, cpu_kernels(), &pool(2)));
  }
  const std::size_t basis = many.page.dim * many.page.sketch_dim() * sizeof(float);
  std::vector<uint32_t> layers_of(steps);
  for (uint32_t l = 0; l < all_layers; ++l)
    for (uint32_t s = 0; s < steps; ++s) {
      uint32_t same = 0;
      for (uint32_t h = 0; h < all_heads; ++h) {
        bool equal =
            std::memcmp(sketch.query_basis(l, h), at_once[s].query_basis(l, h), basis) == 0;
        for (uint32_t e = 0; e < pages.extents(); ++e)
          equal &= std::memcmp(sketch.extent(l, h, e), at_once[s].extent(l, h, e),
                               many.page.sketch_bytes()) == 0;
        same += equal;
      }
      CHECK((same == 0 || same == all_heads));
      layers_of[s] += same == all_heads;
    }
  CHECK(layers_of == std::vector<uint32_t>{6, 7, 7});
}

TEST_CASE("a head's sketch is the same among many heads and among few") {
  constexpr uint32_t many = 33, count = 5;  // more heads than have moments in memory at once
  const auto sketch_of = [&](uint32_t first, uint32_t end, uint32_t threads, KeySketch* out) {
    const StoreShape its_shape{end - first, heads, shape.page};
    PageStore pages(its_shape);
    REQUIRE(pages.reserve(count).ok());
    Array<float> k(sketch_page_tokens * shape.page.dim), v(k.size());
    for (uint32_t l = first; l < end; ++l)
      for (uint32_t h = 0; h < heads; ++h)
        for (uint32_t p = 0; p < count; ++p) {
          std::mt19937 random(l * 977 + h * 31 + p);
          std::normal_distribution<float> normal;
          for (float& x : k) x = normal(random);
          pages.seal(cpu_kernels(), l - first, h, p, k.data(), v.data());
        }
    pages.commit(count);
    *out = KeySketch(its_shape);
    REQUIRE(out->build(pages, nullptr, cpu_kernels(), &pool(threads), nullptr).ok());
  };
  KeySketch all(shape), last(shape);
  sketch_of(0, many, 2, &all);
  sketch_of(many - 1, many, 8, &last);
  for (uint32_t h = 0; h < heads; ++h) {
    const std::size_t floats = shape.page.dim * shape.page.sketch_dim();
    CHECK(std::equal(all.query_basis(many - 1, h), all.query_basis(many - 1, h) + floats,
                     last.query_basis(0, h)));
    CHECK(std::memcmp(all.extent(many - 1, h, 0), last.extent(0, h, 0),
                      shape.page.sketch_bytes()) == 0);
  }
}

TEST_CASE(
    "appended pages get what building them with the same bases gives, and a fork does not see "
    "them") {
  PageStore pages(shape);
  seal_pages(&pages, 21, 4);
  KeySketch sketch(shape);
  REQUIRE(sketch.build(pages, nullptr, cpu_kernels(), &pool(), nullptr).ok());
  const KeySketch fork(sketch);
  const std::vector<int8_t> before = contents(fork);
  REQUIRE(sketch.reserve(50).ok());
  seal_pages(&pages, 29, 5);
  sketch.append(pages, cpu_kernels(), &pool());
  CHECK(sketch.pages() == 50);
  CHECK(sketch.built_pages() == 21);
  CHECK(contents(fork) == before);
  for (uint32_t h = 0; h < heads; ++h) CHECK(agreement(sketch, pages, 1, h) > 0.85);

  KeySketch again(fork);  // the same in two steps
  REQUIRE(again.reserve(50).ok());
  again.append(pages, cpu_kernels(), &pool());
  CHECK(contents(again) == contents(sketch));

  KeySketch layers(fork);  // layer by layer, before the rest is visible
  REQUIRE(layers.reserve(50, &pool()).ok());
  for (uint32_t l = 0; l < shape.layers; ++l)
    layers.append_layer(pages, l, 50, cpu_kernels(), &pool());
  CHECK(layers.pages() == 21);
  layers.appended(pages);
  CHECK(contents(layers) == contents(sketch));

  sketch.truncate(21);
  CHECK(sketch.pages() == 21);
  sketch.truncate(0);
  CHECK_FALSE(sketch.built());
}

TEST_CASE("a section is read as the format says, goes on by its bases and is written so" *
          doctest::skip(!replaces_files_in_use())) {
  constexpr uint32_t pages_then = 21, built = 20, pages_now = 50, all_heads = layers * heads;
  const uint32_t floats = shape.page.dim * shape.page.sketch_dim();
  PageStore pages(shape);
  seal_pages(&pages, pages_then, 4);
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<float> bases(all_heads * floats), of_queries(all_heads * floats);
  for (float& x : bases) x = normal(random);
  for (float& x : of_queries) x = normal(random);
  // Of all pages that there are, in the order of a file.
  const auto extents = [&] {
    std::vector<uint8_t> out(pages.extents() * all_heads * shape.page.sketch_bytes());
    for (uint32_t at = 0; at < all_heads; ++at)
      for (uint32_t p = 0; p < pages.pages(); ++p) {
        const PageRef ref = pages.page(at / heads, at % heads, p);
        cpu_kernels().seal_sketch(
            shape.page, bases.data() + at * floats, ref.data, ref.scales, p % extent_pages,
            reinterpret_cast<int8_t*>(out.data()) +
                (p / extent_pages * all_heads + at) * shape.page.sketch_bytes());
      }
    return out;
  };
  // The bases, those of keys and then those of queries, the counts, zeros, extents:
  // docs/file-format.md.
  const auto section = [&] {
    std::vector<uint8_t> out(2 * bases.size() * sizeof(float));
    std::memcpy(out.data(), bases.data(), bases.size() * sizeof(float));
    std::memcpy(out.data() + out.size() / 2, of_queries.data(), of_queries.size() * sizeof(float));
    const uint32_t counts[] = {built, pages.pages()};
    out.insert(out.end(), reinterpret_cast<const uint8_t*>(counts),
               reinterpret_cast<const uint8_t*>(counts + 2));
    out.resize((out.size() + 4095) / 4096 * 4096);
    const auto rest = extents();
    out.insert(out.end(), rest.begin(), rest.end());
    return out;
  };
  const auto is_of_the_bases = [&](const KeySketch& sketch) {
    const auto expected = extents();
    for (uint32_t at = 0; at < all_heads; ++at) {
      const uint32_t l = at / heads, h = at % heads;
      CHECK(std::equal(of_queries.begin() + at * floats, of_queries.begin() + (at + 1) * floats,
                       sketch.query_basis(l, h)));
      for (uint32_t e = 0; e < pages.extents(); ++e) {
        CHECK(sketch.intact(l, h, e));
        CHECK(std::memcmp(sketch.extent(l, h, e),
                          expected.data() + (e * all_heads + at) * shape.page.sketch_bytes(),
                          shape.page.sketch_bytes()) == 0);
      }
    }
  };

  TempFolder folder;
  const std::vector<uint8_t> first = section();
  KeySketch sketch(shape);
  REQUIRE(map_section(folder, first, pages_then, &sketch).ok());
  CHECK(sketch.pages() == pages_then);
  CHECK(sketch.built_pages() == built);
  is_of_the_bases(sketch);

  REQUIRE(sketch.reserve(pages_now).ok());
  seal_pages(&pages, pages_now - pages_then, 5);
  sketch.append(pages, cpu_kernels(), &pool());
  is_of_the_bases(sketch);
  std::vector<uint8_t> second;
  REQUIRE(sketch.write(into(&second)).ok());
  CHECK(second.size() == sketch.file_bytes());
  CHECK(second == section());
  KeySketch again(shape);
  REQUIRE(map_section(folder, second, pages_now, &again).ok());
  is_of_the_bases(again);
}

TEST_CASE("nothing of pages that were taken back is written") {
  PageStore pages(shape), shorter(shape);
  seal_pages(&pages, 21, 4);
  seal_pages(&shorter, 18, 4);
  KeySketch sketch(shape);
  REQUIRE(sketch.build(shorter, nullptr, cpu_kernels(), &pool(), nullptr).ok());
  std::vector<uint8_t> first, second;
  REQUIRE(sketch.write(into(&first)).ok());
  CHECK(first.size() == sketch.file_bytes());
  REQUIRE(sketch.reserve(21).ok());
  sketch.append(pages, cpu_kernels(), &pool());
  sketch.truncate(18);
  REQUIRE(sketch.write(into(&second)).ok());
  CHECK(first == second);
  // Nor of those that there was room made for and that did not come, as when a step is cancelled.
  REQUIRE(sketch.reserve(40).ok());
  second.clear();
  REQUIRE(sketch.write(into(&second)).ok());
  CHECK(second.size() == sketch.file_bytes());
  CHECK(first == second);
}

TEST_CASE("a sketch that is cancelled while it is found is as it was, and no other head is begun") {
  PageStore pages(shape);
  seal_pages(&pages, 40, 1);
  KeySketch sketch(shape);
  REQUIRE(sketch.build(pages, nullptr, cpu_kernels(), &pool(1), nullptr).ok());
  const uint64_t bases = sketch.basis_stamp(), first_extent = sketch.stamp(0);
  for (const uint32_t at : {0u, 2u}) {
    Cancel cancel;
    uint32_t heads_begun = 0;
    const KeySketch::QueryMoment fires = [&](uint32_t, uint32_t, double*) {
      if (heads_begun++ == at) cancel.fire();
    };
    CHECK(sketch.build(pages, fires, cpu_kernels(), &pool(1), &cancel).code() == Code::cancelled);
    CHECK(heads_begun == at + 1);
    CHECK(sketch.basis_stamp() == bases);
    CHECK(sketch.stamp(0) == first_extent);
    CHECK(sketch.pages() == 40);
  }
  REQUIRE(sketch.build(pages, nullptr, cpu_kernels(), &pool(1), nullptr).ok());
  CHECK(sketch.basis_stamp() != bases);
}
