// Structs that grew or will grow: every size that a caller's header may have. And outputs of every
// size.
#include <cstring>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

// Calls `use` with a struct that says it has `size` bytes, in memory of exactly that size where
// that is possible (so that a sanitizer sees reads beyond it), its bytes beyond the known ones set
// to `rest`.
template <class Options, class Use>
kv_status with_size(void (*init)(Options*, std::size_t), std::size_t size, unsigned char rest,
                    Use use) {
  Options known;
  init(&known, sizeof known);
  const std::size_t bytes =
      std::max<std::size_t>(std::min<std::size_t>(size, 100'000), sizeof(uint32_t));
  const std::unique_ptr<uint64_t[]> memory(new uint64_t[(bytes + 7) / 8]);
  std::memset(memory.get(), rest, bytes);
  std::memcpy(memory.get(), &known, std::min(bytes, sizeof known));
  const auto stated = static_cast<uint32_t>(size);
  std::memcpy(memory.get(), &stated, sizeof stated);
  return use(reinterpret_cast<const Options*>(memory.get()));
}

// Of a struct of any length that a header may have the init function writes what there is, no more,
// and nothing beyond what the library knows.
template <class Options>
void check_init(void (*init)(Options*, std::size_t)) {
  Options known;
  init(&known, sizeof known);
  CHECK(known.struct_size == sizeof known);
  unsigned char bytes[sizeof(Options) + 64];
  for (std::size_t size = 0; size <= sizeof(Options) + 32; ++size) {
    CAPTURE(size);
    std::memset(bytes, 0xa5, sizeof bytes);
    init(reinterpret_cast<Options*>(bytes), size);
    const auto stated = static_cast<uint32_t>(size);
    const bool written = size >= sizeof stated;
    if (written) CHECK(std::memcmp(bytes, &stated, sizeof stated) == 0);
    for (std::size_t i = written ? sizeof stated : 0; i < sizeof bytes; ++i) {
      const auto* its = reinterpret_cast<const unsigned char*>(&known);
      REQUIRE(bytes[i] == (!written || i >= size ? 0xa5 : i < sizeof known ? its[i] : 0));
    }
  }
}

template <class Options, class Use>
void check_sizes(const char* name, void (*init)(Options*, std::size_t), Use use) {
  CAPTURE(std::string(name));
  check_init(init);
  CHECK(use(nullptr) == KV_OK);
  for (std::size_t size :
       {std::size_t{0}, std::size_t{3}, std::size_t{65537}, std::size_t{UINT32_MAX}}) {
    CAPTURE(size);
    CHECK(with_size(init, size, 0, use) == KV_BAD_ARGUMENT);
  }
  for (std::size_t size : {alignof(Options), 2 * alignof(Options), sizeof(Options)})
    CHECK(with_size(init, size, 0, use) == KV_OK);
  for (std::size_t more : {1u, 8u, 64u}) {
    CHECK(with_size(init, sizeof(Options) + more, 0, use) == KV_OK);
    CHECK(with_size(init, sizeof(Options) + more, 1, use) == KV_BAD_ARGUMENT);
  }
  CHECK(with_size(init, 65536, 0, use) == KV_OK);
  CHECK(with_size(init, 65536, 1, use) == KV_BAD_ARGUMENT);
}

}  // namespace

TEST_CASE("option structs of older and newer headers are understood, and wrong sizes refused") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Session session = tiny_session(100);
  check_sizes("kv_open", kv_model_options_init, [](const kv_model_options* o) {
    kv_model* out = nullptr;
    const kv_status s = kv_open(tiny_path, o, &out, nullptr);
    CHECK((s == KV_OK) == (out != nullptr));
    kv_close(out);
    return s;
  });
  check_sizes("kv_session_open", kv_session_options_init, [](const kv_session_options* o) {
    kv_session* out = nullptr;
    const kv_status s = kv_session_open(tiny_model(), o, &out, nullptr);
    kv_session_close(out);
    return s;
  });
  check_sizes("kv_prefill", kv_call_options_init, [&](const kv_call_options* o) {
    return kv_prefill_tokens(session.get(), nullptr, 0, o, nullptr, nullptr);
  });
  check_sizes("kv_save", kv_call_options_init, [&](const kv_call_options* o) {
    return kv_save(session.get(), path.c_str(), o, nullptr);
  });
  check_sizes("kv_load", kv_call_options_init, [&](const kv_call_options* o) {
    kv_session* out = nullptr;
    const kv_status s = kv_load(tiny_model(), path.c_str(), nullptr, o, &out, nullptr);
    kv_session_close(out);
    return s;
  });
  check_sizes("kv_file_verify", kv_call_options_init,
              [&](const kv_call_options* o) { return kv_file_verify(path.c_str(), o, nullptr); });
  const std::string packed = folder.file("a.kvz");
  check_sizes("kv_pack", kv_pack_options_init, [&](const kv_pack_options* o) {
    return kv_pack(path.c_str(), packed.c_str(), o, nullptr);
  });
  check_sizes("kv_unpack", kv_pack_options_init, [&](const kv_pack_options* o) {
    return kv_unpack(packed.c_str(), path.c_str(), o, nullptr);
  });
  check_sizes("kv_generate", kv_generate_options_init, [&](const kv_generate_options* o) {
    return kv_generate(session.get(), "a", 1, o, nullptr, nullptr, nullptr, nullptr);
  });
}

