// Structs that grew or will grow: every size of a caller's header, and outputs of every size.
#include <cstring>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

// Calls `use` with a struct that says it has `size` bytes, in memory of exactly that size where
// that is possible (so that a sanitizer sees reads beyond it), its bytes beyond the known ones set
// to `rest`.
template <class Options, class Use>
kv_status with_size(std::size_t size, unsigned char rest, Use use) {
  Options known;
  kv_init(&known, sizeof known);
  const std::size_t bytes =
      std::max<std::size_t>(std::min<std::size_t>(size, 100'000), sizeof(uint32_t));
  const std::unique_ptr<uint64_t[]> memory(new uint64_t[(bytes + 7) / 8]);
  std::memset(memory.get(), rest, bytes);
  std::memcpy(memory.get(), &known, std::min(bytes, sizeof known));
  const auto stated = static_cast<uint32_t>(size);
  std::memcpy(memory.get(), &stated, sizeof stated);
  return use(reinterpret_cast<const Options*>(memory.get()));
}

// kv_init writes struct_size and zeros, for a struct of any length, and nothing beyond.
void check_init() {
  unsigned char bytes[256];
  for (std::size_t size = 0; size <= 192; ++size) {
    CAPTURE(size);
    std::memset(bytes, 0xa5, sizeof bytes);
    kv_init(bytes, size);
    const auto stated = static_cast<uint32_t>(size);
    const bool written = size >= sizeof stated;
    if (written) CHECK(std::memcmp(bytes, &stated, sizeof stated) == 0);
    for (std::size_t i = written ? sizeof stated : 0; i < sizeof bytes; ++i)
      REQUIRE(bytes[i] == (!written || i >= size ? 0xa5 : 0));
  }
}

template <class Options, class Use>
void check_sizes(const char* name, Use use) {
  CAPTURE(std::string(name));
  CHECK(use(nullptr) == KV_OK);
  for (std::size_t size :
       {std::size_t{0}, std::size_t{3}, std::size_t{65537}, std::size_t{UINT32_MAX}}) {
    CAPTURE(size);
    CHECK(with_size<Options>(size, 0, use) == KV_BAD_ARGUMENT);
  }
  for (std::size_t size : {alignof(Options), 2 * alignof(Options), sizeof(Options)})
    CHECK(with_size<Options>(size, 0, use) == KV_OK);
  for (std::size_t more : {1u, 40u, 128u}) {  // to no size of version 0.1
    CHECK(with_size<Options>(sizeof(Options) + more, 0, use) == KV_OK);
    CHECK(with_size<Options>(sizeof(Options) + more, 1, use) == KV_BAD_ARGUMENT);
  }
  CHECK(with_size<Options>(65536, 0, use) == KV_OK);
  CHECK(with_size<Options>(65536, 1, use) == KV_BAD_ARGUMENT);
}

}  // namespace

TEST_CASE("option structs of older and newer headers are understood, and wrong sizes refused") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Session session = tiny_session(100);
  check_sizes<kv_model_options>("kv_open", [](const kv_model_options* o) {
    kv_model* out = nullptr;
    const kv_status s = kv_open(tiny_path, o, nullptr, &out, nullptr);
    CHECK((s == KV_OK) == (out != nullptr));
    kv_close(out);
    return s;
  });
  check_sizes<kv_session_options>("kv_session_open", [](const kv_session_options* o) {
    kv_session* out = nullptr;
    const kv_status s = kv_session_open(tiny_model(), o, &out, nullptr);
    kv_session_close(out);
    return s;
  });
  check_sizes<kv_control>("kv_prefill", [&](const kv_control* o) {
    return kv_prefill_tokens(session.get(), nullptr, 0, o, nullptr, nullptr);
  });
  check_sizes<kv_control>("kv_save", [&](const kv_control* o) {
    return kv_save(session.get(), path.c_str(), o, nullptr);
  });
  check_sizes<kv_control>("kv_load", [&](const kv_control* o) {
    kv_session* out = nullptr;
    const kv_status s = kv_load(tiny_model(), path.c_str(), nullptr, o, &out, nullptr);
    kv_session_close(out);
    return s;
  });
  check_sizes<kv_control>("kv_file_verify", [&](const kv_control* o) {
    return kv_file_verify(path.c_str(), o, nullptr);
  });
  const std::string packed = folder.file("a.kvz");
  check_sizes<kv_control>("kv_pack", [&](const kv_control* o) {
    return kv_pack(path.c_str(), packed.c_str(), 0, o, nullptr);
  });
  check_sizes<kv_control>("kv_unpack", [&](const kv_control* o) {
    return kv_unpack(packed.c_str(), path.c_str(), o, nullptr);
  });
  check_sizes<kv_generate_options>("kv_generate", [&](const kv_generate_options* o) {
    return kv_generate(session.get(), "a", 1, o, nullptr, nullptr, nullptr, nullptr, nullptr);
  });
  check_sizes<kv_control>("kv_generate", [&](const kv_control* o) {
    return kv_generate(session.get(), "a", 1, nullptr, o, nullptr, nullptr, nullptr, nullptr);
  });
  check_sizes<kv_control>("kv_open", [](const kv_control* o) {
    kv_model* out = nullptr;
    const kv_status s = kv_open(tiny_path, nullptr, o, &out, nullptr);
    kv_close(out);
    return s;
  });
  check_sizes<kv_control>("kv_tokenize", [](const kv_control* o) {
    std::size_t count = 0;
    int32_t tokens[8];
    return kv_tokenize(tiny_model(), "a", 1, 0, o, tokens, 8, &count, nullptr);
  });
  check_sizes<kv_library_options>("kv_library_open", [&](const kv_library_options* o) {
    kv_library* out = nullptr;
    const kv_status s = kv_library_open(folder.path().c_str(), o, &out, nullptr);
    kv_library_close(out);
    return s;
  });
  TempFolder documents;
  kv_library* opened = nullptr;
  REQUIRE_OK(kv_library_open(documents.path().c_str(), nullptr, &opened, error));
  const std::unique_ptr<kv_library, void (*)(kv_library*)> library(opened, kv_library_close);
  check_sizes<kv_library_session_options>(
      "kv_library_session", [&](const kv_library_session_options* o) {
        kv_session* out = nullptr;
        const kv_status s = kv_library_session(library.get(), tiny_model(), "abc", 3, o, nullptr,
                                               &out, nullptr, nullptr);
        kv_session_close(out);
        return s;
      });
}

