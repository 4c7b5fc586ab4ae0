// Every function called wrongly: each pointer NULL in turn, sizes and ranges out of bounds. The
// status is a code and a message, outputs and handles stay as they were. misuse_test.cc runs the
// table and compares it with the headers, so that no function and no struct is forgotten.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "helpers.h"
#include "temp_folder.h"

namespace api_test {

// Everything that a call may write, filled with a pattern that no call would.
struct Outputs {
  kv_model* model;
  kv_session* session;
  kv_cancel* cancel;
  kv_strategy* strategy;
  std::size_t count;
  int32_t tokens[4], token, end;
  float logits[1024];
  double value;
  char text[64];
  kv_answer answer;
  kv_model_info model_info;
  kv_file_info file_info;
  kv_file_document file_document;
  kv_strategy_info strategy_info;
  kv_packed_info packed_info;
  kv_session_stats stats;
  kv_library* library;
  kv_library_document document;
  kv_library_result result;
  kv_cache* cache;
  kv_cache_stats cache_stats;
  kv_passage passages[4];

  void fill() {
    std::memset(static_cast<void*>(this), 0x5A, sizeof *this);
    answer.struct_size = sizeof answer;
    model_info.struct_size = sizeof model_info;
    file_info.struct_size = sizeof file_info;
    file_document.struct_size = sizeof file_document;
    strategy_info.struct_size = sizeof strategy_info;
    packed_info.struct_size = sizeof packed_info;
    stats.struct_size = sizeof stats;
    document.struct_size = sizeof document;
    result.struct_size = sizeof result;
    cache_stats.struct_size = sizeof cache_stats;
  }
};

struct Misuse {
  const char* function;
  const char* how;
  kv_status expected;
  std::function<kv_status(kv_error*)> call;
};

class Misuses {
 public:
  Misuses();
  ~Misuses() { kv_library_close(library_); }
  Misuses(const Misuses&) = delete;
  Misuses& operator=(const Misuses&) = delete;
  const std::vector<Misuse>& table() const { return table_; }
  kv_session* session() const { return session_.get(); }
  Outputs& out() { return out_; }
  std::size_t files() const { return folder_.entries(); }

 private:
  void add(const char* function, const char* how, std::function<kv_status(kv_error*)> call,
           kv_status expected = KV_BAD_ARGUMENT) {
    table_.push_back({function, how, expected, std::move(call)});
  }
  // Flags that the function does not name, and a size that no kv_control has.
  void add_control(const char* function,
                   std::function<kv_status(const kv_control*, kv_error*)> call);
  void add_model();
  void add_tokens();
  void add_strategies();
  void add_session();
  void add_prefill();
  void add_generate();
  void add_sequence();
  void add_files();
  void add_packing();
  void add_library();
  void add_caches();
  void add_generate_option(const char* how, std::function<void(kv_generate_options*)> change);
  void add_session_option(const char* how, std::function<void(kv_session_options*)> change);
  void add_decode(const char* how, const kv_strategy* decode);
  // A strategy of that name. Nothing that is refused changes it.
  kv_strategy* changed(const char* name);

  struct CloseCache {
    void operator()(kv_cache* c) const { kv_cache_close(c); }
  };
  TempFolder folder_, library_folder_;
  kv_library* library_ = nullptr;
  std::unique_ptr<kv_cache, CloseCache> cache_;
  std::vector<strategies::Owned> changed_;
  Session session_, empty_, traced_;
  std::string path_;
  Outputs out_;
  std::vector<Misuse> table_;
};

inline constexpr int32_t some_ids[] = {3};
inline constexpr int32_t known_tokens[] = {5, 6};
inline constexpr float nan_f = std::numeric_limits<float>::quiet_NaN(),
                       inf_f = std::numeric_limits<float>::infinity();
inline constexpr double nan_d = std::numeric_limits<double>::quiet_NaN();

}  // namespace api_test
