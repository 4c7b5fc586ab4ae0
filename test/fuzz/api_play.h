// What a sequence of calls acts on and what it may expect: sessions with the tokens that they
// should have, files, a library.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "../strategies.h"
#include "../temp_folder.h"
#include "tiny_model.h"

namespace kvasir::test {

constexpr int max_calls = 24;
constexpr std::size_t lines = 4, files = 3;
constexpr uint64_t context = 600, long_context = 4096;
constexpr std::size_t long_tokens = 2200;  // more than the first probe and sketch take
constexpr std::size_t max_text = 120;

struct Choice {
  const char* strategy;
  double budget;  // 0: the default
  uint32_t window, chunk, precision;
};
constexpr Choice choices[] = {
    {"quest", 64, 8, 32, KV_PRECISION_INT8},  {"auto", 0, 64, 0, KV_PRECISION_INT8},
    {"full", 0, 16, 7, KV_PRECISION_F32},     {"infllm", 64, 8, 64, KV_PRECISION_INT8},
    {"snapkv", 64, 8, 64, KV_PRECISION_INT8}, {"bounded", 64, 1, 16, KV_PRECISION_INT8},
    {"window", 0, 8, 5, KV_PRECISION_INT8},   {"filter-layers", 64, 8, 32, KV_PRECISION_INT8},
    {"flat", 1, 8, 33, KV_PRECISION_INT8},    {"dipr", 64, 8, 32, KV_PRECISION_INT8},
    {"hnsw", 64, 8, 64, KV_PRECISION_INT8},   {"ood", 64, 8, 64, KV_PRECISION_INT8},
    {"ivf", 64, 8, 64, KV_PRECISION_INT8},    {"dipr-graph", 64, 8, 64, KV_PRECISION_INT8}};

// Of a long document: to make an index, or to read everything again.
inline bool takes_long(std::string_view strategy) {
  constexpr std::string_view names[] = {"hnsw", "ood", "ivf", "dipr-graph", "infllm"};
  return std::find(std::begin(names), std::end(names), strategy) != std::end(names);
}

// How a session would go on: logarithms of the probabilities of two tokens. Nothing where that is
// not known.
using Outlook = std::optional<std::array<float, 2>>;

struct Line {
  kv_session* session = nullptr;
  std::vector<int32_t> tokens;
  kv_session_options options{};
  bool damaged = false;             // it is over a file that may be damaged
  std::size_t asked_at = SIZE_MAX;  // tokens before the first question that was kept
  Outlook outlook;                  // once it was asked for, until something changes it

  bool limited() const { return options.memory_limit != 0; }
};

// What the next call is given besides its own arguments.
struct Armed {
  bool fired = false, reenters = false;
  int stops_after = -1;              // callbacks, then non-zero
  uint64_t fails_from = UINT64_MAX;  // allocations
  bool any() const { return fired || stops_after >= 0 || fails_from != UINT64_MAX; }
};

struct Stage {
  TempFolder folder;
  std::string model_path = folder.file("model.gguf"), long_path = folder.file("long.kv");
  std::string spill = folder.file("spill"), library_path = folder.file("library");
  kv_model* model = nullptr;
  kv_cancel* fired = nullptr;

