// Any checkpoint through kv_session_from_checkpoint: a session that goes on and can be saved, or a
// refusal that says why, at no more memory than the arrays take.
//
// An input is a model, how the call is made, how many tokens there are and which the checkpoint is
// of, and the bytes that its numbers repeat. Each further part changes one array of the complete
// checkpoint that the model needs.
#include <memory>

#include "../temp_folder.h"
#include "model/model.h"
#include "tiny_model.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* names[] = {"lfm2", "qwen35", "gemma3", "granitehybrid"};
constexpr std::size_t max_memory = std::size_t{64} << 20;  // bytes at once

struct Subject {
  std::shared_ptr<const Model> model;  // for its config
  kv_model* opened = nullptr;
};

struct Stage {
  TempFolder folder;
  std::string saved = folder.file("a.kv");
  Subject subjects[std::size(names)];
  kv_cancel* fired = nullptr;

  Stage() {
    for (std::size_t i = 0; i < std::size(names); ++i) {
      const std::string path = std::string(MODELS "/") + names[i];
      require(Model::open(path, "", &subjects[i].model).ok(), "a model of the corpus");
      require(kv_open(path.c_str(), nullptr, nullptr, &subjects[i].opened, nullptr) == KV_OK,
              "a model of the corpus");
    }
    require(kv_cancel_create(&fired, nullptr) == KV_OK, "a cancel token");
    kv_cancel_fire(fired);
  }
  ~Stage() {
    for (const Subject& s : subjects) kv_close(s.opened);
    kv_cancel_release(fired);
  }
};

// One array, in memory of exactly its size.
struct Part {
  uint32_t layer = 0, layout = 0, type = KV_F32;
  uint64_t count = 0;
  bool is_null = false;
  std::shared_ptr<std::byte[]> bytes;

  std::size_t size() const { return static_cast<std::size_t>(count) * (type == KV_F32 ? 4 : 2); }
  void fill(std::string_view pattern) {
    bytes = std::shared_ptr<std::byte[]>(new std::byte[size()]);
    for (std::size_t i = 0; i < size(); ++i)
      bytes.get()[i] =
          pattern.empty() ? std::byte{} : static_cast<std::byte>(pattern[i % pattern.size()]);
  }
};

struct Checkpoint {
  uint64_t tokens = 0;
  std::vector<Part> parts;
  std::vector<kv_layer_state> states;
  kv_checkpoint given{};

  const kv_checkpoint* raw() {
    states.clear();
    for (const Part& p : parts)
      states.push_back(
          {p.layer, p.layout, p.type, 0, p.is_null ? nullptr : p.bytes.get(), p.count});
    given = {sizeof given, static_cast<uint32_t>(states.size()), tokens, states.data()};
    return &given;
  }
};

// What the model's layers keep after so many tokens.
Checkpoint complete(const ModelConfig& config, uint64_t tokens, std::string_view pattern) {
  Checkpoint out;
  out.tokens = tokens;
  const RecurrentConfig& r = config.recurrent;
  for (uint32_t l = 0; l < config.depth(); ++l) {
    const LayerConfig& layer = config.layer(l);
    const auto add = [&](uint32_t layout, uint64_t count) {
      out.parts.push_back({l, layout, KV_F32, count, false, nullptr});
    };
    if (layer.has_attention() && layer.is_windowed()) {
      const uint64_t rows = std::min<uint64_t>(tokens, config.window - 1);
      add(KV_STATE_KEYS, rows * config.windows.kv_width());
      add(KV_STATE_VALUES, rows * config.windows.kv_width());
    }
    if (!layer.is_recurrent()) continue;
    add(KV_STATE_INPUTS, r.inputs_size());
    if (r.kind == RecurrentKind::convolution) continue;
    add(r.kind == RecurrentKind::delta_net ? KV_STATE_KEY_VALUE : KV_STATE_VALUE_KEY,
        uint64_t{r.heads} * r.key_dim * r.value_dim);
  }
  for (Part& part : out.parts) part.fill(pattern);
  return out;
}

void change(Checkpoint* checkpoint, std::string_view pattern, Recipe* recipe) {
  const std::size_t which = recipe->byte();
  const uint8_t how = recipe->byte() % 8;
  if (checkpoint->parts.empty()) return;
  Part& part = checkpoint->parts[which % checkpoint->parts.size()];
  switch (how) {
    case 0:
      part.layer = recipe->word();
      break;
    case 1:
      part.layout = recipe->word();
      break;
    case 2:
      part.type = recipe->byte() % 4;
      part.fill(pattern);
      break;
    case 3:
      part.count += static_cast<uint64_t>(recipe->byte());
      part.count -= std::min<uint64_t>(part.count, 128);
      part.fill(pattern);
      break;
    case 4:
      part.is_null = true;
      break;
    case 5:
      checkpoint->parts.erase(checkpoint->parts.begin() +
                              static_cast<std::ptrdiff_t>(which % checkpoint->parts.size()));
      break;
    case 6:
      checkpoint->parts.push_back(Part(part));
      break;
    case 7: {
      const uint32_t number = recipe->word(), at = recipe->byte();
      if (part.size() >= sizeof number)
        std::memcpy(part.bytes.get() + at * sizeof number % (part.size() / 4 * 4), &number,
                    sizeof number);
      break;
    }
  }
}

