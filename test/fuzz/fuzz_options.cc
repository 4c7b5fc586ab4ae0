// Any option struct through the public calls that take it: accepted, and then the calls that use it
// keep their promises, or refused with KV_BAD_ARGUMENT or what the entry names, at no cost.
//
// An input is one byte, which call, and then bytes that are laid over the default options
// (exclusive or, so that zeros are the defaults), how long the struct says it is, and which of the
// target's own strings and functions its pointers lead to.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "../strategies.h"
#include "../temp_folder.h"
#include "tiny_model.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint32_t max_threads = 8;  // more start slowly; the limit itself is tried
// floats of a token's keys: larger caches are only opened
constexpr uint64_t max_cache_row = 4096;
// bytes at once: a cache of 2^20 heads keeps some for each before it has a token
constexpr std::size_t max_memory = std::size_t{128} << 20;

// A caller's struct: as long as it says, to the byte.
template <class T>
class Struct {
 public:
  T value;

  explicit Struct(Recipe* recipe, void (*init)(void*, std::size_t) = kv_init) {
    init(&value, sizeof value);
    const std::string_view over = recipe->text();
    auto* bytes = reinterpret_cast<unsigned char*>(&value);
    for (std::size_t i = sizeof(uint32_t), n = 0; i < sizeof value && n < over.size(); ++i, ++n)
      bytes[i] ^= static_cast<unsigned char>(over[n]);
    const uint8_t how = recipe->byte();
    if (how % 8 == 1) said_ = recipe->word();
    if (how % 8 == 2) said_ = static_cast<uint32_t>(sizeof(T)) + recipe->byte();
    if (how % 8 == 3) said_ = recipe->byte();
    behind_ = how / 8 % 2 ? recipe->byte() : 0;
  }
  // Once the pointers in `value` are what they should be.
  const T* given() {
    value.struct_size = said_;
    size_ = std::min<std::size_t>(std::max<std::size_t>(said_, sizeof said_), 70000);
    block_ = std::make_unique<std::byte[]>(size_);
    std::memcpy(block_.get(), &value, std::min(size_, sizeof value));
    if (size_ > sizeof value) block_[size_ - 1] = std::byte{behind_};
    return reinterpret_cast<const T*>(block_.get());
  }
  // Whether a field of this place is given.
  bool has(std::size_t end) const { return said_ >= end && said_ <= 65536; }

 private:
  uint32_t said_ = sizeof(T);
  uint8_t behind_ = 0;
  std::size_t size_ = 0;
  std::unique_ptr<std::byte[]> block_;
};

int32_t go_on(int32_t, uint64_t, uint64_t, void*) { return 0; }
int32_t stop(int32_t, uint64_t, uint64_t, void*) { return 1; }
int32_t take_text(const char*, size_t, void*) { return 0; }
void take_log(int32_t, const char* line, void*) { require(line != nullptr, "a line to log"); }

// What is the same for all inputs, opened once; and the strings of the input that runs.
struct Stage {
  TempFolder folder;
  std::string model_path = folder.file("model.gguf"), saved = folder.file("a.kv"),
              packed = folder.file("a.kvz"), other = folder.file("b"),
              library_path = folder.file("library");
  kv_model* model = nullptr;
  kv_session* session = nullptr;  // 150 tokens of at most 200
  kv_cancel *quiet = nullptr, *fired = nullptr;
  std::string texts[4];
  std::vector<int32_t> tokens;

