// Tokens that a cache attends of a long text: by budget, by the choice of filter layers, by a
// sketch, and under a cap of the scores.
#include <cstring>

#include "cache_helpers.h"
#include "failing_allocations.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

constexpr uint32_t many_layers = 8;

// The text's last token asks for an early one that stands out, in every layer and head.
Text asking_text(const kv_cache_shape& shape, uint32_t tokens, uint32_t asked) {
  Text text(shape, tokens);
  const uint32_t group = shape.heads / shape.kv_heads, dim = shape.head_dim;
  for (uint32_t l = 0; l < shape.layers; ++l) {
    float* key = text.k[l].data() + std::size_t{asked} * shape.kv_heads * dim;
    for (uint32_t i = 0; i < shape.kv_heads * dim; ++i) key[i] *= 4;
    for (uint32_t h = 0; h < shape.heads; ++h)
      for (uint32_t d = 0; d < dim; ++d)
        text.q[l][(tokens - 1) * text.row() + h * dim + d] = key[h / group * dim + d] / 12;
  }
  return text;
}

kv_cache_options filtering(double budget) {
  kv_cache_options o = options_of("filter-layers");
  // 0, 1, 2, 4 and 5 are dense, 3 reads the choice of 1, 6 and 7 that of 4
  o.decode = strategies::filter_layers({1, 4}, {{KV_PARAM_BUDGET_TOKENS, budget}});
  return o;
}

void update_all(kv_cache* cache, const Text& text, std::size_t at) {
  for (uint32_t l = 0; l < text.shape.layers; ++l)
    REQUIRE_OK(
        kv_cache_update(cache, l, KV_F32, text.key(l, at), text.value(l, at), nullptr, 1, error));
}

}  // namespace

TEST_CASE("a small budget reads a part of the text, and finds the best tokens") {
  constexpr uint32_t tokens = 1200;
  const kv_cache_shape deep = shape_of(many_layers, 2, 1, 40);
  const Text text = asking_text(small, tokens, 500), deep_text = asking_text(deep, tokens, 500);
  for (const char* strategy : {"quest", "flat", "dipr", "bounded", "infllm", "filter-layers"}) {
    CAPTURE(std::string(strategy));
    const bool filters = std::string(strategy) == "filter-layers",
               by_blocks = std::string(strategy) == "infllm";
    const Text& t = filters ? deep_text : text;
    const Cache full = open_cache(t.shape, options_of("full"));
    const Cache cache = open_cache(t.shape, filters ? filtering(64) : options_of(strategy, 64));
    read(full.get(), t, 0, tokens - 1, true);
    read(cache.get(), t, 0, tokens - 1, true);
    const uint64_t had_read = stats_of(cache.get()).tokens_read,
                   had = stats_of(cache.get()).tokens_present;
    const auto exact = step(full.get(), t, tokens - 1, 1, nullptr, true),
               out = step(cache.get(), t, tokens - 1, 1, nullptr, true);
    const uint64_t few = stats_of(cache.get()).tokens_read - had_read,
                   all = stats_of(cache.get()).tokens_present - had;
    CHECK(few > 0);
    CHECK(few < (filters ? all * 7 / 10 : all / 4));
    CHECK(out != exact);
    for (uint32_t l = 0; l < t.shape.layers; ++l)
      CHECK(largest_difference(out[l], exact[l]) < (by_blocks ? 5 : 0.2));
  }
}

TEST_CASE("beyond 4096 sealed tokens a cache chooses by itself") {
  kv_cache_shape shape = shape_of(1, 2, 1, 32);
  shape.max_tokens = 8192;
  constexpr uint32_t tokens = 4400;
  const Text text = asking_text(shape, tokens, 2000);
  const Cache full = open_cache(shape, options_of("full")),
              by_itself = open_cache(shape, options_of("auto"));
  for (kv_cache* cache : {full.get(), by_itself.get()})
    for (std::size_t at = 0; at < tokens - 1; at += 1100)
      step(cache, text, at, static_cast<uint32_t>(std::min<std::size_t>(1100, tokens - 1 - at)));
  const uint64_t had_read = stats_of(by_itself.get()).tokens_read,
                 had = stats_of(by_itself.get()).tokens_present;
  const auto exact = step(full.get(), text, tokens - 1, 1),
             out = step(by_itself.get(), text, tokens - 1, 1);
  CHECK(std::string(stats_of(by_itself.get()).decode_strategy) == "bounded");
  CHECK(stats_of(by_itself.get()).tokens_read - had_read <
        (stats_of(by_itself.get()).tokens_present - had) * 3 / 4);
  CHECK(out != exact);
  CHECK(largest_difference(out[0], exact[0]) < 0.2);
}

