// Speed of the attention and store kernels of every instruction set of this CPU, on one thread.
//
//   bench-attention [name]      name: a part of a row's name [all rows]
//
// A figure comes from the fastest eighth of many short runs: other programs disturb these least.
// Ratios are to the scalar table and, where memory is the limit, to plain reads of the same memory,
// all from the same run.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/kernels.h"
#include "base/memory.h"

using namespace kvasir;

namespace {

struct Random {
  uint64_t state = 0x9e3779b97f4a7c15u;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 32);
  }
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1; }
  int8_t byte() { return static_cast<int8_t>(static_cast<int>(next() % 255) - 127); }
};

Array<float> random_floats(std::size_t n) {
  Random random;
  Array<float> x(n);
  for (float& v : x) v = random.uniform();
  return x;
}

using Run = std::function<void()>;
using Prepare = std::function<Run(const Kernels&)>;

// Seconds of the slowest run in the fastest eighth. Runs for a quarter of a second and at least
// eight times.
double run_time(const Run& run) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (double total = 0; times.size() < 8 || total < 0.25; total += times.back()) {
    const auto begin = Clock::now();
    run();
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 8];
}

const char* wanted = "";
volatile uint64_t sink;

bool is_wanted(const std::string& row) { return row.find(wanted) != std::string::npos; }

struct Baseline {
  const char* name;
  double rate;
};

void report(const std::string& row, const char* table, double figure, const char* unit, double rate,
            double scalar, const std::vector<Baseline>& baselines) {
  std::printf("%-28s %-12s %8.2f %-6s %7.2fx scalar", row.c_str(), table, figure, unit,
              rate / scalar);
  for (const Baseline& b : baselines) std::printf("  %5.2fx %s", rate / b.rate, b.name);
  std::printf("\n");
  std::fflush(stdout);
}

std::vector<const Kernels*> tables_from_scalar() {
  std::vector<const Kernels*> tables;
  for (uint32_t i = 0; const Kernels* k = cpu_kernels_at(i); ++i) tables.insert(tables.begin(), k);
  return tables;
}

// Prints a row for all tables: `work` units per run.
void bench_rate(const std::string& row, const char* unit, double work, const Prepare& prepare,
                const std::vector<Baseline>& baselines = {}) {
  if (!is_wanted(row)) return;
  double scalar = 0;
  for (const Kernels* k : tables_from_scalar()) {
    const double rate = work / run_time(prepare(*k));
    if (scalar == 0) scalar = rate;
    report(row, k->name, rate, unit, rate, scalar, baselines);
  }
}

// The same in microseconds, for work that a run does `times` times.
void bench_time(const std::string& row, uint32_t times, const Prepare& prepare) {
  if (!is_wanted(row)) return;
  double scalar = 0;
  for (const Kernels* k : tables_from_scalar()) {
    const double time = run_time(prepare(*k)) / times;
    if (scalar == 0) scalar = 1 / time;
    report(row, k->name, time * 1e6, "us", 1 / time, scalar, {});
  }
}

std::string shape_name(const char* what, uint32_t dim, uint32_t rows) {
  return std::string(what) + " d" + std::to_string(dim) + " r" + std::to_string(rows);
}

// Query rows with their state and scratch.
struct Call {
  Call(const Kernels& k, uint32_t rows, uint32_t dim)
      : f32(random_floats(std::size_t{rows} * dim)), q(f32.size()), split(2 * f32.size()),
        scale(rows), o(f32.size()), m(rows), l(rows), scratch(k.attend_scratch(rows, dim)) {
    for (float& x : f32) x *= 0.3f;
    k.quantize_queries(f32.data(), rows, dim, q.data(), split.data(), scale.data());
    view = {rows, dim, f32.data(), q.data(), split.data(), scale.data()};
  }
  AttentionState empty() {
    std::fill(o.begin(), o.end(), 0.0f);
    std::fill(m.begin(), m.end(), -__builtin_inff());
    std::fill(l.begin(), l.end(), 0.0f);
    return {o.data(), m.data(), l.data()};
  }
  Array<float> f32;
  Array<int8_t> q, split;
  Array<float> scale, o, m, l;
  Array<std::byte> scratch;
  QueryRows view;
};

