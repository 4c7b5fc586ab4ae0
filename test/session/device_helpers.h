// What the tests of sessions with layers on GPUs share.
#pragma once

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cachefile/cache_file.h"
#include "helpers.h"
#include "offload/gpu_prefill_attention.h"
#include "temp_folder.h"

namespace kvasir::test {

inline Status open_on(const char* name, uint64_t budget, std::shared_ptr<const Model>* out) {
  return Model::open(EXAMPLES "/mini-reader-q8_0.gguf", "", out, {name, budget});
}

inline std::shared_ptr<const Model> model_on(const char* devices) {
  std::shared_ptr<const Model> model;
  const Status s = open_on(devices, 0, &model);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return model;
}

// The mini model on the first GPU, opened once; null where there is none, which
// KVASIR_TEST_NEEDS_GPU makes a failure.
inline std::shared_ptr<const Model> device_model() {
  static const std::shared_ptr<const Model> model = [] {
    std::shared_ptr<const Model> opened;
    const Status s = open_on("cuda", 0, &opened);
    if (!s.ok()) {
      MESSAGE("not run: ", std::string(s.message()));
      REQUIRE((s.code() == Code::unsupported || s.code() == Code::not_found));
      REQUIRE(!std::getenv("KVASIR_TEST_NEEDS_GPU"));
    }
    return opened;
  }();
  return model;
}

// Both sides compute the same integer products and differ in the order of float sums. That turns a
// rounding of an activation to 8 bits now and then, which later layers carry on: the CPU's own two
// ways of multiplying, for up to eight inputs and for more, differ by 2.5e-2 over this text.
constexpr double rounding = 4e-2;

// While it lives, each extent goes to a GPU in a piece of its own.
struct SmallPieces {
  const std::size_t usual = std::exchange(prefill_piece_bytes, 1);
  ~SmallPieces() { prefill_piece_bytes = usual; }
};

// For allocation_fault: of the allocations of so many bytes the first one fails.
inline std::size_t failing_size = 0;
inline bool first_of_size_fails(std::size_t size) {
  return size == failing_size && std::exchange(failing_size, 0) > 0;
}

inline SessionOptions bounded_options(uint64_t budget) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = "bounded";
  o.select.budget_tokens = budget;
  return o;
}

// 3,000 tokens that the CPU has prefilled, saved with all that any strategy finds in a prefill.
inline const std::string& read_file() {
  static const TempFolder folder;
  static const std::string path = [] {
    SessionOptions options = bounded_options(256);
    options.select.strategy = "infllm";
    auto session = open_session(mini_model(), options);
    read(session.get(), book_tokens(3000));
    const std::string file = folder.file("read.kv");
    REQUIRE(session->save(file, nullptr, {}).ok());
    return file;
  }();
  return path;
}

// A copy of the file with another byte in the sixth page of a layer's first head.
inline std::string damaged_file(const TempFolder& folder, uint32_t layer = 0) {
  std::string path = folder.file("damaged.kv");
  std::filesystem::copy_file(read_file(), path);
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  const uint64_t heads = mini_model()->config().kv_heads;
  const uint64_t at = file->find(format::SectionKind::pages)->offset +
                      layer * heads * PageShape::pages_bytes() + 5 * page_bytes + 100;
  file.reset();
  std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(static_cast<std::streamoff>(at)).put('\x55').put('\x2a').flush();
  return path;
}

inline std::unique_ptr<Session> load(const std::shared_ptr<const Model>& model,
                                     const std::string& path, const SessionOptions& options) {
  std::unique_ptr<Session> session;
  const Status s = Session::load(model, path, options, false, nullptr, {}, &session);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return session;
}

// Of a session of damaged_file(): a step that reads the page fails, each time, and the sequence
// stays as it was.
inline void check_is_damaged(Session* session) {
  Token token = -1;
  bool end = false;
  for (int i = 0; i < 2; ++i) {
    const Status s = session->next({}, nullptr, &token, &end);
    CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
    CHECK(std::string(s.message()).find("damaged.kv") != std::string::npos);
    CHECK(session->tokens().size() == 3000);
  }
}

inline std::vector<float> score(Session* session, std::span<const Token> tokens) {
  std::vector<float> out(tokens.size());
  const Status s = session->score(tokens, out.data(), nullptr, {});
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return out;
}

inline double mean_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    sum += std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
  return sum / static_cast<double>(a.size());
}

inline uint64_t stat_of(const Session& session, const std::string& name) {
  const std::string json = session.stats_json(), key = "\"" + name + "\":";
  REQUIRE(json.find(key) != std::string::npos);
  return std::stoull(json.substr(json.find(key) + key.size()));
}

inline bool says(const Session& session, const std::string& text) {
  return session.stats_json().find(text) != std::string::npos;
}
inline bool reads_pages(const Session& session) {
  return says(session, "\"gpu_reads_pages\":true");
}
inline bool attends(const Session& session) { return says(session, "\"gpu_attends\":true"); }

}  // namespace kvasir::test
