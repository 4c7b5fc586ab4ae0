// kvasir-make-cache: writes a saved document of made-up keys and values for a model, so that answering can be timed at any length, also with a model of
// random weights, without reading a text. The same options and seed give the same file.
//
// Keys lie about the centres of topics, which follow one another as paragraphs do; one token in 512 has a key three times as long, which queries that
// go its way find. What the document says is nonsense.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>

#include "base/memory.h"
#include "compute/thread_pool.h"
#include "model/model.h"
#include "os/os.h"
#include "session/saved_store.h"

namespace kvasir {
namespace {

constexpr uint32_t step_tokens = 4096, topics = 64, topic_tokens = 300, strong_one_in = 512, window_tokens = 64;
constexpr float spread = 0.5f;  // of keys about their topic's centre, whose numbers are up to 1

struct Options {
  std::string model, path;
  uint64_t tokens = 131072, seed = 0;
};

// A stream of numbers for each seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u | 1) {
    for (int i = 0; i < 4; ++i) next();
  }
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1; }

 private:
  uint64_t state_;
};

// Keys and values of tokens first ... of a layer, all KV heads of a token side by side.
void make_rows(uint64_t seed, uint32_t layer, uint64_t first, uint32_t n, uint32_t width, float* k, float* v) {
  Array<float> centre(width);
  for (uint32_t t = 0; t < n; ++t, k += width, v += width) {
    const uint64_t token = first + t, topic = Random(seed + token / topic_tokens).next() % topics;
    if (t == 0 || token % topic_tokens == 0) {
      Random of_topic(seed + (uint64_t{layer} << 32) + topic);
      for (float& c : centre) c = of_topic.uniform();
    }
    Random random(seed + (uint64_t{layer} + 1) * 0x100000000u + token);
    const float length = random.next() % strong_one_in == 0 ? 3.0f : 1.0f;
    for (uint32_t i = 0; i < width; ++i) {
      k[i] = length * (centre[i] + spread * random.uniform());
      v[i] = random.uniform();
    }
  }
}

Status write(const Options& options) {
  std::shared_ptr<const Model> model;
  if (Status s = Model::open(options.model, "", &model); !s.ok()) return s;
  const ModelConfig& c = model->config();
  std::unique_ptr<ThreadPool> pool;
  if (Status s = ThreadPool::create(os::processor_count(), &pool); !s.ok()) return s;
  const Kernels& kernels = cpu_kernels();
  KvStore store(model->store_shape(), window_tokens);
  Array<float> k(std::size_t{step_tokens} * c.kv_width()), v(k.size());
  constexpr uint32_t block = 64;  // tokens that a thread makes at a time
  for (uint64_t at = 0; at < options.tokens; at += step_tokens) {
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(step_tokens, options.tokens - at));
    if (Status s = store.prepare(n); !s.ok()) return s;
    for (uint32_t l = 0; l < c.layers; ++l) {
      pool->run((n + block - 1) / block, [&](uint32_t task, uint32_t) {
        const uint32_t first = task * block;
        make_rows(options.seed, l, at + first, std::min(block, n - first), c.kv_width(), k.data() + std::size_t{first} * c.kv_width(),
                  v.data() + std::size_t{first} * c.kv_width());
      });
      store.write(l, n, k.data(), v.data());
    }
    store.commit(n, kernels, pool.get());
    std::fprintf(stderr, "\r%llu of %llu tokens", static_cast<unsigned long long>(at + n), static_cast<unsigned long long>(options.tokens));
  }
  std::fprintf(stderr, "\n");
  if (Status s = store.build_sketch(nullptr, kernels, pool.get()); !s.ok()) return s;

  Array<Token> tokens(options.tokens);
  Random random(options.seed);
  for (Token& t : tokens) t = static_cast<Token>(random.next() % c.vocabulary);
  format::Identity identity;
  identity.model = model->fingerprint();
  identity.vocabulary = c.vocabulary;
  std::snprintf(identity.model_name, sizeof identity.model_name, "%s", c.name.c_str());
  SavedTimeline state;
  state.turn = 1;  // tokens
  state.window_tokens = window_tokens;
  const SavedPart parts[] = {{format::SectionKind::tokens, tokens.data(), tokens.size() * sizeof(Token)}};
  return save_store(options.path, identity, store, state, parts, nullptr, {});
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("Writes a saved document of made-up keys and values, for benchmarks.");
  app.add_option("-m,--model", options.model, "the model, a GGUF file")->required();
  app.add_option("-n,--tokens", options.tokens, "its length")->capture_default_str()->check(CLI::Range(1u, 1u << 30));
  app.add_option("--seed", options.seed, "of the random numbers")->capture_default_str();
  app.add_option("-o,--output", options.path, "the file to write; an existing one is replaced")->required();
  CLI11_PARSE(app, argc, argv);
  if (const Status s = write(options); !s.ok()) {
    std::fprintf(stderr, "kvasir-make-cache: %s\n", s.message());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvasir

int main(int argc, char** argv) {
  try {
    return kvasir::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "kvasir-make-cache: %s\n", e.what());
    return 1;
  }
}