  Stage() {
    write_tiny_model(model_path);
    require(kv_open(model_path.c_str(), nullptr, nullptr, &model, nullptr) == KV_OK,
            "the tiny model");
    for (int i = 0; i < 150; ++i) tokens.push_back(i * 7 % 256);
    kv_session_options o;
    kv_init(&o, sizeof o);
    o.threads = 1, o.context_tokens = 200, o.window_tokens = 8;
    require(kv_session_open(model, &o, &session, nullptr) == KV_OK, "a session");
    require(kv_prefill_tokens(session, tokens.data(), tokens.size(), nullptr, nullptr, nullptr) ==
                KV_OK,
            "a sequence");
    require(kv_save(session, saved.c_str(), nullptr, nullptr) == KV_OK &&
                kv_pack(saved.c_str(), packed.c_str(), 0, nullptr, nullptr) == KV_OK,
            "files");
    require(
        kv_cancel_create(&quiet, nullptr) == KV_OK && kv_cancel_create(&fired, nullptr) == KV_OK,
        "cancel tokens");
    kv_cancel_fire(fired);
  }
  ~Stage() {
    kv_session_close(session);
    kv_close(model);
    kv_cancel_release(quiet), kv_cancel_release(fired);
  }
  // A string, or none, for the pointer of an option.
  // A strategy, or none, with any parameters. One that is refused changes nothing.
  strategies::Owned strategy(Recipe* recipe, std::size_t slot) {
    static constexpr double values[] = {0, 1, 0.5, 16, 64, 1e-300, 1e18, -1, HUGE_VAL, NAN};
    const char* const chosen = name(recipe, slot);
    kv_strategy* made = nullptr;
    kv_error error{};
    if (!chosen) return nullptr;
    const kv_status status = check_status(
        "kv_strategy_create", kv_strategy_create(chosen, &made, &error), error, {KV_BAD_ARGUMENT});
    require((status == KV_OK) == (made != nullptr), "a strategy or an error");
    if (!made) return nullptr;
    for (int n = recipe->byte() % 4; n > 0; --n) {
      const uint8_t which = recipe->byte(), how = recipe->byte();
      const uint32_t param = which < 128 ? which : 1000u + which % 8;
      double value = how < std::size(values) ? values[how] : 0, before = 7, after = 7;
      if (how >= std::size(values)) {
        const uint64_t bits = recipe->number(8);
        std::memcpy(&value, &bits, sizeof value);
      }
      const bool known = kv_strategy_get(made, param, &before, nullptr) == KV_OK;
      const kv_status set = check_status(
          "kv_strategy_set", kv_strategy_set(made, param, value, &error), error, {KV_BAD_ARGUMENT});
      require(known || set == KV_BAD_ARGUMENT, "a strategy has its parameters");
      require((kv_strategy_get(made, param, &after, nullptr) == KV_OK) == known, "and keeps them");
      require(set == KV_OK ? after == after : std::memcmp(&before, &after, sizeof before) == 0,
              "a value that is refused changes nothing, and NaN is refused");
    }
    if (const uint8_t layers = recipe->byte(); layers > 0) {
      const uint32_t list[] = {layers % 4u, layers / 4 % 8u, layers / 32u};
      check_status("kv_strategy_set_layers",
                   kv_strategy_set_layers(made, list, 1 + layers % 3u, &error), error,
                   {KV_BAD_ARGUMENT});
    }
    return strategies::Owned(made);
  }
  const char* name(Recipe* recipe, std::size_t slot) {
    static constexpr const char* names[] = {
        nullptr,   "auto", "full", "window",     "quest", "flat",          "dipr",
        "bounded", "hnsw", "ood",  "dipr-graph", "ivf",   "filter-layers", "infllm",
        "snapkv",  "",     "0",    "1",          "0,1",   "chatml",        "raw"};
    const uint8_t which = recipe->byte();
    if (which < std::size(names)) return names[which];
    texts[slot] = recipe->text();
    return texts[slot].c_str();
  }
  kv_cancel* cancel(uint8_t which) const {
    return which % 3 == 0 ? nullptr : which % 3 == 1 ? quiet : fired;
  }
  kv_progress_fn progress(uint8_t which) const {
    return which % 3 == 0 ? nullptr : which % 3 == 1 ? go_on : stop;
  }
};

