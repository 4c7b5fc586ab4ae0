// The store without a model: attention against plain double precision, chunks against single
// tokens, files, forks, and refused calls.
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "cache_helpers.h"
#include "failing_allocations.h"
#include "temp_folder.h"

using namespace api_test;

TEST_CASE(
    "attention is exact while everything is in the window, and near to it over pages, whatever the "
    "shape") {
  for (const kv_cache_shape& shape :
       {small, shape_of(1, 1, 1, 1), shape_of(1, 4, 4, 64), shape_of(2, 8, 1, 128),
        shape_of(1, 2, 1, 256), shape_of(1, 2, 1, 512)}) {
    CAPTURE(shape.head_dim);
    const Text text(shape, 300);
    const Cache cache = open_cache(shape, options_of("full"));
    const auto near = step(cache.get(), text, 0, 50);
    for (uint32_t l = 0; l < shape.layers; ++l)
      CHECK(largest_difference(near[l], text.exact(l, 0, 50)) < window_tolerance);
    read(cache.get(), text, 50, 260);
    const auto chunk = step(cache.get(), text, 260, 39);
    const auto one = step(cache.get(), text, 299, 1);
    CHECK(stats_of(cache.get()).sealed_tokens > 0);
    for (uint32_t l = 0; l < shape.layers; ++l) {
      CHECK(largest_difference(chunk[l], text.exact(l, 260, 39)) < page_tolerance);
      CHECK(largest_difference(one[l], text.exact(l, 299, 1)) < page_tolerance);
    }
    CHECK(stats_of(cache.get()).tokens == 300);
  }
}

TEST_CASE("a full-precision cache is exact at any length") {
  const Text text(small, 300);
  kv_cache_options o = options_of("full");
  o.precision = KV_PRECISION_F32;
  const Cache cache = open_cache(small, o);
  read(cache.get(), text, 0, 299);
  CHECK(largest_difference(step(cache.get(), text, 299, 1)[1], text.exact(1, 299, 1)) <
        window_tolerance);
  CHECK(stats_of(cache.get()).sealed_tokens == 0);
}

TEST_CASE("a chunk attends as its tokens one at a time do") {
  const Text text(small, 240);
  const Cache chunks = open_cache(small, options_of("full")),
              ones = open_cache(small, options_of("full"));
  read(chunks.get(), text, 0, 200);
  for (std::size_t t = 0; t < 200; ++t) step(ones.get(), text, t, 1);
  const auto together = step(chunks.get(), text, 200, 40);
  std::vector<Floats> single(small.layers);
  for (std::size_t t = 200; t < 240; ++t) {
    const auto out = step(ones.get(), text, t, 1);
    for (uint32_t l = 0; l < small.layers; ++l)
      single[l].insert(single[l].end(), out[l].begin(), out[l].end());
  }
  for (uint32_t l = 0; l < small.layers; ++l)
    CHECK(largest_difference(together[l], single[l]) < page_tolerance);
}

TEST_CASE("scores are scaled and capped as asked, in window and pages, also by chosen pages") {
  const Text text(small, 301);
  for (const char* strategy : {"full", "quest", "bounded"}) {
    CAPTURE(std::string(strategy));
    const Cache cache = open_cache(small, options_of(strategy, 4096));
    kv_cache_attention_options o;
    kv_init(&o, sizeof o);
    o.scale = 0.4f;
    o.softcap = 2;
    const auto near = step(cache.get(), text, 0, 50, &o);
    CHECK(largest_difference(near[1], text.exact(1, 0, 50, 0.4, 2)) < window_tolerance);
    CHECK(largest_difference(near[1], text.exact(1, 0, 50, 0.4)) > 0.05);
    read(cache.get(), text, 50, 260);
    const auto chunk = step(cache.get(), text, 260, 40, &o);
    CHECK(largest_difference(chunk[1], text.exact(1, 260, 40, 0.4, 2)) < page_tolerance);
    const auto one = step(cache.get(), text, 300, 1, &o);
    CHECK(largest_difference(one[1], text.exact(1, 300, 1, 0.4, 2)) < page_tolerance);
  }
}

