// Helpers of test/api/cancel_latency.cc: a document of synthetic keys, and a call whose token is
// fired some time after it began.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvasir.h"
#include "kvasir_experimental.h"
#include "strategies.h"
#include "temp_folder.h"

namespace cancel_latency {

constexpr std::size_t more_tokens = 700;  // that the text has behind the document
constexpr uint32_t step_tokens = 512;     // of the cache

inline void require(bool holds, const char* what, const kv_error& error) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s: %s\n", what, error.message);
  std::exit(1);
}
#define OK(call)                                    \
  do {                                              \
    kv_error error{};                               \
    const kv_status status_of_call = (call);        \
    require(status_of_call == KV_OK, #call, error); \
  } while (false)

struct Close {
  void operator()(kv_model* m) const { kv_close(m); }
  void operator()(kv_session* s) const { kv_session_close(s); }
  void operator()(kv_cache* c) const { kv_cache_close(c); }
  void operator()(kv_library* l) const { kv_library_close(l); }
  void operator()(kv_cancel* c) const { kv_cancel_release(c); }
};
template <class T>
using Handle = std::unique_ptr<T, Close>;

inline double cpu_ms() {
  return static_cast<double>(std::clock()) * 1e3 / CLOCKS_PER_SEC;
}  // of the process

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Fires the token after some time, unless it is destroyed before.
class FireLater {
 public:
  FireLater(kv_cancel* cancel, double seconds)
      : thread_([=, this] {
          std::unique_lock lock(mutex_);
          if (over_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return returned_; }))
            return;
          fired_at_ = cpu_ms();
          kv_cancel_fire(cancel);
          interrupted_ = cpu_ms() - fired_at_ > 1;
        }) {}
  ~FireLater() { (void)fired_at(); }
  // After fired_at(): whether this thread was preempted between the two, while others went on.
  bool interrupted() const { return interrupted_; }
  // Less than 0: the call returned first.
  double fired_at() {
    {
      const std::lock_guard lock(mutex_);
      returned_ = true;
    }
    over_.notify_one();
    if (thread_.joinable()) thread_.join();
    return fired_at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  bool returned_ = false;
  double fired_at_ = -1;
  bool interrupted_ = false;
  std::thread thread_;
};

template <class Options>
Options defaults() {
  Options o;
  kv_init(&o, sizeof o);
  return o;
}

inline kv_control with(kv_cancel* cancel, uint32_t flags = 0) {
  auto o = defaults<kv_control>();
  o.cancel = cancel;
  o.flags = flags;
  return o;
}

// What all calls are made on.
struct Document {
  TempFolder folder;
  std::string model_path;
  Handle<kv_model> model;
  kv_model_info info{};
  std::size_t count = 0;
  std::string text;             // of which the document is the first tokens
  std::vector<int32_t> tokens;  // of all of the text
  std::vector<float> numbers;   // any
  Handle<kv_cache> cache;
  Handle<kv_session> session;
  std::string saved, packed, cache_saved, library;
  double removal_ms = 0;  // that the system takes to remove a file of the saved document's size

  kv_cache_shape shape() const {
    kv_cache_shape s{};
    s.struct_size = sizeof s;
    s.layers = info.layers, s.heads = info.heads, s.kv_heads = info.kv_heads,
    s.head_dim = info.head_dim;
    s.max_tokens = uint64_t{1} << 24;
    return s;
  }
  const float* some(std::size_t at) const { return numbers.data() + at * 7919 % 65521; }

  Document(const char* path, std::size_t n) : model_path(path), count(n) {
    kv_model* opened = nullptr;
    OK(kv_open(path, nullptr, nullptr, &opened, &error));
    model.reset(opened);
    info.struct_size = sizeof info;
    OK(kv_model_get_info(opened, &info, &error));
    make_text();
    numbers.resize(std::size_t{step_tokens} * std::max(info.heads, info.kv_heads) * info.head_dim +
                   65536);
    std::mt19937 random(3);
    for (float& x : numbers) x = static_cast<float>(random()) * 0x1p-31f - 1;
    make_cache();
    const kv_control how = with(nullptr, KV_CACHE_UNCHECKED | KV_TOKENIZE_DOCUMENT);
    kv_session* made = nullptr;
    OK(kv_session_from_cache(opened, cache.get(), tokens.data(), count, nullptr, &how, &made,
                             &error));
    session.reset(made);
    library = folder.file("library");
    std::filesystem::create_directory(library);
    saved = library + "/document.kv", packed = folder.file("a.packed"),
    cache_saved = folder.file("c.kv");
    OK(kv_save(made, saved.c_str(), nullptr, &error));
    OK(kv_pack(saved.c_str(), packed.c_str(), 0, nullptr, &error));
    OK(kv_cache_save(cache.get(), cache_saved.c_str(), nullptr, &error));
    measure_removal();
  }