std::size_t count_of(const kv_session* session) {
  std::size_t count = 0;
  (void)kv_session_tokens(session, nullptr, 0, &count, nullptr);
  return count;
}

template <class T>
void few_threads(T* options) {
  if (options->threads > max_threads && options->threads < 256) options->threads = max_threads;
}

void set_call(const Stage& stage, Recipe* recipe, kv_control* options) {
  const uint8_t pointers = recipe->byte();
  options->cancel = stage.cancel(pointers);
  options->progress = stage.progress(pointers / 3);
}

// Strategies live until the session is opened, which copies them.
struct Strategies {
  strategies::Owned decode, prefill;
};

Strategies set_pointers(Stage* stage, Recipe* recipe, kv_session_options* o) {
  few_threads(o);
  Strategies made{stage->strategy(recipe, 0), stage->strategy(recipe, 1)};
  o->decode = made.decode.get();
  o->prefill = made.prefill.get();
  o->instructions = stage->name(recipe, 2);
  const uint8_t rest = recipe->byte();
  o->spill_directory = rest % 4 == 1 ? "/nowhere" : stage->folder.path().c_str();
  o->log = rest % 8 > 4 ? take_log : nullptr;
  return made;
}

// What a session that was opened does with them.
void use(Stage* stage, kv_session* session, bool instructed) {
  kv_error error{};
  uint64_t done = 0;
  kv_status status = kv_prefill_tokens(session, stage->tokens.data(), stage->tokens.size(), nullptr,
                                       &done, &error);
  check_status("kv_prefill_tokens", status, error, {KV_CONTEXT_FULL, KV_LIMIT, KV_BAD_STATE});
  require(status != KV_BAD_STATE || instructed, "tokens do not begin a session with instructions");
  require(status != KV_CONTEXT_FULL || done == 0, "what does not fit is not begun");
  const std::size_t count = count_of(session);
  int32_t token = -1, end = -1;
  status = check_status("kv_session_next",
                        kv_session_next(session, nullptr, nullptr, &token, &end, &error), error,
                        {KV_CONTEXT_FULL, KV_LIMIT, KV_BAD_STATE});
  require(count_of(session) == count + (status == KV_OK), "one token more");
  kv_generate_options ask;
  kv_init(&ask, sizeof ask);
  ask.max_tokens = 2;
  status = kv_generate(session, "a", 1, &ask, nullptr, take_text, nullptr, nullptr, &error);
  check_status("kv_generate", status, error, {KV_CONTEXT_FULL, KV_LIMIT});
  require(count_of(session) == count + (token >= 0), "the sequence is back where it was");
  check_status("kv_session_prepare", kv_session_prepare(session, nullptr, &error), error,
               {KV_LIMIT});
  char json[20000];
  std::size_t size = 0;
  check_status("kv_session_stats_json",
               kv_session_stats_json(session, json, sizeof json, &size, &error), error, {});
  require(size <= sizeof json && std::strlen(json) == size - 1, "all of the statistics");
}

void open_session(Stage* stage, Recipe* recipe, bool load) {
  Struct<kv_session_options> options(recipe);
  Strategies made = set_pointers(stage, recipe, &options.value);
  const bool instructed = options.has(offsetof(kv_session_options, instructions) + sizeof(void*)) &&
                          options.value.instructions && *options.value.instructions;
  const kv_session_options* given = options.given();
  const auto tokens = load ? recipe->number(1) : 0;
  kv_error error{};
  kv_session* session = nullptr;
  const kv_status status = load ? kv_load_prefix(stage->model, stage->saved.c_str(), tokens, given,
                                                 nullptr, &session, &error)
                                : kv_session_open(stage->model, given, &session, &error);
  check_status(load ? "kv_load_prefix" : "kv_session_open", status, error,
               {KV_BAD_ARGUMENT, KV_LIMIT, KV_NOT_FOUND, KV_CONTEXT_FULL, KV_MODEL_MISMATCH});
  require(status != KV_MODEL_MISMATCH || (load && instructed), "the file has no instructions");
  made = {};
  require((status == KV_OK) == (session != nullptr), "a session or an error");
  if (!session) return;
  require(!load || count_of(session) == (tokens ? tokens : stage->tokens.size()),
          "the tokens that were asked for");
  use(stage, session, instructed);
  kv_session_close(session);
}