TEST_CASE("a shorter struct has the defaults of what it lacks") {
  kv_session_options o = small_options();
  o.share_heads = 7;  // beyond the size that is said
  o.prefill_chunk = 9999;
  o.struct_size = offsetof(kv_session_options, prefill_chunk);
  const Session session = open_session(tiny_model(), o);
  read_tokens(session.get(), some_tokens(50));
  // no header's
  for (const std::size_t cut : {offsetof(kv_session_options, strategy) + 4,
                                offsetof(kv_session_options, spill_folder) + 1}) {
    o.struct_size = static_cast<uint32_t>(cut);
    kv_session* none = nullptr;
    CHECK(kv_session_open(tiny_model(), &o, &none, nullptr) == KV_BAD_ARGUMENT);
  }
}

TEST_CASE("result structs are filled as far as their size goes") {
  kv_model_information whole{};
  whole.struct_size = sizeof whole;
  REQUIRE_OK(kv_model_info(tiny_model(), &whole, error));
  for (std::size_t size :
       {std::size_t{8}, std::size_t{20}, sizeof whole - 16, sizeof whole, sizeof whole + 64}) {
    CAPTURE(size);
    const std::unique_ptr<uint64_t[]> memory(new uint64_t[(size + 7) / 8]);
    std::memset(memory.get(), 0x5A, (size + 7) / 8 * 8);
    auto* info = reinterpret_cast<kv_model_information*>(memory.get());
    const auto stated = static_cast<uint32_t>(size);
    std::memcpy(memory.get(), &stated, sizeof stated);
    REQUIRE_OK(kv_model_info(tiny_model(), info, error));
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory.get());
    CHECK(std::memcmp(bytes, &stated, 4) == 0);
    CHECK(std::memcmp(bytes + 4, reinterpret_cast<const unsigned char*>(&whole) + 4,
                      std::min(size, sizeof whole) - 4) == 0);
    for (std::size_t i = sizeof whole; i < size; ++i) CHECK(bytes[i] == 0x5A);
  }
  for (uint32_t size : {0u, 3u, 4u, 7u}) {
    kv_model_information info{};
    info.struct_size = size;
    CHECK(kv_model_info(tiny_model(), &info, nullptr) == KV_BAD_ARGUMENT);
    CHECK(kv_model_inspect(tiny_path, &info, nullptr) == KV_BAD_ARGUMENT);
    CHECK(info.layers == 0);
    kv_answer answer{};
    answer.struct_size = size;
    const Session session = tiny_session(10);
    CHECK(kv_generate(session.get(), "a", 1, nullptr, nullptr, nullptr, &answer, nullptr) ==
          KV_BAD_ARGUMENT);
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
  CHECK(kv_stats(session.get(), nullptr, 0, &size, nullptr) == KV_LIMIT);
  std::string json(size - 1, '?');
  CHECK(kv_stats(session.get(), json.data(), size - 1, &count, nullptr) == KV_LIMIT);
  CHECK(count == size);

  count = 99;
  REQUIRE_OK(kv_tokenize(tiny_model(), nullptr, 0, 0, nullptr, nullptr, 0, &count, error));
  CHECK(count == 0);
  REQUIRE_OK(kv_detokenize(tiny_model(), nullptr, 0, 0, nullptr, 0, &count, error));
  CHECK(count == 0);
}