 private:
  void measure_removal() {
    const std::string copy = folder.file("copy");
    std::filesystem::copy_file(saved, copy);
    const double begin = cpu_ms();
    std::filesystem::remove(copy);
    removal_ms = cpu_ms() - begin;
  }
  void make_text() {
    std::mt19937 random(1);
    while (tokens.size() < count + more_tokens) {
      const std::size_t words =
          std::max<std::size_t>(1000, (count + more_tokens - tokens.size()) / 3);
      for (std::size_t w = 0; w < words; ++w) {
        for (auto letters = 2 + random() % 6; letters > 0; --letters)
          text += static_cast<char>('a' + random() % 26);
        text += ' ';
      }
      std::size_t size = 0;
      (void)kv_tokenize(model.get(), text.data(), text.size(), KV_TOKENIZE_DOCUMENT, nullptr,
                        nullptr, 0, &size, nullptr);
      tokens.resize(size);
      OK(kv_tokenize(model.get(), text.data(), text.size(), KV_TOKENIZE_DOCUMENT, nullptr,
                     tokens.data(), size, &size, &error));
    }
  }
  void make_cache() {
    const kv_cache_shape s = shape();
    auto o = defaults<kv_cache_options>();
    o.decode = strategies::strategy("full");  // finds no sketch
    kv_cache* made = nullptr;
    OK(kv_cache_open(&s, &o, &made, &error));
    cache.reset(made);
    for (std::size_t at = 0; at < count; at += step_tokens)
      for (uint32_t l = 0; l < info.layers; ++l)
        OK(kv_cache_update(made, l, KV_F32, some(at + l), some(at + l + 1), nullptr,
                           static_cast<uint32_t>(std::min<std::size_t>(step_tokens, count - at)),
                           &error));
  }
};

struct Case {
  std::string name;
  std::function<void()> before;
  std::function<kv_status(kv_cancel*)> call;
  std::function<void()> after;
  bool takes_token = true;
};

class Bench {
 public:
  Bench(Document& document, int repetitions, double max_ms, double max_wait)
      : d_(document), repetitions_(repetitions), max_ms_(max_ms), max_wait_(max_wait) {
    kv_cancel* made = nullptr;
    OK(kv_cancel_create(&made, &error));
    cancel_.reset(made);
    std::printf("removing a file of the document's size takes %.1f ms\n", d_.removal_ms);
    std::printf("%-46s %6s %9s %10s %12s\n", "call", "times", "cancelled", "median ms",
                "greatest ms");
  }

  void run(const Case& c) {
    double longest = max_wait_;
    if (c.takes_token) longest = once(c, max_wait_).seconds;
    std::vector<double> ms;
    int cancelled = 0;
    const int times = c.takes_token ? repetitions_ : std::max(1, repetitions_ / 10);
    for (int tries = 0; std::ssize(ms) < times && tries < 4 * times; ++tries) {
      const Once one = once(c, std::uniform_real_distribution<double>(0, longest)(random_));
      if (one.ms == returned_first) longest *= 0.9;
      if (one.ms < 0) continue;
      ms.push_back(one.ms);
      cancelled += one.status == KV_CANCELLED;
    }
    std::sort(ms.begin(), ms.end());
    const double greatest = ms.empty() ? 0 : ms.back(), median = ms.empty() ? 0 : ms[ms.size() / 2];
    const bool slow = greatest > max_ms_;
    failed_ |= slow;
    std::printf("%-46s %6zu %9d %10.1f %12.1f%s%s\n", c.name.c_str(), ms.size(), cancelled, median,
                greatest, c.takes_token ? "" : "  (all of it: no token)", slow ? "  TOO SLOW" : "");
    std::fflush(stdout);
  }
  bool failed() const { return failed_; }

 private:
  static constexpr double returned_first = -1, not_known = -2;
  struct Once {
    kv_status status;
    double ms;  // CPU time from firing to return, or of the whole call; or one of those above
    double seconds;
  };
  Once once(const Case& c, double wait) {
    kv_cancel_reset(cancel_.get());
    if (c.before) c.before();
    Once out{};
    const auto begin = std::chrono::steady_clock::now();
    if (c.takes_token) {
      FireLater fire(cancel_.get(), wait);
      out.status = c.call(cancel_.get());
      const double now = cpu_ms(), fired = fire.fired_at();
      out.ms = fired < 0            ? returned_first
               : fire.interrupted() ? not_known
                                    : std::max(0.0, now - fired);
    } else {
      const double from = cpu_ms();
      out.status = c.call(nullptr);
      out.ms = cpu_ms() - from;
    }
    out.seconds = std::min(seconds_since(begin), max_wait_);
    if (c.after) c.after();
    kv_error error{};
    std::snprintf(error.message, sizeof error.message, "status %d", out.status);
    require(out.status == KV_OK || (c.takes_token && out.status == KV_CANCELLED), c.name.c_str(),
            error);
    return out;
  }

  Document& d_;
  int repetitions_;
  double max_ms_, max_wait_;  // max_wait: seconds from a call's begin to firing
  bool failed_ = false;
  Handle<kv_cancel> cancel_;
  std::mt19937 random_{1};
};

}  // namespace cancel_latency
