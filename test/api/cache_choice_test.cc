// What a cache reads of a long text: by budget, and under a cap of the scores.
#include "cache_helpers.h"

using namespace api_test;

namespace {

constexpr uint32_t many_layers = 8;

uint64_t stat_of(kv_cache* cache, const std::string& name) {
  const std::string json = stats_of(cache), key = "\"" + name + "\":";
  const std::size_t at = json.find(key);
  REQUIRE(at != std::string::npos);
  return std::stoull(json.substr(at + key.size()));
}

// The text's last token asks for an early one that stands out, in every layer and head.
Text asking_text(const kv_cache_shape& shape, uint32_t tokens, uint32_t asked) {
  Text text(shape, tokens);
  const uint32_t group = shape.heads / shape.kv_heads, dim = shape.head_dim;
  for (uint32_t l = 0; l < shape.layers; ++l) {
    float* key = text.k[l].data() + std::size_t{asked} * shape.kv_heads * dim;
    for (uint32_t i = 0; i < shape.kv_heads * dim; ++i) key[i] *= 4;
    for (uint32_t h = 0; h < shape.heads; ++h)
      for (uint32_t d = 0; d < dim; ++d) text.q[l][(tokens - 1) * text.row() + h * dim + d] = key[h / group * dim + d] / 12;
  }
  return text;
}

kv_cache_options filtering(uint64_t budget) {
  kv_cache_options o = options_of("filter-layers", budget);
  o.filter_layers = "1,4";  // 0, 1, 2, 4 and 5 are dense, 3 reads the choice of 1, 6 and 7 that of 4
  return o;
}

}  // namespace

TEST_CASE("a small budget reads a part of the text, and finds what is asked for") {
  constexpr uint32_t tokens = 1200;
  const kv_cache_shape deep = shape_of(many_layers, 2, 1, 40);
  const Text text = asking_text(small, tokens, 500), deep_text = asking_text(deep, tokens, 500);
  for (const char* strategy : {"quest", "flat", "dipr", "bounded", "infllm", "filter-layers"}) {
    CAPTURE(std::string(strategy));
    const bool filters = std::string(strategy) == "filter-layers", by_blocks = std::string(strategy) == "infllm";
    const Text& t = filters ? deep_text : text;
    const Cache full = open_cache(t.shape, options_of("full"));
    const Cache cache = open_cache(t.shape, filters ? filtering(64) : options_of(strategy, 64));
    read(full.get(), t, 0, tokens - 1, true);
    read(cache.get(), t, 0, tokens - 1, true);
    const uint64_t had_read = stat_of(cache.get(), "tokens_read"), had = stat_of(cache.get(), "tokens_present");
    const auto exact = step(full.get(), t, tokens - 1, 1, nullptr, true), out = step(cache.get(), t, tokens - 1, 1, nullptr, true);
    const uint64_t few = stat_of(cache.get(), "tokens_read") - had_read, all = stat_of(cache.get(), "tokens_present") - had;
    CHECK(few > 0);
    CHECK(few < (filters ? all * 7 / 10 : all / 4));
    CHECK(out != exact);
    for (uint32_t l = 0; l < t.shape.layers; ++l) CHECK(largest_difference(out[l], exact[l]) < (by_blocks ? 5 : 0.2));
  }
}

TEST_CASE("beyond 4096 sealed tokens a cache chooses by itself") {
  kv_cache_shape shape = shape_of(1, 2, 1, 32);
  shape.max_tokens = 8192;
  constexpr uint32_t tokens = 4400;
  const Text text = asking_text(shape, tokens, 2000);
  const Cache full = open_cache(shape, options_of("full")), by_itself = open_cache(shape, options_of("auto"));
  for (kv_cache* cache : {full.get(), by_itself.get()})
    for (std::size_t at = 0; at < tokens - 1; at += 1100) step(cache, text, at, static_cast<uint32_t>(std::min<std::size_t>(1100, tokens - 1 - at)));
  const uint64_t had_read = stat_of(by_itself.get(), "tokens_read"), had = stat_of(by_itself.get(), "tokens_present");
  const auto exact = step(full.get(), text, tokens - 1, 1), out = step(by_itself.get(), text, tokens - 1, 1);
  CHECK(says(by_itself.get(), "\"strategy_planned\":\"bounded\""));
  CHECK(stat_of(by_itself.get(), "tokens_read") - had_read < (stat_of(by_itself.get(), "tokens_present") - had) * 3 / 4);
  CHECK(out != exact);
  CHECK(largest_difference(out[0], exact[0]) < 0.2);
}

// A cap far above all scores changes none of them, so what is chosen must be the same: the mean key, which a cap needs put back, has no part in it.
TEST_CASE("what is read does not depend on a cap that no score reaches") {
  constexpr uint32_t tokens = 1200;
  const Text text(small, tokens), deep_text(shape_of(many_layers, 4, 2, 40), tokens);
  kv_cache_attention_options o;
  kv_cache_attention_options_init(&o);
  o.scale = 0.5f;
  kv_cache_attention_options capped = o;
  capped.softcap = 1e4f;
  for (const char* strategy : {"quest", "flat", "dipr", "bounded", "filter-layers"}) {
    CAPTURE(std::string(strategy));
    const bool filters = std::string(strategy) == "filter-layers", adds_tail = std::string(strategy) == "bounded";
    const Text& t = filters ? deep_text : text;
    kv_cache_options options = filters ? filtering(64) : options_of(strategy, adds_tail ? 128 : 64);
    if (adds_tail) options.coverage = 0.9f;
    const Cache cache = open_cache(t.shape, options);
    read(cache.get(), t, 0, tokens - 10);
    for (std::size_t at = tokens - 10; at < tokens; ++at) {
      const uint64_t before = stat_of(cache.get(), "tokens_read"), pages = stat_of(cache.get(), "pages_touched");
      const auto plain = step(cache.get(), t, at, 1, &o);
      const uint64_t between = stat_of(cache.get(), "tokens_read"), pages_between = stat_of(cache.get(), "pages_touched");
      REQUIRE_OK(kv_cache_truncate(cache.get(), at, error));
      const auto with_cap = step(cache.get(), t, at, 1, &capped);
      CHECK(between > before);
      CHECK(stat_of(cache.get(), "tokens_read") - between == between - before);
      CHECK(stat_of(cache.get(), "pages_touched") - pages_between == pages_between - pages);
      for (uint32_t l = 0; l < t.shape.layers && !adds_tail; ++l) CHECK(largest_difference(with_cap[l], plain[l]) < page_tolerance);
    }
  }
}