TEST_CASE(
    "a layer that reads what a filter layer chooses is refused until that one has chosen in the "
    "same step") {
  const Text text(shape_of(many_layers, 2, 1, 40), 600);
  const Cache cache = open_cache(text.shape, filtering(64)),
              ordered = open_cache(text.shape, filtering(64));
  kv_cache* const c = cache.get();
  for (kv_cache* each : {c, ordered.get()}) read(each, text, 0, 500);
  const auto expected = step(ordered.get(), text, 500, 1);
  const Floats untouched(text.row(), 7);
  Floats out = untouched;
  const auto attend = [&](uint32_t layer, std::size_t token, kv_cancel* cancel = nullptr) {
    out = untouched;
    const kv_control control = control_of(cancel);
    return kv_cache_attention(c, layer, KV_F32, text.query(layer, token), out.data(), 1, nullptr,
                              &control, nullptr);
  };
  const auto refused = [&](uint32_t layer, std::size_t token, const char* names) {
    kv_error reply{};
    out = untouched;
    CHECK(kv_cache_attention(c, layer, KV_F32, text.query(layer, token), out.data(), 1, nullptr,
                             nullptr, &reply) == KV_BAD_STATE);
    CHECK_MESSAGE(std::strstr(reply.message, names) != nullptr, reply.message);
    CHECK(out == untouched);
  };
  update_all(c, text, 500);
  refused(3, 500, "layer 1 ");  // nothing was ever chosen
  REQUIRE(attend(1, 500) == KV_OK);
  REQUIRE(attend(3, 500) == KV_OK);
  CHECK(out == expected[3]);
  refused(6, 500, "layer 4 ");
  REQUIRE(attend(4, 500) == KV_OK);
  refused(3, 500, "layer 1 ");  // the choice is another one now
  REQUIRE(attend(7, 500) == KV_OK);
  CHECK(out == expected[7]);
  CHECK(attend(5, 500) == KV_OK);  // dense layers ask for nothing
  update_all(c, text, 501);
  refused(7, 501, "layer 4 ");  // what the last step chose
  REQUIRE_OK(kv_cache_truncate(c, 100, error));
  update_all(c, text, 100);
  refused(7, 100, "layer 4 ");
  const Cancel cancel = make_cancel();
  kv_cancel_fire(cancel.get());
  CHECK(attend(4, 100, cancel.get()) == KV_CANCELLED);
  refused(7, 100, "layer 4 ");
  REQUIRE(attend(4, 100) == KV_OK);
  REQUIRE(attend(7, 100) == KV_OK);
}

TEST_CASE("a filter layer that finds no memory has chosen nothing") {
  const Text text(shape_of(many_layers, 2, 1, 40), 600);
  const Cache cache = open_cache(text.shape, filtering(64));
  read(cache.get(), text, 0, 500);
  update_all(cache.get(), text, 500);
  Floats out(text.row());
  const auto attend = [&](uint32_t layer) {
    return kv_cache_attention(cache.get(), layer, KV_F32, text.query(layer, 500), out.data(), 1,
                              nullptr, nullptr, nullptr);
  };
  const auto failing = [&](long n, bool* reached) {
    FailingAllocations memory(n, true);
    const kv_status status = attend(1);
    *reached = memory.reached();
    return status;
  };
  bool reached = true;
  for (long n = 0; reached; ++n) {
    CAPTURE(n);
    const kv_status status = failing(n, &reached);
    CHECK(status == (reached ? KV_NO_MEMORY : KV_OK));
    CHECK(attend(3) == (reached ? KV_BAD_STATE : KV_OK));
  }
  const Floats expected = out;
  int spoiled = 0;
  reached = true;
  for (long n = 0; reached; ++n) {  // an earlier choice stays, or goes
    CAPTURE(n);
    REQUIRE(attend(1) == KV_OK);
    const kv_status status = failing(n, &reached);
    CHECK(status == (reached ? KV_NO_MEMORY : KV_OK));
    const kv_status after = attend(3);
    spoiled += after == KV_BAD_STATE;
    CHECK((after == KV_BAD_STATE || (after == KV_OK && out == expected)));
  }
  CHECK(spoiled > 0);
}