void set_strategy(Stage* stage, Recipe* recipe) {
  strategies::Owned decode = stage->strategy(recipe, 0);
  kv_session* session = nullptr;
  require(kv_session_fork(stage->session, &session, nullptr) == KV_OK, "a fork");
  kv_error error{};
  check_status("kv_session_set_strategy", kv_session_set_strategy(session, decode.get(), &error),
               error, {KV_BAD_ARGUMENT});
  decode.reset();
  check_status("kv_session_measure", kv_session_measure(session, recipe->byte(), &error), error,
               {KV_BAD_ARGUMENT});
  int32_t token = -1;
  require(kv_session_next(session, nullptr, nullptr, &token, nullptr, nullptr) == KV_OK,
          "a strategy that was accepted works, and a refused one changed nothing");
  kv_session_close(session);
}

void generate(Stage* stage, Recipe* recipe, bool next) {
  Struct<kv_generate_options> options(recipe);
  const uint8_t pointers = recipe->byte();
  const char* stops[] = {stage->name(recipe, 0), stage->name(recipe, 1)};
  options.value.stop = pointers / 27 % 2 ? stops : nullptr;
  if (options.value.stop_count > 2 && options.value.stop) options.value.stop_count %= 3;
  options.value.on_thinking = pointers / 54 % 2 ? take_text : nullptr;
  Struct<kv_control> control(recipe);
  control.value.cancel = stage->cancel(pointers);
  control.value.progress = stage->progress(pointers / 3);
  const kv_control* const controlled = control.given();
  const std::string question(recipe->text());
  kv_session* session = nullptr;
  require(kv_session_fork(stage->session, &session, nullptr) == KV_OK, "a fork");
  const std::size_t before = count_of(session);
  const kv_generate_options* given = options.given();
  kv_error error{};
  if (next) {
    int32_t token = -1;
    const kv_status status = kv_session_next(session, given, controlled, &token, nullptr, &error);
    check_status("kv_session_next", status, error, {KV_BAD_ARGUMENT, KV_CANCELLED});
    require((status == KV_OK) == (token >= 0) && count_of(session) == before + (status == KV_OK),
            "a token or an error");
  } else {
    kv_answer answer{};
    answer.struct_size = sizeof answer;
    const kv_status status = kv_generate(session, question.data(), question.size(), given,
                                         controlled, take_text, nullptr, &answer, &error);
    check_status("kv_generate", status, error,
                 {KV_BAD_ARGUMENT, KV_CANCELLED, KV_CONTEXT_FULL, KV_UNSUPPORTED});
    const bool keeps = options.has(offsetof(kv_generate_options, flags) + 4) &&
                       (options.value.flags & KV_KEEP_TURN);
    require(keeps || count_of(session) == before, "the sequence is back where it was");
    require(count_of(session) >= before && count_of(session) <= 200,
            "the sequence only grows, up to its context");
    require(status != KV_OK || (answer.stop_reason >= 1 && answer.stop_reason <= 4),
            "an answer ends for a reason");
  }
  kv_session_close(session);
}