// Random pages with scales near 1/100.
struct Pages {
  Pages(uint32_t dim, std::size_t bytes)
      : data(bytes), scales(bytes / page_bytes * 2 * (page_bytes / 2 / dim)),
        tokens(page_bytes / 2 / dim) {
    Random random;
    for (int8_t& x : data) x = random.byte();
    for (uint16_t& s : scales) s = static_cast<uint16_t>(0x3c00 + random.next() % 128);
    const uint64_t all = tokens == 64 ? ~uint64_t{0} : (uint64_t{1} << tokens) - 1;
    for (std::size_t p = 0; p < bytes / page_bytes; ++p) {
      refs.push_back({data.data() + p * page_bytes, scales.data() + p * 2 * tokens, all});
    }
  }
  Array<int8_t> data;
  Array<uint16_t> scales;
  uint32_t tokens;
  std::vector<PageRef> refs;
};

uint64_t read_all(const int8_t* data, std::size_t bytes) {
  uint64_t sums[16] = {};
  for (std::size_t i = 0; i + 128 <= bytes; i += 128) {
    uint64_t line[16];
    std::memcpy(line, data + i, 128);
    for (int j = 0; j < 16; ++j) sums[j] += line[j];
  }
  for (int j = 1; j < 16; ++j) sums[0] += sums[j];
  return sums[0];
}

void prefill_pages(uint32_t dim, uint32_t rows) {
  constexpr uint32_t n = 512;
  const Pages pages(dim, std::size_t{n} * page_bytes);
  const double products = 2.0 * rows * n * page_bytes / 2;  // with K and with V
  bench_rate(
      shape_name("pages prefill", dim, rows), "GMAC/s", products * 1e-9, [&](const Kernels& k) {
        auto call = std::make_shared<Call>(k, rows, dim);
        return [&, call] {
          k.attend_pages(call->view, pages.refs.data(), n, call->empty(), call->scratch.data());
        };
      });
}

// The calls of a decode step: 128 pages each, or one quad of each of 512, spread over 256 MB.
void decode_pages(uint32_t dim, uint32_t rows, bool one_quad) {
  const uint32_t n = one_quad ? 512 : 128;
  const std::string row = shape_name(one_quad ? "quads decode" : "pages decode", dim, rows);
  if (!is_wanted(row)) return;
  Pages pages(dim, std::size_t{256} << 20);
  Random random;
  for (PageRef& ref : pages.refs) std::swap(ref, pages.refs[random.next() % pages.refs.size()]);
  if (one_quad)
    for (PageRef& ref : pages.refs)
      ref.tokens = uint64_t{15} << random.next() % (pages.tokens / quad_tokens) * quad_tokens;
  std::size_t at = 0;
  const auto next = [&] { return at = (at + n) % (pages.refs.size() - n); };
  // bytes read of a page: its keys, or its values
  const std::size_t half = one_quad ? dim * quad_tokens : page_bytes / 2;
  const double gigabytes = 2.0 * n * static_cast<double>(half) * 1e-9;
  const double streaming = gigabytes / run_time([&] {
                             sink = read_all(pages.data.data() + next() * page_bytes, 2 * n * half);
                           });
  const double same = gigabytes / run_time([&] {
                        next();
                        for (uint32_t i = 0; i < n; ++i) {
                          const PageRef& ref = pages.refs[at + i];
                          const int8_t* keys =
                              ref.data + static_cast<uint32_t>(std::countr_zero(ref.tokens)) * dim;
                          sink = read_all(keys, half) + read_all(keys + page_bytes / 2, half);
                        }
                      });
  bench_rate(row, "GB/s", gigabytes,
             [&](const Kernels& k) {
               auto call = std::make_shared<Call>(k, rows, dim);
               return [&, call] {
                 k.attend_pages(call->view, pages.refs.data() + next(), n, call->empty(),
                                call->scratch.data());
               };
             },
             {{"a streaming read", streaming},
              {one_quad ? "a read of these quads" : "a read of these pages", same}});
}

// A chunk with itself: 512 rows are the last 128 of n tokens, with four heads.
void prefill_rows(uint32_t dim, uint32_t n) {
  constexpr uint32_t rows = 512;
  const Array<float> keys = random_floats(std::size_t{n} * dim), values = keys;
  std::vector<uint32_t> limit(rows);
  double products = 0;
  for (uint32_t r = 0; r < rows; ++r) {
    limit[r] = n - rows / 4 + r / 4 + 1;
    products += 2.0 * limit[r] * dim;
  }
  bench_rate(shape_name("rows prefill", dim, rows), "GMAC/s", products * 1e-9,
             [&](const Kernels& k) {
               auto call = std::make_shared<Call>(k, rows, dim);
               return [&, call] {
                 k.attend_rows(call->view, keys.data(), values.data(), n, limit.data(),
                               call->empty(), call->scratch.data());
               };
             });
}