TEST_CASE("what is allowed at the edge of its range works") {
  for (uint32_t window : {1u, 2u, 1000u, 1u << 20}) {
    for (uint32_t chunk : {1u, 7u, 4096u}) {
      CAPTURE(window);
      CAPTURE(chunk);
      kv_session_options o = small_options();
      o.window = window;
      o.prefill_chunk = chunk;
      const Session session = tiny_session(150, o);
      CHECK(peek(session.get(), 2).size() == 2);
    }
  }
  for (const char* strategy : {"auto", "full", "window", "quest", "bounded"}) {
    for (uint64_t budget : {uint64_t{1}, uint64_t{16}, UINT64_MAX}) {
      kv_session_options o = small_options();
      o.strategy = strategy;
      o.budget_tokens = budget;
      const Session session = tiny_session(400, o);
      CHECK(peek(session.get(), 2).size() == 2);
      REQUIRE_OK(kv_session_set_strategy(session.get(), strategy, 0, 1.0, error));
      REQUIRE_OK(kv_session_set_strategy(session.get(), nullptr, 0, 1e-300, error));
      CHECK(peek(session.get(), 2).size() == 2);
    }
  }
  kv_session_options o = small_options();
  o.context = 1;
  const Session one = open_session(tiny_model(), o);
  const int32_t token = 5;
  REQUIRE_OK(kv_prefill_tokens(one.get(), &token, 1, nullptr, nullptr, error));
  int32_t next = -1;
  CHECK(kv_next(one.get(), nullptr, &next, nullptr, nullptr) == KV_CONTEXT_FULL);
  CHECK(kv_prefill_tokens(one.get(), &token, 1, nullptr, nullptr, nullptr) == KV_CONTEXT_FULL);
}

TEST_CASE("text is any bytes") {
  const Session session = open_session(tiny_model());
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  read_text(session.get(), bytes + std::string("\xff\xc0\xed\xa0\x80\0\0", 7));
  const Told told = ask(session.get(), "\xf0\x9f");
  CHECK(told.status == KV_OK);
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
  small.context = 120;
  const Session full = tiny_session(119, small);
  CHECK(kv_generate(full.get(), "a long question indeed", 22, nullptr, nullptr, nullptr, &answer,
                    nullptr) == KV_CONTEXT_FULL);
  CHECK(answer.total_ns == 77);
  const auto stop = [](const char*, size_t, void*) -> int32_t { return 1; };
  CHECK(kv_generate(session.get(), "a", 1, nullptr, stop, nullptr, &answer, nullptr) ==
        KV_CANCELLED);
  CHECK(answer.stop_reason == KV_STOP_CANCELLED);
  CHECK(answer.answer_tokens >= 1);
  CHECK(answer.total_ns != 77);
  CHECK(sequence(session.get()).size() == 100);
}

TEST_CASE("a memory budget and its folder are what the options say") {
  TempFolder folder;
  kv_session_options o = small_options();
  o.spill_folder = folder.path().c_str();
  o.memory_budget = 1000;
  kv_session* none = nullptr;
  kv_error refused{};
  CHECK(kv_session_open(tiny_model(), &o, &none, &refused) == KV_LIMIT);
  const auto needed = [&] {  // as the message says
    const std::string message = refused.message, take = "alone take ";
    REQUIRE(message.find(take) != std::string::npos);
    return std::stoull(message.substr(message.find(take) + take.size()));
  };
  o.memory_budget = needed();  // for no tokens
  const std::vector<int32_t> tokens = some_tokens(4000);
  uint64_t done = 1;
  CHECK(kv_prefill_tokens(open_session(tiny_model(), o).get(), tokens.data(), tokens.size(),
                          nullptr, &done, &refused) == KV_LIMIT);
  CHECK(done == 0);
  o.memory_budget = needed() + (64 << 10);
  const Session plain = tiny_session(4000), session = tiny_session(4000, o);
  std::string json(10'000, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_stats(session.get(), json.data(), json.size(), &size, error));
  CHECK(json.find("\"memory_budget\":" + std::to_string(o.memory_budget) + ",") !=
        std::string::npos);
  CHECK(json.find("\"spilled_bytes\":0,") == std::string::npos);
  // the file has no name where there are files without one
  CHECK(folder.entries() == (on_windows ? 1 : 0));
  CHECK(peek(session.get(), 5) == peek(plain.get(), 5));
  // A relative folder is where it was when the session was opened.
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  std::filesystem::create_directory("spilled");
  o.spill_folder = "spilled";
  Session relative = open_session(tiny_model(), o);
  std::filesystem::current_path(before);
  read_tokens(relative.get(), tokens);
  CHECK(peek(relative.get(), 5) == peek(plain.get(), 5));
  relative.reset();
  const std::string nowhere = folder.file("nowhere");
  o.spill_folder = nowhere.c_str();
  CHECK(kv_session_open(tiny_model(), &o, &none, nullptr) == KV_NOT_FOUND);
  o.kv_type = KV_KV_F32;
  CHECK(kv_session_open(tiny_model(), &o, &none, nullptr) == KV_BAD_ARGUMENT);
  CHECK(!none);
}