void call(Stage* stage, Recipe* recipe) {
  Struct<kv_control> options(recipe);
  set_call(*stage, recipe, &options.value);
  const kv_control* given = options.given();
  kv_session *session = nullptr, *loaded = nullptr;
  require(kv_session_fork(stage->session, &session, nullptr) == KV_OK, "a fork");
  kv_error error{};
  uint64_t done = 99;
  check_status("kv_prefill", kv_prefill(session, "ab ab", 5, given, &done, nullptr, &error), error,
               {KV_BAD_ARGUMENT, KV_CANCELLED});
  require(count_of(session) == 150 + done, "tokens_done is what was added");
  check_status("kv_session_prepare", kv_session_prepare(session, given, &error), error,
               {KV_BAD_ARGUMENT, KV_CANCELLED});
  float logarithms[2];
  check_status("kv_session_score",
               kv_session_score(session, stage->tokens.data(), 2, logarithms, given, &error), error,
               {KV_BAD_ARGUMENT, KV_CANCELLED});
  const kv_status saved = kv_save(session, stage->other.c_str(), given, &error);
  check_status("kv_save", saved, error, {KV_BAD_ARGUMENT, KV_CANCELLED});
  require(std::filesystem::exists(stage->other) == (saved == KV_OK), "a file or an error");
  std::filesystem::remove(stage->other);
  check_status("kv_file_verify", kv_file_verify(stage->saved.c_str(), given, &error), error,
               {KV_BAD_ARGUMENT, KV_CANCELLED});
  const kv_status status =
      kv_load(stage->model, stage->saved.c_str(), nullptr, given, &loaded, &error);
  check_status("kv_load", status, error, {KV_BAD_ARGUMENT, KV_CANCELLED});
  require((status == KV_OK) == (loaded != nullptr), "a session or an error");
  kv_session_close(loaded), kv_session_close(session);
}

void packing(Stage* stage, Recipe* recipe) {
  const uint32_t level = recipe->word();
  Struct<kv_control> options(recipe);
  set_call(*stage, recipe, &options.value);
  const kv_control* given = options.given();
  kv_error error{};
  for (const bool back : {false, true}) {
    const kv_status status =
        back ? kv_unpack(stage->packed.c_str(), stage->other.c_str(), given, &error)
             : kv_pack(stage->saved.c_str(), stage->other.c_str(), level, given, &error);
    check_status(back ? "kv_unpack" : "kv_pack", status, error, {KV_BAD_ARGUMENT, KV_CANCELLED});
    require(std::filesystem::exists(stage->other) == (status == KV_OK), "a file or an error");
    std::filesystem::remove(stage->other);
  }
}

void open_model(Stage* stage, Recipe* recipe) {
  Struct<kv_model_options> options(recipe);
  options.value.chat_format = stage->name(recipe, 0);
  options.value.log = recipe->byte() % 2 ? take_log : nullptr;
  options.value.device = nullptr;
  options.value.hash_directory = nullptr;
  Struct<kv_control> control(recipe);
  set_call(*stage, recipe, &control.value);
  kv_model* model = nullptr;
  kv_error error{};
  const kv_status status =
      kv_open(stage->model_path.c_str(), options.given(), control.given(), &model, &error);
  check_status("kv_open", status, error, {KV_BAD_ARGUMENT, KV_CANCELLED});
  require((status == KV_OK) == (model != nullptr), "a model or an error");
  kv_close(model);
}

void library(Stage* stage, Recipe* recipe) {
  Struct<kv_library_options> options(recipe);
  options.value.log = recipe->byte() % 2 ? take_log : nullptr;
  kv_library* opened = nullptr;
  kv_error error{};
  kv_status status = kv_library_open(stage->library_path.c_str(), options.given(), &opened, &error);
  check_status("kv_library_open", status, error, {KV_BAD_ARGUMENT});
  require((status == KV_OK) == (opened != nullptr), "a library or an error");
  if (!opened) return;
  Struct<kv_library_session_options> asked(recipe);
  Struct<kv_session_options> inner(recipe);
  const Strategies made = set_pointers(stage, recipe, &inner.value);
  const uint8_t pointers = recipe->byte();
  asked.value.session = pointers / 9 % 2 ? inner.given() : nullptr;
  Struct<kv_control> control(recipe);
  control.value.cancel = stage->cancel(pointers);
  control.value.progress = stage->progress(pointers / 3);
  asked.value.name = stage->name(recipe, 3);
  kv_session* session = nullptr;
  kv_library_result result{};
  result.struct_size = sizeof result;
  status = kv_library_session(opened, stage->model, "ab abc", 6, asked.given(), control.given(),
                              &session, &result, &error);
  check_status("kv_library_session", status, error,
               {KV_BAD_ARGUMENT, KV_CANCELLED, KV_CONTEXT_FULL, KV_LIMIT, KV_NOT_FOUND});
  require((status == KV_OK) == (session != nullptr), "a session or an error");
  require(!session || count_of(session) == result.tokens, "the text's tokens");
  kv_session_close(session);
  kv_library_close(opened);
}