void decode_rows(uint32_t dim, uint32_t rows) {
  constexpr uint32_t n = 128, times = 20;
  const Array<float> keys = random_floats(std::size_t{n} * dim), values = keys;
  bench_time(shape_name("rows decode", dim, rows), times, [&](const Kernels& k) {
    auto call = std::make_shared<Call>(k, rows, dim);
    return [&, call] {
      for (uint32_t i = 0; i < times; ++i) {
        k.attend_rows(call->view, keys.data(), values.data(), n, nullptr, call->empty(),
                      call->scratch.data());
      }
    };
  });
}

// A scan of one head's bounds: 64 MB, 128 extents per run.
void scan_bounds(uint32_t dim, uint32_t rows) {
  constexpr uint32_t n = 128;
  const std::string row = shape_name("score bounds", dim, rows);
  if (!is_wanted(row)) return;
  const PageShape shape = PageShape::of(dim);
  const std::size_t bytes = shape.bounds_bytes(), extents = (std::size_t{64} << 20) / bytes;
  Array<int8_t> bounds(extents * bytes);
  Random random;
  for (int8_t& x : bounds) x = random.byte();
  for (std::size_t e = 1; e <= extents; ++e) {  // scales of 0: random bytes may be NaN
    std::memset(bounds.data() + e * bytes - shape.extent_blocks() * sizeof(float), 0,
                shape.extent_blocks() * sizeof(float));
  }
  std::size_t at = 0;
  const auto next = [&] { return at = (at + n) % (extents - n); };
  const double gigabytes = double{n} * static_cast<double>(bytes) * 1e-9;
  const double streaming =
      gigabytes / run_time([&] { sink = read_all(bounds.data() + next() * bytes, n * bytes); });
  const std::size_t stride = n * shape.extent_blocks();
  Array<float> scores(stride * rows);
  bench_rate(row, "GB/s", gigabytes,
             [&](const Kernels& k) {
               auto call = std::make_shared<Call>(k, rows, dim);
               return [&, call] {
                 next();
                 for (std::size_t e = 0; e < n; ++e) {
                   k.score_bounds(shape, call->view, bounds.data() + (at + e) * bytes, nullptr,
                                  scores.data() + e * shape.extent_blocks(), stride);
                 }
               };
             },
             {{"a streaming read", streaming}});
}

void choose(uint32_t n, uint32_t k_wanted) {
  constexpr uint32_t times = 20;
  Array<float> scores = random_floats(n * 3);
  for (uint32_t i = 0; i < n; ++i) scores[i] += scores[n + i] + scores[2 * n + i];
  Array<uint32_t> out(k_wanted);
  Array<std::byte> scratch(std::size_t{n} * 4);
  bench_time("top-k " + std::to_string(k_wanted) + " of " + std::to_string(n), times,
             [&](const Kernels& k) {
               return [&] {
                 for (uint32_t i = 0; i < times; ++i)
                   sink = k.top_k(scores.data(), n, k_wanted, out.data(), scratch.data());
               };
             });
}

void seal(uint32_t dim) {
  const PageShape shape = PageShape::of(dim);
  const Array<float> x = random_floats(page_bytes / 2);
  Array<int8_t> pages(shape.pages_bytes()), bounds(shape.bounds_bytes());
  Array<uint16_t> scales(shape.scales_bytes() / 2);
  bench_time("seal page d" + std::to_string(dim), extent_pages, [&](const Kernels& k) {
    return [&] {
      for (uint32_t p = 0; p < extent_pages; ++p)
        k.seal_page(shape, x.data(), x.data(), p, pages.data(), scales.data(), bounds.data());
    };
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) wanted = argv[1];
  prefill_pages(64, 128);
  prefill_pages(128, 128);
  for (uint32_t dim : {64u, 128u}) {
    for (uint32_t rows : {1u, 4u, 8u}) decode_pages(dim, rows, false);
    for (uint32_t rows : {1u, 4u, 8u}) decode_pages(dim, rows, true);
  }
  for (uint32_t dim : {64u, 128u}) prefill_rows(dim, 600);
  for (uint32_t rows : {1u, 4u, 8u}) decode_rows(128, rows);
  for (uint32_t rows : {1u, 4u, 8u}) scan_bounds(128, rows);
  choose(8192, 200);
  choose(1024, 64);
  seal(64);
  seal(128);
  return 0;
}
