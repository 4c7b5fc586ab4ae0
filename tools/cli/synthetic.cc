// Synthetic keys make a selector work as a model's keys do. Every head has a mean. Around it lie
// the centres of topics, which follow one another like paragraphs, and around these the keys. In
// every head one key in 512 is three times as far from the mean: queries in its direction find it
// first. Values lie around a mean too, independent of the keys.
//
// The sizes make attention concentrate. The bundled model's keys have an RMS of 1.2 to 5.5 around
// means of 0.8 to 2.9, by layer; these have 1.3 around 1.2. By the estimate of "bounded", 1% of
// 32,768 tokens with sinks and window have 84% of its attention, and 41% in a model of random
// weights of width 4,096. With strength 1 they have 59% of the bundled model's (8,192 tokens).
#include "synthetic.h"

#include <algorithm>
#include <future>
#include <thread>

#include "eval_random.h"
#include "failure.h"
#include "kvasir_experimental.h"
#include "number_text.h"

namespace tool {
namespace {

constexpr uint64_t topics = 64, topic_tokens = 300, strong_one_in = 512;
constexpr float centre_size = 2, spread = 1, mean_size = 2, value_size = 2, strength = 3;
constexpr uint64_t max_floats = uint64_t{1} << 23;  // of keys per step
// tokens, as in prefill: a memory limit must hold a step
constexpr uint64_t max_step = 512;

enum class Part : uint64_t { mean, centre, topic, token };

// The random numbers of a part of the document, the same in any order of making.
Random stream(uint64_t seed, Part part, uint64_t at, uint64_t layer) {
  const uint64_t name[] = {seed, static_cast<uint64_t>(part), at, layer};
  return Random({reinterpret_cast<const char*>(name), sizeof name});
}

// -1 to 1.
float number(uint64_t bits) { return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f; }
float number(Random& random) { return number(random.bits()); }

}  // namespace

SyntheticDocument::SyntheticDocument(Console& console, const kv_model_info& model,
                                     const SessionFlags& flags, uint64_t seed)
    : console_(console), model_(model), flags_(flags), seed_(seed),
      width_(size_t{model.kv_heads} * model.head_dim),
      step_tokens_(std::clamp<uint64_t>(max_floats / (model.layers * width_), 1, max_step)) {
  make_centres();
  kv_cache_shape shape = initialised<kv_cache_shape>();
  shape.layers = model.layers;
  shape.heads = model.heads;
  shape.kv_heads = model.kv_heads;
  shape.head_dim = model.head_dim;
  shape.max_tokens = uint64_t{1} << 30;
  kv_error error{};
  kv_strategy* full = nullptr;  // the cache itself attends nothing
  check(kv_strategy_create("full", &full, &error), error);
  const Strategy strategy(full);
  kv_cache_options options = initialised<kv_cache_options>();
  options.threads = flags.threads;
  options.window_tokens = flags.window_tokens;
  options.decode = full;
  options.memory_limit = flags.memory_limit;
  if (!flags.spill_directory.empty()) options.spill_directory = flags_.spill_directory.c_str();
  kv_cache* cache = nullptr;
  check(kv_cache_open(&shape, &options, &cache, &error), error);
  cache_.reset(cache);
}

void SyntheticDocument::make_centres() {
  centres_.resize(model_.layers * topics * width_);
  means_.resize(model_.layers * 2 * width_);
  for (uint32_t l = 0; l < model_.layers; ++l) {
    Random of_mean = stream(seed_, Part::mean, 0, l);
    for (size_t i = 0; i < 2 * width_; ++i)
      means_[2 * l * width_ + i] = mean_size * number(of_mean);
    for (uint64_t topic = 0; topic < topics; ++topic) {
      Random of_topic = stream(seed_, Part::centre, topic, l);
      for (size_t i = 0; i < width_; ++i)
        centres_[(l * topics + topic) * width_ + i] = centre_size * number(of_topic);
    }
  }
}

void SyntheticDocument::make_token(uint64_t token, uint32_t layer, float* k, float* v) const {
  const uint64_t topic = stream(seed_, Part::topic, token / topic_tokens, 0).below(topics);
  const float *mean = means_.data() + 2 * layer * width_, *mean_value = mean + width_,
              *centre = centres_.data() + (layer * topics + topic) * width_;
  Random random = stream(seed_, Part::token, token, layer);
  for (size_t i = 0; i < width_;) {
    const float length = random.below(strong_one_in) == 0 ? strength : 1;
    for (const size_t end = i + model_.head_dim; i < end; ++i) {
      const uint64_t bits = random.bits();
      k[i] = mean[i] + length * (centre[i] + spread * number(bits));
      v[i] = mean_value[i] + value_size * number(bits >> 32);
    }
  }
}

// Fills rows with the tokens [first, first + count) of all layers, with all threads.
void SyntheticDocument::make(uint64_t first, uint64_t count, Rows* rows) const {
  const uint64_t workers = std::min<uint64_t>(
      count, flags_.threads ? flags_.threads : std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::future<void>> work;
  for (uint64_t w = 0; w < workers; ++w)
    work.push_back(std::async(std::launch::async, [=, this] {
      for (uint64_t t = count * w / workers; t < count * (w + 1) / workers; ++t)
        for (uint32_t l = 0; l < model_.layers; ++l)
          make_token(first + t, l, rows->k.data() + (l * count + t) * width_,
                     rows->v.data() + (l * count + t) * width_);
    }));
  for (std::future<void>& part : work) part.get();
}

void SyntheticDocument::grow_to(uint64_t tokens) {
  Progress progress(console_.terminal, "Generating " + grouped(tokens) + " tokens", Unit::tokens);
  const uint64_t before = tokens_;
  const size_t floats = std::min(step_tokens_, tokens - before) * model_.layers * width_;
  Rows rows{std::vector<float>(floats), std::vector<float>(floats)};
  kv_error error{};
  while (tokens_ < tokens) {
    if (console_.interrupt.fired())
      throw Failure(exit_cancelled,
                    "stopped after " + grouped(tokens_) + " of " + grouped(tokens) + " tokens");
    const uint64_t count = std::min(step_tokens_, tokens - tokens_);
    make(tokens_, count, &rows);
    for (uint32_t l = 0; l < model_.layers; ++l) {
      const size_t at = l * count * width_;
      check(kv_cache_update(cache_.get(), l, KV_F32, rows.k.data() + at, rows.v.data() + at,
                            nullptr, static_cast<uint32_t>(count), &error),
            error);
    }
    tokens_ += count;
    Progress::callback(KV_PHASE_PREFILL, tokens_ - before, tokens - before, &progress);
  }
}

Session SyntheticDocument::open(kv_model* model, std::span<const int32_t> tokens) {
  Progress progress(console_.terminal, "Prefilling the newest of " + grouped(tokens.size()),
                    Unit::tokens);
  const SessionOptions options(console_, flags_);
  const kv_control control = control_of(console_, &progress, KV_CACHE_UNCHECKED);
  kv_error error{};
  kv_session* session = nullptr;
  check(kv_session_from_cache(model, cache_.get(), tokens.data(), tokens.size(), options.get(),
                              &control, &session, &error),
        error);
  return Session(session);
}

}  // namespace tool