void use_cache(Recipe* recipe, const kv_cache_shape& shape, kv_cache* cache, Stage* stage) {
  Struct<kv_cache_attention_options> options(recipe);
  Struct<kv_control> control(recipe);
  set_call(*stage, recipe, &control.value);
  const kv_cache_attention_options* given = options.given();
  const kv_control* controlled = control.given();
  const uint32_t tokens = 1 + recipe->byte() % 40, type = recipe->byte() % 3;
  const std::size_t number = type == KV_F32 ? 4 : 2,
                    kv = std::size_t{tokens} * shape.kv_heads * shape.head_dim,
                    q = std::size_t{tokens} * shape.heads * shape.head_dim;
  const std::string seed(recipe->text());
  std::string k(kv * number, '\0'), queries(q * number, '\0'), out(q * number, '\0');
  for (std::size_t i = 0; i < k.size() && !seed.empty(); ++i) k[i] = seed[i % seed.size()];
  for (std::size_t i = 0; i < queries.size() && !seed.empty(); ++i)
    queries[i] = seed[(i + 1) % seed.size()];
  kv_error error{};
  for (int step = 0; step < 4; ++step) {
    for (uint32_t layer = 0; layer < std::min(shape.layers, 64u); ++layer) {
      kv_status status =
          kv_cache_update(cache, layer, type, k.data(), k.data(), queries.data(), tokens, &error);
      check_status("kv_cache_update", status, error,
                   {KV_BAD_ARGUMENT, KV_CONTEXT_FULL, KV_BAD_STATE, KV_LIMIT, KV_NO_SPACE, KV_IO});
      if (status != KV_OK) return;
      status = kv_cache_attention(cache, layer, type, queries.data(), out.data(), tokens, given,
                                  controlled, &error);
      check_status("kv_cache_attention", status, error,
                   {KV_BAD_ARGUMENT, KV_CANCELLED, KV_BAD_STATE});
    }
  }
  char json[2000];
  std::size_t size = 0;
  require(kv_cache_stats_json(cache, json, sizeof json, &size, nullptr) == KV_OK, "statistics");
  check_status("kv_cache_truncate", kv_cache_truncate(cache, recipe->byte(), &error), error,
               {KV_BAD_ARGUMENT});
}

void cache(Stage* stage, Recipe* recipe) {
  const auto init = [](void* shape, std::size_t size) {
    auto* const s = static_cast<kv_cache_shape*>(shape);
    kv_init(s, size);
    s->layers = 2, s->heads = 4, s->kv_heads = 2, s->head_dim = 8, s->max_tokens = 300;
  };
  Struct<kv_cache_shape> shape(recipe, init);
  Struct<kv_cache_options> options(recipe);
  few_threads(&options.value);
  const strategies::Owned decode = stage->strategy(recipe, 0);
  options.value.decode = decode.get();
  // the input's bytes: no byte more says which folder
  const auto over = reinterpret_cast<std::uintptr_t>(options.value.spill_directory);
  options.value.spill_directory = over % 4 == 1 ? "/nowhere" : stage->folder.path().c_str();
  kv_cache* opened = nullptr;
  kv_error error{};
  const kv_status status = kv_cache_open(shape.given(), options.given(), &opened, &error);
  check_status("kv_cache_open", status, error,
               {KV_BAD_ARGUMENT, KV_LIMIT, KV_NOT_FOUND, KV_PERMISSION, KV_NO_SPACE});
  require((status == KV_OK) == (opened != nullptr), "a cache or an error");
  if (!opened) return;
  const kv_cache_shape& s = shape.value;
  const bool whole = shape.has(offsetof(kv_cache_shape, identity));
  if (whole && uint64_t{s.layers} * s.heads * s.head_dim <= max_cache_row)
    use_cache(recipe, s, opened, stage);
  kv_cache_close(opened);
}

