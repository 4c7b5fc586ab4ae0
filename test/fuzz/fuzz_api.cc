// Any sequence of public calls on a few sessions, files and a library: every call answers as its
// entry says, the sequence is what the calls that succeeded made of it, and a call that failed
// leaves a session that goes on bit for bit as it would have.
//
// An input is a list of calls, a byte each and what they need. Some calls only prepare the next
// one: a cancel token that has fired, a callback that stops or calls back, a library allocation
// that fails.
#include "api_play.h"

#include "cachefile/format.h"

namespace kvasir::test {

void Play::arm() {
  const uint8_t how = recipe_.byte(), when = recipe_.byte();
  if (how % 4 == 0) armed_.fired = true;
  if (how % 4 == 1) armed_.stops_after = when % 8;
  if (how % 4 == 2) armed_.fails_from = 1 + when;
  if (how % 4 == 3) armed_.reenters = true;
}

void Play::open() {
  Line& on = line();
  const uint8_t which = recipe_.byte(), more = recipe_.byte();
  Line like;
  like.options = options_of(choices[which % std::size(choices)], more % 8 == 7 ? 40 : context,
                            memory(more / 8), stage_.spill.c_str());
  const kv_session_options& o = like.options;
  kv_session* session = nullptr;
  const kv_status status = guarded("kv_session_open", &like, {KV_BAD_ARGUMENT}, [&](kv_error* e) {
    return kv_session_open(stage_.model, &o, &session, e);
  });
  require((status == KV_OK) == (session != nullptr), "a session or an error");
  require((status == KV_BAD_ARGUMENT) ==
              (like.limited() && o.precision == KV_PRECISION_F32 && !failed_),
          "what is kept in full has no budget");
  if (session) put(&on, session, {}, like);
}

void Play::prefill(bool as_text) {
  Line& on = line();
  const kv_control o = control();
  const std::string read = text();
  const uint8_t times = recipe_.byte();
  std::vector<int32_t> ids;
  for (int i = 0; !as_text && i <= times % 4; ++i)
    for (const char c : read) ids.push_back(static_cast<unsigned char>(c));
  if (!as_text && times > 250 && !ids.empty()) ids.back() = times % 2 ? -1 : 1000;
  const auto before = outlook(&on);
  uint64_t done = 99, bytes = 99;
  const char* const call = as_text ? "kv_prefill" : "kv_prefill_tokens";
  const kv_status status =
      guarded(call, &on, {KV_BAD_ARGUMENT, KV_BAD_STATE, KV_CONTEXT_FULL}, [&](kv_error* e) {
        return as_text ? kv_prefill(on.session, read.data(), read.size(), &o, &done, &bytes, e)
                       : kv_prefill_tokens(on.session, ids.data(), ids.size(), &o, &done, e);
      });
  if (!on.session) return require(status == KV_BAD_ARGUMENT, "there is no session");
  require(status != KV_BAD_STATE || (as_text && on.asked_at != SIZE_MAX),
          "a document is read until a question is kept");
  require(status != KV_OK || !as_text || on.asked_at == SIZE_MAX, "and not after it");
  const std::size_t had = on.tokens.size();
  take_added(&on, 4 * max_text + 64);
  require(on.tokens.size() == had + done, "tokens_done is what was added");
  require(!as_text || bytes <= read.size(), "bytes_done is within the text");
  if (status == KV_OK)
    return require(as_text ? bytes == read.size() : done == ids.size(), "all was read");
  require(status != KV_CONTEXT_FULL || done == 0, "what does not fit is not begun");
  if (done == 0) check_outlook(on, before);
}

void Play::generate() {
  Line& on = line();
  kv_generate_options o;
  kv_init(&o, sizeof o);
  const uint8_t how = recipe_.byte();
  const std::string question = text();
  const char* stops[] = {"ab", "\xC3"};
  o.max_tokens = 1 + how % 4;
  const bool keep = how / 4 % 2;
  o.flags = keep ? KV_KEEP_TURN : 0;
  o.temperature = how / 8 % 2 ? 1.5f : 0;
  o.stop = stops, o.stop_count = how / 16 % 3;
  const kv_control c = control();
  const auto before = outlook(&on);
  const std::size_t had = on.tokens.size();
  kv_answer answer{};
  answer.struct_size = sizeof answer;
  const kv_status status = guarded(
      "kv_generate", &on, {KV_BAD_ARGUMENT, KV_BAD_STATE, KV_CONTEXT_FULL}, [&](kv_error* e) {
        return kv_generate(on.session, question.data(), question.size(), &o, &c, on_text, this,
                           &answer, e);
      });
  if (!on.session) return require(status == KV_BAD_ARGUMENT, "there is no session");
  take_added(&on, keep ? question.size() + o.max_tokens + 64 : 0);
  require(status != KV_OK || answer.answer_tokens <= o.max_tokens,
          "an answer of at most so many tokens");
  require(status != KV_BAD_STATE || (had == 0 && question.empty()), "there is something to answer");
  if (on.tokens.size() == had && (!keep || (status != KV_OK && status != KV_CANCELLED)))
    check_outlook(on, before);
  if (keep) on.outlook.reset();
  if (keep && (status == KV_OK || on.tokens.size() > had)) on.asked_at = std::min(on.asked_at, had);
}

void Play::next() {
  Line& on = line();
  kv_generate_options o;
  kv_init(&o, sizeof o);
  const uint8_t how = recipe_.byte();
  o.temperature = how % 2 ? 0.7f : 0;
  o.repetition_penalty = how / 2 % 2 ? 1.3f : 1;
  o.top_k = how / 4 % 4;
  const kv_control c = control();
  const auto before = outlook(&on);
  int32_t token = -7, end = -7;
  const kv_status status =
      guarded("kv_session_next", &on, {KV_BAD_ARGUMENT, KV_BAD_STATE, KV_CONTEXT_FULL},
              [&](kv_error* e) { return kv_session_next(on.session, &o, &c, &token, &end, e); });
  if (!on.session) return require(status == KV_BAD_ARGUMENT, "there is no session");
  require(status != KV_BAD_STATE || on.tokens.empty(), "only an empty sequence has no next token");
  require(status != KV_OK || !on.tokens.empty(), "nothing follows nothing");
  if (status == KV_OK) {
    on.tokens.push_back(token);
    on.outlook.reset();
    require(end == 0 || end == 1, "the turn ends or does not");
  } else {
    require(token == -7 && end == -7, "a failed call changes no output");
  }
  require(tokens_of(on.session) == on.tokens, "one token more, or none");
  if (status != KV_OK) check_outlook(on, before);
}

void Play::rewind() {
  Line& on = line();
  const uint64_t to = recipe_.number(2) % (on.tokens.size() + 3);
  const auto before = outlook(&on);
  const kv_status status = guarded("kv_session_rewind", &on, {KV_BAD_ARGUMENT}, [&](kv_error* e) {
    return kv_session_rewind(on.session, to, e);
  });
  if (!on.session) return require(status == KV_BAD_ARGUMENT, "there is no session");
  require((status == KV_BAD_ARGUMENT) == (to > on.tokens.size()), "back is within the sequence");
  if (status == KV_OK) on.tokens.resize(to), on.outlook.reset();
  if (status == KV_OK && to <= on.asked_at) on.asked_at = SIZE_MAX;
  require(tokens_of(on.session) == on.tokens, "back, or nowhere");
  if (status != KV_OK) check_outlook(on, before);
}

void Play::fork() {
  Line &from = line(), &to = line();
  kv_session* session = nullptr;
  const kv_status status = guarded("kv_session_fork", &from, {KV_BAD_ARGUMENT}, [&](kv_error* e) {
    return kv_session_fork(from.session, &session, e);
  });
  require((status == KV_OK) == (session != nullptr) &&
              (status == KV_OK || from.session == nullptr || failed_),
          "a fork or an error");
  if (!session) return;
  const auto before = outlook(&from);
  const std::vector<int32_t> tokens = from.tokens;
  const Line like = from;
  put(&to, session, tokens, like);
  check_outlook(to, before);
}

void Play::save() {
  Line& on = line();
  const std::size_t file = recipe_.byte() % files;
  const kv_control o = control();
  const auto before = outlook(&on);
  const kv_status status = guarded("kv_save", &on, {KV_BAD_ARGUMENT}, [&](kv_error* e) {
    return kv_save(on.session, path(file).c_str(), &o, e);
  });
  if (!on.session) return require(status == KV_BAD_ARGUMENT, "there is no session");
  if (status == KV_OK)
    files_[file] = {true, on.damaged, false, on.tokens, on.asked_at, on.options.precision};
  require(std::filesystem::exists(path(file)) == files_[file].exists,
          "the old file or the new one");
  check_outlook(on, before);
}

void Play::load() {
  Line& on = line();
  const std::size_t file = recipe_.byte() % (files + 1);
  const uint8_t which = recipe_.byte(), how = recipe_.byte();
  const bool is_long = file == files;
  Line like;
  Choice choice = choices[which % std::size(choices)];
  if (is_long && takes_long(choice.strategy)) choice.strategy = "flat";
  like.options =
      options_of(choice, is_long ? long_context : context, memory(how / 8), stage_.spill.c_str());
  like.damaged = !is_long && files_[file].may_be_damaged();
  kv_control o = control();
  o.flags = how % 2 ? KV_VERIFY : 0;
  const uint64_t prefix = how / 2 % 4 == 3 ? recipe_.number(2) % 300 : 0;
  kv_session* session = nullptr;
  const kv_status status = guarded(
      "kv_load_prefix", &like, {KV_BAD_ARGUMENT, KV_NOT_FOUND, KV_CONTEXT_FULL}, [&](kv_error* e) {
        return kv_load_prefix(stage_.model, path(file).c_str(), prefix, &like.options, &o, &session,
                              e);
      });
  require((status == KV_OK) == (session != nullptr), "a session or an error");
  require(is_long || files_[file].exists ? status != KV_NOT_FOUND : status != KV_OK,
          "a file that is there is found");
  if (!session) return;
  std::vector<int32_t> tokens = tokens_of(session);
  if (!is_long) like.options.precision = files_[file].precision;
  if (!is_long && tokens.size() > files_[file].asked_at) like.asked_at = files_[file].asked_at;
  require(is_long || begins_with(files_[file].tokens, tokens), "the tokens that were saved");
  require(tokens.size() == (prefix    ? prefix
                            : is_long ? long_tokens
                                      : files_[file].tokens.size()),
          "as many as were asked for");
  put(&on, session, std::move(tokens), like);
}

void Play::set_strategy() {
  Line& on = line();
  const Choice& choice = choices[recipe_.byte() % std::size(choices)];
  const uint8_t budget = recipe_.byte();
  if (on.tokens.size() > context && takes_long(choice.strategy)) return;
  kv_strategy* made = nullptr;
  if (budget % 8 == 7) {
    const kv_status status =
        guarded("kv_strategy_create", nullptr, {KV_BAD_ARGUMENT},
                [&](kv_error* e) { return kv_strategy_create("none", &made, e); });
    return require(status != KV_OK && !made, "a name of no strategy is refused");
  }
  const kv_strategy* const decode = decode_of(choice.strategy, budget);
  if (budget % 16 == 8) {
    require(kv_strategy_create(choice.strategy, &made, nullptr) == KV_OK, "a known strategy");
    const strategies::Owned owner(made);
    const kv_status status = guarded(
        "kv_strategy_set", nullptr, {KV_BAD_ARGUMENT},
        [&](kv_error* e) { return kv_strategy_set(made, KV_PARAM_BUDGET_FRACTION, 1.5, e); });
    return require(status != KV_OK, "no budget is more than everything");
  }
  const kv_status status =
      guarded("kv_session_set_strategy", &on, {KV_BAD_ARGUMENT},
              [&](kv_error* e) { return kv_session_set_strategy(on.session, decode, e); });
  if (!on.session) return require(status == KV_BAD_ARGUMENT, "there is no session");
  require(status != KV_BAD_ARGUMENT, "a strategy that exists is accepted");
  if (status == KV_OK) {
    on.options.decode = decode;
    on.outlook.reset();
  } else {
    check_outlook(on, on.outlook);
  }
}

void Play::score() {
  Line& on = line();
  const kv_control o = control();
  const std::string read = text();
  std::vector<int32_t> ids;
  for (const char c : read.substr(0, 6)) ids.push_back(static_cast<unsigned char>(c));
  std::vector<float> found(ids.size(), 7);
  const auto before = outlook(&on);
  const kv_status status = guarded(
      "kv_session_score", &on, {KV_BAD_ARGUMENT, KV_BAD_STATE, KV_CONTEXT_FULL}, [&](kv_error* e) {
        return kv_session_score(on.session, ids.data(), ids.size(), found.data(), &o, e);
      });
  if (!on.session) return require(status == KV_BAD_ARGUMENT, "there is no session");
  for (const float x : found)
    require(status == KV_OK ? x <= 0 : x == 7, "logarithms of probabilities, or nothing");
  require(tokens_of(on.session) == on.tokens, "the sequence is where it was");
  check_outlook(on, before);
}

void Play::prepare() {
  Line& on = line();
  const kv_control o = control();
  const auto before = outlook(&on);
  const kv_status status = guarded("kv_session_prepare", &on, {KV_BAD_ARGUMENT}, [&](kv_error* e) {
    return kv_session_prepare(on.session, &o, e);
  });
  if (on.session) check_outlook(on, before);
  else require(status == KV_BAD_ARGUMENT, "there is no session");
}

void Play::pass_null() {
  Line& on = line();
  kv_session* const s = on.session;
  std::size_t count = 0;
  const auto refused = [&](kv_status status) {
    require(status == KV_BAD_ARGUMENT, "NULL is refused");
  };
  switch (recipe_.byte() % 12) {
    case 0:
      refused(kv_session_get_stats(s, nullptr, nullptr));
      refused(kv_session_open(stage_.model, nullptr, nullptr, nullptr));
      break;
    case 1:
      refused(kv_prefill(s, nullptr, 3, nullptr, nullptr, nullptr, nullptr));
      break;
    case 2:
      refused(kv_prefill_tokens(s, nullptr, 3, nullptr, nullptr, nullptr));
      break;
    case 3:
      refused(kv_prefill_logits(s, nullptr, 3, nullptr, nullptr, nullptr));
      break;
    case 4:
      refused(kv_generate(s, nullptr, 3, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr));
      break;
    case 5:
      refused(kv_session_next(s, nullptr, nullptr, nullptr, nullptr, nullptr));
      break;
    case 6:
      refused(kv_session_score(s, nullptr, 3, nullptr, nullptr, nullptr));
      break;
    case 7:
      refused(kv_session_tokens(s, nullptr, 3, &count, nullptr));
      break;
    case 8:
      refused(kv_session_fork(s, nullptr, nullptr));
      break;
    case 9:
      refused(kv_session_stats_json(s, nullptr, 3, &count, nullptr));
      break;
    case 10:
      refused(kv_save(s, nullptr, nullptr, nullptr));
      break;
    case 11:
      refused(kv_load(stage_.model, nullptr, nullptr, nullptr, nullptr, nullptr));
      break;
  }
  if (s) require(tokens_of(s) == on.tokens, "the sequence is where it was");
}

void Play::look() {
  Line& on = line();
  if (!on.session) return;
  char json[30000];
  std::size_t size = 0;
  require(kv_session_stats_json(on.session, json, sizeof json, &size, nullptr) == KV_OK,
          "statistics");
  kv_session_stats stats;
  kv_init(&stats, sizeof stats);
  require(kv_session_get_stats(on.session, &stats, nullptr) == KV_OK &&
              stats.tokens == on.tokens.size(),
          "they are of this sequence");
  const std::size_t capacity = recipe_.byte();
  std::vector<int32_t> some(capacity, -7);
  const kv_status status = kv_session_tokens(on.session, some.data(), capacity, &size, nullptr);
  require((status == KV_LIMIT) == (capacity < on.tokens.size()) && size == on.tokens.size(),
          "how many there are, whatever fits");
  some.resize(std::min(capacity, size));
  require(begins_with(on.tokens, some), "what fits");
}

// A saved session that is loaded with the options that it has goes on as it would have.
void Play::same_after_loading() {
  Line& on = line();
  if (!on.session || armed_.any()) return;
  const auto before = outlook(&on);
  const std::string there = stage_.folder.file("same.kv");
  kv_error error{};
  kv_status status = check_status("kv_save", kv_save(on.session, there.c_str(), nullptr, &error),
                                  error, {KV_CORRUPT});
  require(status == KV_OK || on.damaged, "what is whole can be saved");
  if (status == KV_OK) {
    Line loaded = on;
    loaded.session = nullptr;
    status = check_status(
        "kv_load",
        kv_load(stage_.model, there.c_str(), &on.options, nullptr, &loaded.session, &error), error,
        {KV_LIMIT});
    require(status == KV_OK || on.limited(), "what was saved can be loaded");
    if (status == KV_OK) {
      require(tokens_of(loaded.session) == on.tokens, "the tokens that were saved");
      check_outlook(loaded, before);
    }
    kv_session_close(loaded.session);
  }
  std::filesystem::remove(there);
}

void Play::use_files() {
  const std::size_t from = recipe_.byte() % (files + 1), to = recipe_.byte() % files;
  const uint8_t what = recipe_.byte() % 4;
  const bool there = from == files || files_[from].exists;
  const kv_control o = control();
  Line like;
  like.damaged = from != files && files_[from].may_be_damaged();
  kv_file_info info{};
  info.struct_size = sizeof info;
  const auto refuse = [&](kv_status status) {
    require(there ? status != KV_NOT_FOUND : status != KV_OK, "a file that is there is found");
  };
  if (what == 0) {
    const kv_status status = guarded("kv_file_verify", &like, {KV_NOT_FOUND}, [&](kv_error* e) {
      return kv_file_verify(path(from).c_str(), &o, e);
    });
    refuse(status);
    require(from == files || !files_[from].flipped || status != KV_OK, "damage is found");
  } else if (what == 1) {
    refuse(guarded("kv_file_inspect", &like, {KV_NOT_FOUND},
                   [&](kv_error* e) { return kv_file_inspect(path(from).c_str(), &info, e); }));
    if (info.tokens && from != files)
      require(info.tokens == files_[from].tokens.size(), "a file says how many tokens it has");
  } else if (from != files) {
    const std::string packed = stage_.folder.file("packed");
    kv_status status = guarded("kv_pack", &like, {KV_NOT_FOUND}, [&](kv_error* e) {
      return kv_pack(path(from).c_str(), packed.c_str(), 0, &o, e);
    });
    refuse(status);
    require(std::filesystem::exists(packed) == (status == KV_OK), "a packed document or an error");
    if (status == KV_OK) {
      require(kv_unpack(packed.c_str(), path(to).c_str(), nullptr, nullptr) == KV_OK,
              "what was packed is restored");
      files_[to] = File(files_[from]);
      require(read_file(path(from)) == read_file(path(to)), "bit for bit");
    }
    std::filesystem::remove(packed);
  }
}

// Puts a copy with one bit flipped in the file's place; sessions over the old one keep it.
void Play::spoil() {
  const std::size_t file = recipe_.byte() % files;
  const uint64_t where = recipe_.number(3);
  if (!files_[file].exists || files_[file].flipped) return;  // a second flip may undo the first
  std::vector<uint8_t> bytes = read_file(path(file));
  // Without its magic it is something else, not damaged.
  if (bytes.empty() || where % bytes.size() < format::magic.size()) return;
  // Only what the header and the checksums cover: the file may also have bytes between sections,
  // which are zero and checked too.
  bytes[where % bytes.size()] ^= static_cast<uint8_t>(1 << (where % 7));
  write_file(path(file) + ".new", bytes);
  std::filesystem::rename(path(file) + ".new", path(file));
  files_[file].flipped = true;
}

void Play::use_library() {
  const uint8_t what = recipe_.byte();
  if (!library_) {
    kv_library_options o;
    kv_init(&o, sizeof o);
    o.max_bytes = what / 8 % 4 == 3 ? 600'000 : 0;
    (void)guarded("kv_library_open", nullptr, {}, [&](kv_error* e) {
      return kv_library_open(stage_.library_path.c_str(), &o, &library_, e);
    });
    if (!library_) return;
  }
  static constexpr const char* names[] = {nullptr, "a", "b", "c/d"};
  const char* name = names[recipe_.byte() % 4];
  if (what % 4 == 0) {
    Line& on = line();
    Line like;
    like.options =
        options_of(choices[recipe_.byte() % std::size(choices)], context, 0, stage_.spill.c_str());
    kv_library_session_options o;
    kv_init(&o, sizeof o);
    o.session = &like.options, o.name = name;
    const kv_control c = control();
    std::string read = text();
    for (int i = what / 32; i > 0 && read.size() < 300; --i) read += read;
    kv_session* session = nullptr;
    kv_library_result result{};
    result.struct_size = sizeof result;
    const kv_status status = guarded(
        "kv_library_session", nullptr, {KV_BAD_ARGUMENT, KV_CONTEXT_FULL}, [&](kv_error* e) {
          return kv_library_session(library_, stage_.model, read.data(), read.size(), &o, &c,
                                    &session, &result, e);
        });
    require((status == KV_OK) == (session != nullptr), "a session or an error");
    if (!session) return;
    require(
        result.tokens_found <= result.tokens && (result.saved == 0 || result.save_status == KV_OK),
        "what was found is of the text");
    std::vector<int32_t> tokens = tokens_of(session);
    require(tokens.size() == result.tokens, "the text's tokens");
    put(&on, session, std::move(tokens), like);
  } else if (what % 4 == 1) {
    (void)guarded("kv_library_remove", nullptr, {KV_NOT_FOUND, KV_BUSY, KV_BAD_ARGUMENT},
                  [&](kv_error* e) { return kv_library_remove(library_, name, e); });
  } else if (what % 4 == 2) {
    const char* to = names[recipe_.byte() % 4];
    (void)guarded("kv_library_rename", nullptr, {KV_NOT_FOUND, KV_BAD_STATE, KV_BAD_ARGUMENT},
                  [&](kv_error* e) { return kv_library_rename(library_, name, to, e); });
  } else if (what / 4 % 2) {
    kv_library_close(library_);
    library_ = nullptr;
  } else {
    kv_library_document document{};
    for (uint32_t i = 0;; ++i) {
      document.struct_size = sizeof document;
      const kv_status status =
          guarded("kv_library_list", nullptr, {KV_NOT_FOUND},
                  [&](kv_error* e) { return kv_library_list(library_, i, &document, e); });
      if (status != KV_OK) break;
      require(document.status == KV_OK && document.name[0] != 0 && i < 100, "documents are whole");
    }
  }
}

void Play::step() {
  switch (recipe_.byte() % 22) {
    case 0:
    case 1:
      open();
      break;
    case 2:
    case 3:
      prefill(true);
      break;
    case 4:
      prefill(false);
      break;
    case 5:
      generate();
      break;
    case 6:
    case 7:
      next();
      break;
    case 8:
      rewind();
      break;
    case 9:
      fork();
      break;
    case 10:
      save();
      break;
    case 11:
      load();
      break;
    case 12: {
      Line& on = line();
      kv_session_close(on.session);
      on = {};
      break;
    }
    case 13:
      set_strategy();
      break;
    case 14:
      score();
      break;
    case 15:
      prepare();
      break;
    case 16:
      pass_null();
      break;
    case 17:
      look();
      break;
    case 18:
      same_after_loading();
      break;
    case 19:
      use_files();
      break;
    case 20:
      recipe_.byte() % 4 ? use_library() : spoil();
      break;
    case 21:
      arm();
      break;
  }
}

}  // namespace kvasir::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static kvasir::test::Stage stage;
  kvasir::test::Play(&stage, kvasir::test::Recipe(data, size)).run();
  return 0;
}