// A cap far above all scores changes none of them, so what is chosen must be the same: the mean
// key, which a cap needs put back, has no part in it.
TEST_CASE("a cap that no score reaches does not change the choice") {
  constexpr uint32_t tokens = 1200;
  const Text text(small, tokens), deep_text(shape_of(many_layers, 4, 2, 40), tokens);
  kv_cache_attention_options o;
  kv_init(&o, sizeof o);
  o.scale = 0.5f;
  kv_cache_attention_options capped = o;
  capped.softcap = 1e4f;
  for (const char* strategy : {"quest", "flat", "dipr", "bounded", "filter-layers"}) {
    CAPTURE(std::string(strategy));
    const bool filters = std::string(strategy) == "filter-layers",
               samples = std::string(strategy) == "bounded";
    const Text& t = filters ? deep_text : text;
    kv_cache_options options = filters ? filtering(64) : options_of(strategy, samples ? 128 : 64);
    if (samples) options.decode = budgeted(strategy, 128, {{KV_PARAM_COVERAGE, 0.9}});
    const Cache cache = open_cache(t.shape, options);
    read(cache.get(), t, 0, tokens - 10);
    for (std::size_t at = tokens - 10; at < tokens; ++at) {
      const uint64_t before = stats_of(cache.get()).tokens_read,
                     pages = stats_of(cache.get()).pages_touched;
      const auto plain = step(cache.get(), t, at, 1, &o);
      const uint64_t between = stats_of(cache.get()).tokens_read,
                     pages_between = stats_of(cache.get()).pages_touched;
      REQUIRE_OK(kv_cache_truncate(cache.get(), at, error));
      const auto with_cap = step(cache.get(), t, at, 1, &capped);
      CHECK(between > before);
      CHECK(stats_of(cache.get()).tokens_read - between == between - before);
      CHECK(stats_of(cache.get()).pages_touched - pages_between == pages_between - pages);
      for (uint32_t l = 0; l < t.shape.layers; ++l)
        CHECK(largest_difference(with_cap[l], plain[l]) < page_tolerance);
    }
  }
}

TEST_CASE("a cache that will choose by a sketch is saved and copied with it") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Text text(small, 600);
  const auto sketch_bytes = [&] {  // of the file, from the header's table
    const std::vector<uint8_t> bytes = read_file(path);
    uint64_t size = 0;
    for (std::size_t entry = 256; entry < 2304; entry += 64)
      if (bytes[entry] == 15) std::memcpy(&size, &bytes[entry + 24], 8);
    return size;
  };
  for (const char* strategy : {"quest", "bounded"}) {
    const bool wants = std::string(strategy) == "bounded";
    const Cache cache = open_cache(small, options_of(strategy, 64));
    read(cache.get(), text, 0, 100);
    REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
    CHECK(sketch_bytes() == 0);  // of one page nothing is chosen
    read(cache.get(), text, 100, 500);
    const uint64_t before = stats_of(cache.get()).private_bytes;
    kv_cache* copy = nullptr;
    REQUIRE_OK(kv_cache_fork(cache.get(), nullptr, &copy, error));
    const Cache forked(copy);
    CHECK((stats_of(cache.get()).private_bytes > before) == wants);
    REQUIRE_OK(kv_cache_save(cache.get(), path.c_str(), nullptr, error));
    CHECK((sketch_bytes() > 0) == wants);
  }
}