// Result structs are written as far as they say, and no byte more.
template <class T, class Call>
void result(Recipe* recipe, const char* name, std::initializer_list<kv_status> allowed, Call ask) {
  Struct<T> asked(recipe);
  T* given = const_cast<T*>(asked.given());
  kv_error error{};
  check_status(name, ask(given, &error), error, allowed);
}

void results(Stage* stage, Recipe* recipe) {
  switch (recipe->byte() % 7) {
    case 0:
      result<kv_model_info>(recipe, "kv_model_get_info", {KV_BAD_ARGUMENT}, [&](auto* i, auto* e) {
        return kv_model_get_info(stage->model, i, e);
      });
      break;
    case 1:
      result<kv_strategy_info>(
          recipe, "kv_strategy_list", {KV_BAD_ARGUMENT, KV_NOT_FOUND},
          [&](auto* i, auto* e) { return kv_strategy_list(recipe->byte(), i, e); });
      break;
    case 2:
      result<kv_file_info>(recipe, "kv_file_inspect", {KV_BAD_ARGUMENT}, [&](auto* i, auto* e) {
        return kv_file_inspect(stage->saved.c_str(), i, e);
      });
      break;
    case 3:
      result<kv_packed_info>(recipe, "kv_packed_inspect", {KV_BAD_ARGUMENT}, [&](auto* i, auto* e) {
        return kv_packed_inspect(stage->packed.c_str(), i, e);
      });
      break;
    case 4:
      result<kv_answer>(recipe, "kv_generate", {KV_BAD_ARGUMENT}, [&](auto* a, auto* e) {
        return kv_generate(stage->session, "a", 1, nullptr, nullptr, nullptr, nullptr, a, e);
      });
      break;
    case 5:
      result<kv_model_info>(recipe, "kv_model_inspect", {KV_BAD_ARGUMENT}, [&](auto* i, auto* e) {
        return kv_model_inspect(stage->model_path.c_str(), i, e);
      });
      break;
    case 6:
      result<kv_session_stats>(
          recipe, "kv_session_get_stats", {KV_BAD_ARGUMENT},
          [&](auto* s, auto* e) { return kv_session_get_stats(stage->session, s, e); });
      break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static Stage stage;
  Recipe recipe(data, size);
  const uint8_t what = recipe.byte() % 11;
  {
    Allocations allocations;
    switch (what) {
      case 0:
        open_session(&stage, &recipe, false);
        break;
      case 1:
        open_session(&stage, &recipe, true);
        break;
      case 2:
        set_strategy(&stage, &recipe);
        break;
      case 3:
        generate(&stage, &recipe, false);
        break;
      case 4:
        generate(&stage, &recipe, true);
        break;
      case 5:
        call(&stage, &recipe);
        break;
      case 6:
        packing(&stage, &recipe);
        break;
      case 7:
        open_model(&stage, &recipe);
        break;
      case 8:
        library(&stage, &recipe);
        break;
      case 9:
        cache(&stage, &recipe);
        break;
      case 10:
        results(&stage, &recipe);
        break;
    }
    require(allocations.largest() <= max_memory,
            "memory follows from what is read, not from what is asked for");
  }
  require(count_of(stage.session) == 150, "forks and refusals leave the sequence as it was");
  return 0;
}