TEST_CASE("kv_init clears a struct of any size and sets its size") { check_init(); }

TEST_CASE("option structs of a cache of older and newer headers are understood") {
  kv_cache_shape shape;
  kv_init(&shape, sizeof shape);
  shape.layers = shape.heads = shape.kv_heads = 1;
  shape.head_dim = 8;
  shape.max_tokens = 100;
  check_sizes<kv_cache_options>("kv_cache_open", [&](const kv_cache_options* o) {
    kv_cache* out = nullptr;
    const kv_status s = kv_cache_open(&shape, o, &out, nullptr);
    kv_cache_close(out);
    return s;
  });
  kv_cache* opened = nullptr;
  REQUIRE_OK(kv_cache_open(&shape, nullptr, &opened, error));
  const std::unique_ptr<kv_cache, void (*)(kv_cache*)> cache(opened, kv_cache_close);
  static const float row[8] = {};
  REQUIRE_OK(kv_cache_update(opened, 0, KV_F32, row, row, nullptr, 1, error));
  check_sizes<kv_cache_attention_options>(
      "kv_cache_attention", [&](const kv_cache_attention_options* o) {
        float out[8];
        return kv_cache_attention(cache.get(), 0, KV_F32, row, out, 1, o, nullptr, nullptr);
      });
  check_sizes<kv_control>("kv_cache_attention", [&](const kv_control* o) {
    float out[8];
    return kv_cache_attention(cache.get(), 0, KV_F32, row, out, 1, nullptr, o, nullptr);
  });
}