kv_cache* fill_cache(const ModelConfig& config, uint32_t tokens, bool in_full) {
  kv_cache_shape shape;
  kv_cache_options options;
  kv_init(&shape, sizeof shape), kv_init(&options, sizeof options);
  shape.layers = config.layers, shape.heads = config.heads, shape.kv_heads = config.kv_heads;
  shape.head_dim = config.head_dim, shape.max_tokens = 512;
  options.threads = 1, options.window_tokens = 8;
  options.precision = in_full ? KV_PRECISION_F32 : KV_PRECISION_INT8;
  kv_cache* cache = nullptr;
  require(kv_cache_open(&shape, &options, &cache, nullptr) == KV_OK, "a cache");
  std::vector<float> rows(std::size_t{tokens} * config.kv_width());
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 7) - 3;
  for (uint32_t l = 0; l < config.layers; ++l)
    require(kv_cache_update(cache, l, KV_F32, rows.data(), rows.data(), nullptr, tokens, nullptr) ==
                KV_OK,
            "a step of the cache");
  return cache;
}

uint64_t tokens_of(kv_cache* cache) {
  kv_cache_stats stats;
  kv_init(&stats, sizeof stats);
  require(kv_cache_get_stats(cache, &stats, nullptr) == KV_OK, "statistics");
  return stats.tokens;
}

// A session that was made has all tokens, goes on, and is saved. Its numbers may be ones that a
// step cannot follow.
void use(kv_session* session, std::size_t tokens, const std::string& path) {
  std::size_t count = 0;
  (void)kv_session_tokens(session, nullptr, 0, &count, nullptr);
  require(count == tokens, "the session has the tokens");
  const int32_t token = 5;
  kv_error error{};
  const kv_status status = check_status(
      "kv_prefill_tokens", kv_prefill_tokens(session, &token, 1, nullptr, nullptr, &error), error,
      {KV_CORRUPT});
  if (status == KV_OK)
    check_status("kv_save", kv_save(session, path.c_str(), nullptr, &error), error, {KV_CORRUPT});
  kv_session_close(session);
}

int32_t stop(int32_t, uint64_t, uint64_t, void*) { return 1; }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static Stage stage;
  Recipe recipe(data, size);
  const Subject& subject = stage.subjects[recipe.byte() % std::size(names)];
  const ModelConfig& config = subject.model->config();
  const uint8_t how = recipe.byte();
  const uint32_t tokens = 1 + recipe.byte();
  const uint64_t from_tokens = recipe.number(2);
  const std::string_view pattern = recipe.text();
  Checkpoint from = complete(config, std::min<uint64_t>(from_tokens, 300), pattern),
             end = complete(config, tokens, pattern);
  from.tokens = from_tokens;
  for (int i = 0; i < 16 && !recipe.empty(); ++i)
    change(recipe.byte() % 4 == 3 ? &end : &from, pattern, &recipe);

  kv_cache* const cache = fill_cache(config, tokens, how & 1);
  std::vector<int32_t> ids(tokens);
  for (uint32_t i = 0; i < tokens; ++i)
    ids[i] = static_cast<int32_t>(3 + i * 7 % (config.vocabulary - 3));
  kv_session_options options;
  kv_control control;
  kv_init(&options, sizeof options), kv_init(&control, sizeof control);
  options.threads = 1, options.prefill_chunk = 32;
  if (how & 4) control.flags = KV_CACHE_UNCHECKED;
  if (how & 8) control.cancel = stage.fired;
  if (how & 16) control.progress = stop;
  kv_session* session = nullptr;
  kv_error error{};
  {
    Allocations allocations;
    const kv_status status =
        kv_session_from_checkpoint(subject.opened, cache, from.raw(), how & 2 ? end.raw() : nullptr,
                                   ids.data(), ids.size(), &options, &control, &session, &error);
    check_status("kv_session_from_checkpoint", status, error,
                 {KV_BAD_ARGUMENT, KV_MODEL_MISMATCH, KV_CANCELLED, KV_CORRUPT});
    require((status == KV_OK) == (session != nullptr), "a session or an error");
    require(status == KV_OK || status == KV_BAD_ARGUMENT || !(how & 8) || status == KV_CANCELLED,
            "a cancel that has fired");
    require(allocations.largest() <= max_memory, "memory follows from what is there");
  }
  if (session) use(session, tokens, stage.saved);
  require(tokens_of(cache) == tokens, "the cache stays as it is");
  kv_cache_close(cache);
  return 0;
}