TEST_CASE("half-precision numbers go in and come out, at any address") {
  const Text text(small, 10);
  const auto exact = text.exact(0, 0, 10);
  for (uint32_t type : {KV_F16, KV_BF16}) {
    // To the format and back: bfloat16 by cutting; float16 of numbers of this size by their bits.
    const auto to = [&](float x) {
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (type == KV_BF16) return static_cast<uint16_t>(bits >> 16);
      if (std::abs(x) < 0x1p-14f) return static_cast<uint16_t>(0);
      return static_cast<uint16_t>((bits >> 16 & 0x8000) |
                                   (((bits & 0x7fffffff) - 0x38000000) >> 13));
    };
    const auto from = [&](uint16_t x) {
      if (type == KV_F16) {
        const float magnitude =
            (x & 0x7c00)
                ? std::ldexp(1.0f + static_cast<float>(x & 0x3ff) / 1024, (x >> 10 & 31) - 15)
                : std::ldexp(static_cast<float>(x & 0x3ff), -24);
        return x & 0x8000 ? -magnitude : magnitude;
      }
      const uint32_t bits = static_cast<uint32_t>(x) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    };
    const auto pack = [&](const float* x, std::size_t count) {
      std::vector<char> out(count * 2 + 1);
      for (std::size_t i = 0; i < count; ++i) {
        const uint16_t h = to(x[i]);
        std::memcpy(out.data() + 1 + i * 2, &h, 2);
      }
      return out;
    };
    const Cache cache = open_cache(small, options_of("full"));
    const auto k = pack(text.key(0, 0), 10 * 80), v = pack(text.value(0, 0), 10 * 80),
               q = pack(text.query(0, 0), 10 * 240);
    std::vector<char> out(10 * 240 * 2 + 1);
    REQUIRE_OK(
        kv_cache_update(cache.get(), 0, type, k.data() + 1, v.data() + 1, nullptr, 10, error));
    REQUIRE_OK(kv_cache_attention(cache.get(), 0, type, q.data() + 1, out.data() + 1, 10, nullptr,
                                  nullptr, error));
    Floats back(10 * 240);
    for (std::size_t i = 0; i < back.size(); ++i) {
      uint16_t h;
      std::memcpy(&h, out.data() + 1 + i * 2, 2);
      back[i] = from(h);
    }
    CHECK(largest_difference(back, exact) < (type == KV_F16 ? 0.01 : 0.06));
  }
}

TEST_CASE(
    "every strategy that needs no model reads; with a budget of everything it reads what full "
    "attention does") {
  const Text text(small, 700);
  const Cache full = open_cache(small, options_of("full"));
  read(full.get(), text, 0, 699);
  const auto exact = step(full.get(), text, 699, 1);
  for (const char* strategy :
       {"auto", "quest", "flat", "dipr", "bounded", "infllm", "filter-layers"}) {
    CAPTURE(std::string(strategy));
    kv_cache_options o = options_of(strategy, 4096);
    if (std::string(strategy) == "dipr")
      o.decode = budgeted(strategy, 4096, {{KV_PARAM_ALPHA, 1e-30}});
    const Cache all = open_cache(small, o);
    read(all.get(), text, 0, 699, true);
    const auto out = step(all.get(), text, 699, 1, nullptr, true);
    for (uint32_t l = 0; l < small.layers; ++l) CHECK(largest_difference(out[l], exact[l]) < 2e-3);
    const Cache few = open_cache(small, options_of(strategy, 64));
    read(few.get(), text, 0, 699, true);
    for (const Floats& x : step(few.get(), text, 699, 1, nullptr, true))
      for (float y : x) CHECK(std::isfinite(y));
  }
  kv_cache* cache = nullptr;
  for (const char* strategy : {"ood", "hnsw", "ivf", "dipr-graph", "snapkv"}) {
    const kv_cache_options o = options_of(strategy);
    CHECK(kv_cache_open(&small, &o, &cache, nullptr) == KV_BAD_ARGUMENT);
  }
}