TEST_CASE("a shorter struct has the defaults of the fields that it lacks") {
  kv_session_options o = small_options();
  o.precision = 99;  // beyond the size that is said
  o.struct_size = offsetof(kv_session_options, precision);
  const Session session = open_session(tiny_model(), o);
  read_tokens(session.get(), some_tokens(50));
  // no header's
  for (const std::size_t cut : {offsetof(kv_session_options, decode) + 4,
                                offsetof(kv_session_options, spill_directory) + 1}) {
    o.struct_size = static_cast<uint32_t>(cut);
    kv_session* none = nullptr;
    CHECK(kv_session_open(tiny_model(), &o, &none, nullptr) == KV_BAD_ARGUMENT);
  }
}

TEST_CASE("a field behind the size that a struct states is not used") {
  const Session session = tiny_session(50);
  const Cancel cancel = make_cancel();
  kv_cancel_fire(cancel.get());
  kv_control control = control_of(cancel.get());
  const auto ask = [&] {
    return kv_generate(session.get(), "a", 1, nullptr, &control, nullptr, nullptr, nullptr,
                       nullptr);
  };
  CHECK(ask() == KV_CANCELLED);
  control.struct_size = offsetof(kv_control, cancel);
  CHECK(ask() == KV_OK);
}

TEST_CASE("result structs are filled as far as their size goes") {
  kv_model_info whole{};
  whole.struct_size = sizeof whole;
  REQUIRE_OK(kv_model_get_info(tiny_model(), &whole, error));
  for (std::size_t size :
       {std::size_t{8}, std::size_t{20}, sizeof whole - 16, sizeof whole, sizeof whole + 64}) {
    CAPTURE(size);
    const std::unique_ptr<uint64_t[]> memory(new uint64_t[(size + 7) / 8]);
    std::memset(memory.get(), 0x5A, (size + 7) / 8 * 8);
    auto* info = reinterpret_cast<kv_model_info*>(memory.get());
    const auto stated = static_cast<uint32_t>(size);
    std::memcpy(memory.get(), &stated, sizeof stated);
    REQUIRE_OK(kv_model_get_info(tiny_model(), info, error));
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory.get());
    CHECK(std::memcmp(bytes, &stated, 4) == 0);
    CHECK(std::memcmp(bytes + 4, reinterpret_cast<const unsigned char*>(&whole) + 4,
                      std::min(size, sizeof whole) - 4) == 0);
    for (std::size_t i = sizeof whole; i < size; ++i) CHECK(bytes[i] == 0x5A);
  }
  for (uint32_t size : {0u, 3u, 4u, 7u}) {
    kv_model_info info{};
    info.struct_size = size;
    CHECK(kv_model_get_info(tiny_model(), &info, nullptr) == KV_BAD_ARGUMENT);
    CHECK(kv_model_inspect(tiny_path, &info, nullptr) == KV_BAD_ARGUMENT);
    CHECK(info.layers == 0);
    kv_answer answer{};
    answer.struct_size = size;
    const Session session = tiny_session(10);
    CHECK(kv_generate(session.get(), "a", 1, nullptr, nullptr, nullptr, nullptr, &answer,
                      nullptr) == KV_BAD_ARGUMENT);
  }
}