  Stage();
  ~Stage() { kv_close(model), kv_cancel_release(fired); }
};

inline const kv_strategy* decode_of(const char* name, double budget) {
  return budget > 0 ? strategies::budgeted(name, budget) : strategies::strategy(name);
}

inline kv_session_options options_of(const Choice& choice, uint64_t tokens, uint64_t memory,
                                     const char* spill) {
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = 1;
  o.context_tokens = tokens;
  o.decode = decode_of(choice.strategy, choice.budget);
  o.window_tokens = choice.window, o.prefill_chunk = choice.chunk, o.precision = choice.precision;
  o.memory_limit = memory;
  o.spill_directory = spill;
  return o;
}

inline Stage::Stage() {
  write_tiny_model(model_path);
  std::filesystem::create_directory(spill);
  require(kv_open(model_path.c_str(), nullptr, nullptr, &model, nullptr) == KV_OK &&
              kv_cancel_create(&fired, nullptr) == KV_OK,
          "a stage");
  kv_cancel_fire(fired);
  std::vector<int32_t> tokens;
  for (std::size_t i = 0; i < long_tokens; ++i) tokens.push_back(static_cast<int32_t>(i * i % 251));
  kv_session* session = nullptr;
  const kv_session_options o =
      options_of({"full", 0, 8, 512, KV_PRECISION_INT8}, long_context, 0, spill.c_str());
  require(kv_session_open(model, &o, &session, nullptr) == KV_OK &&
              kv_prefill_tokens(session, tokens.data(), tokens.size(), nullptr, nullptr, nullptr) ==
                  KV_OK &&
              kv_save(session, long_path.c_str(), nullptr, nullptr) == KV_OK,
          "a long document");
  kv_session_close(session);
}

inline std::vector<int32_t> tokens_of(const kv_session* session) {
  std::size_t count = 0;
  (void)kv_session_tokens(session, nullptr, 0, &count, nullptr);
  std::vector<int32_t> out(count);
  require(kv_session_tokens(session, out.data(), count, &count, nullptr) == KV_OK &&
              count == out.size(),
          "the sequence");
  return out;
}

inline bool begins_with(const std::vector<int32_t>& all, const std::vector<int32_t>& first) {
  return all.size() >= first.size() && std::equal(first.begin(), first.end(), all.begin());
}

class Play {
 public:
  Play(Stage* stage, Recipe recipe) : stage_(*stage), recipe_(recipe) {}
  ~Play() {
    for (Line& line : lines_) kv_session_close(line.session);
    kv_library_close(library_);
    for (std::size_t f = 0; f < files; ++f) std::filesystem::remove(path(f));
    std::filesystem::remove_all(stage_.library_path);
    for (const auto& left : std::filesystem::directory_iterator(stage_.folder.path())) {
      const std::string name = left.path().filename().string();
      require(name == "model.gguf" || name == "long.kv" || name == "spill",
              "no file is left behind");
    }
    require(std::filesystem::is_empty(stage_.spill), "spilled pages are in no file with a name");
  }

  void run() {
    for (int i = 0; i < max_calls && !recipe_.empty(); ++i) step();
  }

 private:
  std::string path(std::size_t file) const {
    return file == files ? stage_.long_path : stage_.folder.file("file" + std::to_string(file));
  }
  uint64_t memory(uint8_t how) {
    return how % 4 == 3 ? 200'000 + uint64_t{recipe_.byte()} * 4096 : 0;
  }
  std::string text() { return std::string(recipe_.text().substr(0, max_text)); }
  Line& line() { return lines_[recipe_.byte() % lines]; }
  void step();
  void arm();
  void open();
  void prefill(bool as_text);
  void generate();
  void next();
  void rewind();
  void fork();
  void save();
  void load();
  void set_strategy();
  void score();
  void prepare();
  void pass_null();
  void look();
  void same_after_loading();
  void use_files();
  void spoil();
  void use_library();

  kv_control control() {
    kv_control o;
    kv_init(&o, sizeof o);
    o.cancel = armed_.fired ? stage_.fired : nullptr;
    o.progress = on_progress, o.user = this;
    return o;
  }
  int32_t called_back() {
    if (armed_.reenters && busy_) {
      int32_t token = -1;
      require(kv_session_next(busy_, nullptr, nullptr, &token, nullptr, nullptr) == KV_BUSY &&
                  kv_session_rewind(busy_, 0, nullptr) == KV_BUSY,
              "a callback finds its handle busy");
    }
    return armed_.stops_after >= 0 && armed_.stops_after-- == 0;
  }
  static int32_t on_progress(int32_t, uint64_t, uint64_t, void* user) {
    return static_cast<Play*>(user)->called_back();
  }
  static int32_t on_text(const char*, size_t, void* user) {
    return static_cast<Play*>(user)->called_back();
  }