TEST_CASE("results have the same bits with any number of threads") {
  const Text text(small, 400);
  for (const char* strategy : {"full", "quest", "bounded"}) {
    std::vector<Floats> first;
    for (uint32_t threads : {1u, 2u, 5u}) {
      const Cache cache = open_cache(small, options_of(strategy, 64, threads));
      read(cache.get(), text, 0, 399);
      const auto out = step(cache.get(), text, 399, 1);
      if (first.empty()) first = out;
      CHECK(out == first);
    }
  }
}

TEST_CASE(
    "a long step's numbers are read by all threads as by one, of each type and at any address, and "
    "looked at to the last") {
  constexpr uint32_t n = 2000;  // several pieces of 128 KiB as floats
  const Text text(small, n + 1);
  const auto half = [&](const float* x) {  // some numbers, whatever they are
    std::vector<char> out(std::size_t{n} * 80 * 2 + 1);
    for (std::size_t i = 0; i < std::size_t{n} * 80; ++i) {
      const auto h = static_cast<uint16_t>(0x3000 + static_cast<int>(x[i] * 100) % 0x800);
      std::memcpy(out.data() + 1 + i * 2, &h, 2);
    }
    return out;
  };
  for (const uint32_t type : {KV_F32, KV_F16, KV_BF16}) {
    std::vector<Floats> first;
    for (const uint32_t threads : {1u, 2u, 5u}) {
      const Cache cache = open_cache(small, options_of("bounded", 64, threads));
      for (uint32_t l = 0; l < small.layers; ++l) {
        const auto k = half(text.key(l, 0)), v = half(text.value(l, 0));
        const void* of_k = type == KV_F32 ? static_cast<const void*>(text.key(l, 0)) : k.data() + 1;
        const void* of_v =
            type == KV_F32 ? static_cast<const void*>(text.value(l, 0)) : v.data() + 1;
        REQUIRE_OK(kv_cache_update(cache.get(), l, type, of_k, of_v, nullptr, n, error));
      }
      const auto out = step(cache.get(), text, n, 1);
      if (first.empty()) first = out;
      CHECK(out == first);
      Floats bad(text.key(0, 0), text.key(0, n));
      for (const std::size_t at : {bad.size() - 1, bad.size() - 33000}) {
        const float good = std::exchange(bad[at], NAN);
        CHECK(kv_cache_update(cache.get(), 0, KV_F32, bad.data(), text.value(0, 0), nullptr, n,
                              nullptr) == KV_BAD_ARGUMENT);
        bad[at] = good;
      }
    }
  }
}

TEST_CASE("a cache that is saved, packed, loaded or forked goes on with the same bits") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), packed = folder.file("a.kvz");
  const Text text(small, 500);
  for (const char* strategy : {"full", "quest", "bounded"}) {
    for (std::size_t tokens : {0u, 20u, 350u}) {
      CAPTURE(tokens);
      const kv_cache_options o = options_of(strategy, 64);
      const Cache cache = open_cache(small, o);
      read(cache.get(), text, 0, tokens);
      REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
      REQUIRE_OK(kv_file_verify(path.c_str(), nullptr, error));
      REQUIRE_OK(kv_pack(path.c_str(), packed.c_str(), 0, nullptr, error));
      REQUIRE_OK(kv_unpack(packed.c_str(), path.c_str(), nullptr, error));
      kv_cache *loaded = nullptr, *forked = nullptr;
      kv_control verify;
      kv_init(&verify, sizeof verify);
      verify.flags = KV_VERIFY;
      REQUIRE_OK(kv_cache_load(&small, path.c_str(), &o, &verify, &loaded, error));
      const Cache there(loaded);
      REQUIRE_OK(kv_cache_fork(cache.get(), nullptr, &forked, error));
      const Cache other(forked);
      for (std::size_t at : {tokens, tokens + 1}) {
        const auto out = step(cache.get(), text, at, 1);
        CHECK(step(loaded, text, at, 1) == out);
        CHECK(step(forked, text, at, 1) == out);
      }
      const auto out = step(cache.get(), text, tokens + 2, 100);
      CHECK(step(loaded, text, tokens + 2, 100) == out);
      CHECK(step(forked, text, tokens + 2, 100) == out);
    }
  }
}