TEST_CASE("outputs that are too small say how much is needed") {
  const std::string text = "Some text of no great length, and again some text.";
  std::size_t count = 0;
  CHECK(kv_tokenize(tiny_model(), text.data(), text.size(), 0, nullptr, nullptr, 0, &count,
                    nullptr) == KV_LIMIT);
  REQUIRE(count > 4);
  std::vector<int32_t> all(count), part(count, -7);
  std::size_t again = 0;
  REQUIRE_OK(kv_tokenize(tiny_model(), text.data(), text.size(), 0, nullptr, all.data(), count,
                         &again, error));
  CHECK(again == count);
  CHECK(kv_tokenize(tiny_model(), text.data(), text.size(), 0, nullptr, part.data(), count - 2,
                    &again, nullptr) == KV_LIMIT);
  CHECK(again == count);
  CHECK(std::equal(part.begin(), part.end() - 2, all.begin()));
  CHECK(part[count - 2] == -7);

  std::size_t size = 0;
  CHECK(kv_detokenize(tiny_model(), all.data(), count, 0, nullptr, 0, &size, nullptr) == KV_LIMIT);
  CHECK(size == text.size());
  std::string back(size, '?');
  REQUIRE_OK(kv_detokenize(tiny_model(), all.data(), count, 0, back.data(), size, &size, error));
  CHECK(back == text);

  const Session session = tiny_session(100);
  CHECK(kv_session_tokens(session.get(), part.data(), 3, &count, nullptr) == KV_LIMIT);
  CHECK(count == 100);
  CHECK(part[0] == some_tokens(1)[0]);
  CHECK(kv_session_stats_json(session.get(), nullptr, 0, &size, nullptr) == KV_LIMIT);
  std::string json(size - 1, '?');
  CHECK(kv_session_stats_json(session.get(), json.data(), size - 1, &count, nullptr) == KV_LIMIT);
  CHECK(count == size);

  count = 99;
  REQUIRE_OK(kv_tokenize(tiny_model(), nullptr, 0, 0, nullptr, nullptr, 0, &count, error));
  CHECK(count == 0);
  REQUIRE_OK(kv_detokenize(tiny_model(), nullptr, 0, 0, nullptr, 0, &count, error));
  CHECK(count == 0);
}

TEST_CASE("values at the ends of their ranges work") {
  for (uint32_t window : {1u, 2u, 1000u, 1u << 20}) {
    for (uint32_t chunk : {1u, 7u, 4096u}) {
      CAPTURE(window);
      CAPTURE(chunk);
      kv_session_options o = small_options();
      o.window_tokens = window;
      o.prefill_chunk = chunk;
      const Session session = tiny_session(150, o);
      CHECK(peek(session.get(), 2).size() == 2);
    }
  }
  for (const char* name : {"auto", "full", "window", "quest", "bounded"}) {
    for (const double budget : {1.0, 16.0, 1e15}) {
      kv_session_options o = small_options();
      o.decode = budgeted(name, budget);
      const Session session = tiny_session(400, o);
      CHECK(peek(session.get(), 2).size() == 2);
      const kv_strategy* const all =
          strategies::make(name, {{KV_PARAM_BUDGET_FRACTION, 1}}, strategies::Fit::some);
      REQUIRE_OK(kv_session_set_strategy(session.get(), all, error));
      const kv_strategy* const least = strategy("auto", {{KV_PARAM_BUDGET_FRACTION, 1e-30}});
      REQUIRE_OK(kv_session_set_strategy(session.get(), least, error));
      CHECK(peek(session.get(), 2).size() == 2);
    }
  }
  kv_session_options o = small_options();
  o.context_tokens = 1;
  const Session one = open_session(tiny_model(), o);
  const int32_t token = 5;
  REQUIRE_OK(kv_prefill_tokens(one.get(), &token, 1, nullptr, nullptr, error));
  int32_t next = -1;
  CHECK(kv_session_next(one.get(), nullptr, nullptr, &next, nullptr, nullptr) == KV_CONTEXT_FULL);
  CHECK(kv_prefill_tokens(one.get(), &token, 1, nullptr, nullptr, nullptr) == KV_CONTEXT_FULL);
}

TEST_CASE("text is any bytes") {
  const Session session = open_session(tiny_model());
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  read_text(session.get(), bytes + std::string("\xff\xc0\xed\xa0\x80\0\0", 7));
  const Reply reply = ask(session.get(), "\xf0\x9f");
  CHECK(reply.status == KV_OK);
  read_text(session.get(), "");
  kv_error error{};
  CHECK(kv_prefill(session.get(), nullptr, 0, nullptr, nullptr, nullptr, &error) == KV_OK);
}

