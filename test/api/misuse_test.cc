// Runs the table of wrong calls, and compares it with the headers.
#include "misuse.h"

#include <fstream>
#include <regex>
#include <set>

#include "fault_count.h"

namespace api_test {

Misuses::Misuses()
    : session_(tiny_session(200)), empty_(open_session(tiny_model())), traced_(tiny_session(100)),
      path_(folder_.file("a.kv")) {
  kv_generate_options traced;
  kv_init(&traced, sizeof traced);
  traced.flags = KV_TRACE_PASSAGES, traced.max_tokens = 2;
  REQUIRE(kv_generate(traced_.get(), "a", 1, &traced, nullptr, nullptr, nullptr, nullptr,
                      nullptr) == KV_OK);
  save(session_.get(), path_);
  add("kv_cancel_create", "out", [](kv_error* e) { return kv_cancel_create(nullptr, e); });
  add_model();
  add_tokens();
  add_strategies();
  add_session();
  add_prefill();
  add_generate();
  add_sequence();
  add_files();
  add_packing();
  REQUIRE(kv_library_open(library_folder_.path().c_str(), nullptr, &library_, nullptr) == KV_OK);
  add_library();
  add_caches();
}

void Misuses::add_control(const char* function,
                          std::function<kv_status(const kv_control*, kv_error*)> call) {
  add(function, "flags of kv_control", [call](kv_error* e) {
    kv_control c = control_of(nullptr, 8);
    return call(&c, e);
  });
  add(function, "struct_size of kv_control", [call](kv_error* e) {
    kv_control c = control_of(nullptr);
    c.struct_size = 3;
    return call(&c, e);
  });
}

kv_strategy* Misuses::changed(const char* name) {
  kv_strategy* made = nullptr;
  REQUIRE(kv_strategy_create(name, &made, nullptr) == KV_OK);
  changed_.emplace_back(made);
  return made;
}

namespace {

std::string headers() {
  std::string text;
  for (const char* name : {"kvasir.h", "kvasir_experimental.h"}) {
    std::ifstream in(std::string(EXAMPLES "/../include/") + name);
    text += std::string(std::istreambuf_iterator<char>(in), {});
  }
  return text;
}

}  // namespace

}  // namespace api_test

using namespace api_test;

TEST_CASE("a wrong call gets its code and a message and changes nothing") {
  Misuses misuses;
  const std::vector<int32_t> tokens = sequence(misuses.session()),
                             next = peek(misuses.session(), 3);
  for (const Misuse& m : misuses.table()) {
    CAPTURE(std::string(m.function));
    CAPTURE(std::string(m.how));
    misuses.out().fill();
    std::vector<char> before(sizeof(Outputs));
    std::memcpy(before.data(), &misuses.out(), sizeof(Outputs));
    kv_error error{};
    error.status = -1;
    count_faults("wrong call");
    CHECK(m.call(&error) == m.expected);
    CHECK(error.status == m.expected);
    CHECK(std::string_view(error.message).size() > 5);
    CHECK(std::string_view(error.message).find('\n') == std::string_view::npos);
    CHECK(m.call(nullptr) == m.expected);
    CHECK(std::memcmp(before.data(), &misuses.out(), sizeof(Outputs)) == 0);
  }
  CHECK(sequence(misuses.session()) == tokens);
  CHECK(peek(misuses.session(), 3) == next);
  CHECK(misuses.files() == 1);
}

TEST_CASE("NULL where nothing can go wrong is nothing") {
  kv_close(nullptr);
  kv_session_close(nullptr);
  kv_cancel_release(nullptr);
  kv_cancel_fire(nullptr);
  kv_cancel_reset(nullptr);
  CHECK(kv_model_retain(nullptr) == nullptr);
  kv_init(nullptr, 64);
  kv_library_close(nullptr);
  kv_cache_close(nullptr);
  kv_strategy_destroy(nullptr);
}

TEST_CASE("every function of the header is misused here") {
  std::set<std::string> known = {
      "kv_close", "kv_session_close", "kv_cancel_release", "kv_cancel_fire", "kv_cancel_reset",
      "kv_model_retain", "kv_init", "kv_library_close", "kv_cache_close", "kv_strategy_destroy",
      // No pointers in: the last case of this file.
      "kv_status_text", "kv_status_is_stale", "kv_version", "kv_build_info"};
  const Misuses misuses;
  for (const Misuse& m : misuses.table()) known.insert(m.function);
  const std::string header = headers();
  std::set<std::string> declared;
  const std::string mark = "\nKV_API ";
  for (std::size_t at = header.find(mark); at != std::string::npos;
       at = header.find(mark, at + 1)) {
    const std::size_t end = header.find('(', at), begin = header.find_last_of(" *", end) + 1;
    declared.insert(header.substr(begin, end - begin));
  }
  CHECK(declared.size() > 30);
  CHECK(declared == known);
}

TEST_CASE("every struct of the header that has a size is given with a wrong one") {
  std::set<std::string> given, declared;
  const Misuses misuses;
  const std::string how = "struct_size of ";
  for (const Misuse& m : misuses.table())
    if (std::string(m.how).rfind(how, 0) == 0) given.insert(m.how + how.size());
  const std::regex sized(R"(struct (kv_\w+) \{\s*uint32_t struct_size;)");
  const std::string header = headers();
  for (std::sregex_iterator at(header.begin(), header.end(), sized), end; at != end; ++at)
    declared.insert((*at)[1]);
  CHECK(declared.size() > 15);
  CHECK(declared == given);
}

TEST_CASE("every status has a text, and NaN or infinity have one too") {
  std::set<std::string> texts;
  for (kv_status s = KV_OK; s <= KV_DEVICE; ++s) {
    texts.insert(kv_status_text(s));
    CHECK(kv_status_is_stale(s) == (s == KV_VERSION || s == KV_MODEL_MISMATCH));
  }
  CHECK(texts.size() == KV_DEVICE + 1);
  for (kv_status s : {-1, KV_DEVICE + 1, INT32_MIN, INT32_MAX})
    CHECK(std::string(kv_status_text(s)) == "unknown status");
  CHECK(kv_version() == KV_VERSION_NUMBER);
}