  // Makes a call as it was armed for; what it may answer besides `allowed` follows from that.
  template <class Call>
  kv_status guarded(const char* name, const Line* on, std::initializer_list<kv_status> allowed,
                    Call call) {
    kv_error error{};
    kv_status status = KV_OK;
    const Armed was = armed_;
    busy_ = on ? on->session : nullptr;
    {
      Allocations allocations(was.fails_from);
      status = call(&error);
      failed_ = Allocations::failed();
    }
    busy_ = nullptr;
    armed_ = {};
    const bool expected = (status == KV_CANCELLED && (was.fired || was.stops_after >= 0)) ||
                          (status == KV_NO_MEMORY && failed_) ||
                          (status == KV_CORRUPT && on && on->damaged) ||
                          (status == KV_LIMIT && on && on->limited());
    if (status != KV_OK && expected) {
      require(error.status == status && error.message[0] != 0, "a refusal says why");
      return status;
    }
    return check_status(name, status, error, allowed);
  }

  // Found on a copy, which has to be of the session as it is.
  Outlook outlook(Line* line) {
    if (!line->outlook) line->outlook = look_ahead(*line);
    return line->outlook;
  }
  Outlook look_ahead(const Line& on) {
    kv_session* copy = nullptr;
    if (!on.session || on.tokens.empty() || on.tokens.size() + 2 > on.options.context_tokens)
      return {};
    require(kv_session_fork(on.session, &copy, nullptr) == KV_OK,
            "a session can be copied at any time");
    std::array<float, 2> found{};
    const int32_t asked[] = {5, 97};
    const kv_status status = kv_session_score(copy, asked, 2, found.data(), nullptr, nullptr);
    require(status == KV_OK || (status == KV_LIMIT && on.limited()) ||
                (status == KV_CORRUPT && on.damaged),
            "a session can be asked at any time");
    kv_session_close(copy);
    if (status != KV_OK) return {};
    return found;
  }
  void check_outlook(const Line& on, const Outlook& before) {
    if (!before) return;
    const Outlook after = look_ahead(on);
    require(after || on.limited() || on.damaged,
            "a session that could be asked can be asked again");
    require(!after || std::memcmp(&*after, &*before, sizeof *after) == 0,
            "a call that changes nothing leaves a session that goes on as it would have");
  }
  // Takes what a call has added to the sequence, at most `most` tokens.
  void take_added(Line* on, std::size_t most) {
    const std::vector<int32_t> now = tokens_of(on->session);
    require(begins_with(now, on->tokens) && now.size() - on->tokens.size() <= most,
            "the sequence is continued, by no more than was read");
    require(now.size() <= on->options.context_tokens, "the sequence keeps within its context");
    if (now.size() > on->tokens.size()) on->outlook.reset();
    on->tokens = now;
  }
  void put(Line* to, kv_session* session, std::vector<int32_t> tokens, const Line& like) {
    kv_session_close(to->session);
    *to = {session, std::move(tokens), like.options, like.damaged, like.asked_at, {}};
    require(tokens_of(session) == to->tokens, "a new session has the tokens that it should");
  }

  Stage& stage_;
  Recipe recipe_;
  Armed armed_;
  bool failed_ = false;
  kv_session* busy_ = nullptr;
  std::array<Line, lines> lines_;
  struct File {
    bool exists = false;
    bool over_damage = false;  // saved by a session over damage, of which the file may have nothing
    bool flipped = false;      // damage of its own
    std::vector<int32_t> tokens;
    std::size_t asked_at = SIZE_MAX;
    uint32_t precision = 0;

    bool may_be_damaged() const { return over_damage || flipped; }
  };
  std::array<File, files> files_;
  kv_library* library_ = nullptr;
};

}  // namespace kvasir::test