TEST_CASE("an answer is not touched by a call that fails, and filled by one that is stopped") {
  const Session session = tiny_session(100);
  kv_answer answer{};
  answer.struct_size = sizeof answer;
  answer.total_ns = 77;
  kv_session_options small = small_options();
  small.context_tokens = 120;
  const Session full = tiny_session(119, small);
  CHECK(kv_generate(full.get(), "a long question indeed", 22, nullptr, nullptr, nullptr, nullptr,
                    &answer, nullptr) == KV_CONTEXT_FULL);
  CHECK(answer.total_ns == 77);
  const auto stop = [](const char*, size_t, void*) -> int32_t { return 1; };
  CHECK(kv_generate(session.get(), "a", 1, nullptr, nullptr, stop, nullptr, &answer, nullptr) ==
        KV_CANCELLED);
  CHECK(answer.stop_reason == KV_STOP_CANCELLED);
  CHECK(answer.answer_tokens >= 1);
  CHECK(answer.total_ns != 77);
  CHECK(sequence(session.get()).size() == 100);
}

TEST_CASE("a memory budget and its folder are what the options say") {
  TempFolder folder;
  kv_session_options o = small_options();
  o.spill_directory = folder.path().c_str();
  o.memory_limit = 1000;
  kv_session* none = nullptr;
  kv_error refused{};
  CHECK(kv_session_open(tiny_model(), &o, &none, &refused) == KV_LIMIT);
  const auto needed = [&] {  // as the message says
    const std::string message = refused.message, take = "alone take ";
    REQUIRE(message.find(take) != std::string::npos);
    return std::stoull(message.substr(message.find(take) + take.size()));
  };
  o.memory_limit = needed();  // for no tokens
  const std::vector<int32_t> tokens = some_tokens(4000);
  uint64_t done = 1;
  CHECK(kv_prefill_tokens(open_session(tiny_model(), o).get(), tokens.data(), tokens.size(),
                          nullptr, &done, &refused) == KV_LIMIT);
  CHECK(done == 0);
  o.memory_limit = needed() + (64 << 10);
  const Session plain = tiny_session(4000), session = tiny_session(4000, o);
  CHECK(stats_of(session.get()).memory_limit == o.memory_limit);
  CHECK(stats_of(session.get()).spilled_bytes > 0);
  // the file has no name where there are files without one
  CHECK(folder.entries() == (on_windows ? 1 : 0));
  CHECK(peek(session.get(), 5) == peek(plain.get(), 5));
  // A relative folder is where it was when the session was opened.
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  std::filesystem::create_directory("spilled");
  o.spill_directory = "spilled";
  Session relative = open_session(tiny_model(), o);
  std::filesystem::current_path(before);
  read_tokens(relative.get(), tokens);
  CHECK(peek(relative.get(), 5) == peek(plain.get(), 5));
  relative.reset();
  const std::string nowhere = folder.file("nowhere");
  o.spill_directory = nowhere.c_str();
  CHECK(kv_session_open(tiny_model(), &o, &none, nullptr) == KV_NOT_FOUND);
  o.precision = KV_PRECISION_F32;
  CHECK(kv_session_open(tiny_model(), &o, &none, nullptr) == KV_BAD_ARGUMENT);
  CHECK(!none);
}

TEST_CASE("an empty name of a spill directory is refused, with and without a memory limit") {
  for (const uint64_t limit : {uint64_t{0}, uint64_t{1} << 30}) {
    kv_session_options o = small_options();
    o.memory_limit = limit;
    o.spill_directory = "";
    kv_session* none = nullptr;
    kv_error refused{};
    CHECK(kv_session_open(tiny_model(), &o, &none, &refused) == KV_BAD_ARGUMENT);
    CHECK(std::string(refused.message).find("spill_directory") != std::string::npos);
    CHECK(!none);
  }
}
