// Hosts that trap floating-point exceptions, round in another direction or flush subnormal numbers:
// the library computes the same bits in all of them, and restores their environment, also for
// callbacks.
#include <cfenv>

#include "host.h"
#include "temp_folder.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

#if defined(__x86_64__)
constexpr unsigned flush_to_zero = 0x8040;
unsigned control() { return _mm_getcsr() & ~0x3fu; }
void set_flush(bool flush) {
  _mm_setcsr(flush ? _mm_getcsr() | flush_to_zero : _mm_getcsr() & ~flush_to_zero);
}
#elif defined(__aarch64__)
uint64_t control() {
  uint64_t c;
  __asm__ volatile("mrs %0, fpcr" : "=r"(c));
  return c;
}
void set_flush(bool flush) {
  const uint64_t bit = uint64_t{1} << 24, c = flush ? control() | bit : control() & ~bit;
  __asm__ volatile("msr fpcr, %0" : : "r"(c));
}
#else
int control() { return std::fegetround(); }
void set_flush(bool) {}
#endif

struct Environment {
  int traps, rounding;
  bool flushes;

  void set() const {
    std::fesetenv(FE_DFL_ENV);
    std::fesetround(rounding);
    set_flush(flushes);
#ifdef __GLIBC__
    feenableexcept(traps);
#endif
  }
};

// What must be the host's own in a callback.
struct Seen {
  decltype(control()) wanted;
  int calls = 0;
  bool same = true;

  int32_t look() {
    ++calls;
    same = same && control() == wanted;
    return 0;
  }
};

int32_t on_text(const char*, std::size_t, void* user) { return static_cast<Seen*>(user)->look(); }
int32_t on_progress(int32_t, uint64_t, uint64_t, void* user) {
  return static_cast<Seen*>(user)->look();
}

void add(std::vector<unsigned char>* bytes, const void* data, std::size_t size) {
  const auto* from = static_cast<const unsigned char*>(data);
  bytes->insert(bytes->end(), from, from + size);
}

// All that a host gets of the library's arithmetic, as bytes.
std::vector<unsigned char> results(const std::string& path, int64_t tokens, const char* strategy) {
  std::vector<unsigned char> bytes;
  kv_error error{};
  kv_model* const model = host::open_model();
  Seen seen{control()};
  kv_control call;
  kv_init(&call, sizeof call);
  call.progress = on_progress;
  call.user = &seen;
  kv_session* session = host::open_session(model, host::session_options(strategy));
  const std::vector<int32_t> ids = host::some_tokens(static_cast<std::size_t>(tokens));
  std::vector<float> logits(std::size_t{32} * 259);
  host::require_ok(kv_prefill_logits(session, ids.data(), 32, logits.data(), &call, &error), error,
                   "kv_prefill_logits");
  host::require_ok(
      kv_prefill_tokens(session, ids.data() + 32, ids.size() - 32, &call, nullptr, &error), error,
      "kv_prefill_tokens");
  add(&bytes, logits.data(), logits.size() * sizeof(float));
  host::require_ok(kv_save(session, path.c_str(), &call, &error), error, "kv_save");
  kv_session_close(session);
  host::require_ok(kv_load(model, path.c_str(), nullptr, nullptr, &session, &error), error,
                   "kv_load");
  host::require_ok(kv_session_set_strategy(session, strategies::budgeted(strategy, 64), &error),
                   error, "kv_session_set_strategy");
  kv_generate_options g = host::generate_options(12);
  host::require_ok(kv_generate(session, "why", 3, &g, nullptr, on_text, &seen, nullptr, &error),
                   error, "kv_generate");
  float scores[16];
  host::require_ok(kv_session_score(session, ids.data(), 16, scores, nullptr, &error), error,
                   "kv_session_score");
  add(&bytes, scores, sizeof scores);
  (void)host::stats(session);
  int32_t token = 0;
  kv_init(&g, sizeof g);
  for (int i = 0; i < 4; ++i) {
    host::require_ok(kv_session_next(session, &g, nullptr, &token, nullptr, &error), error,
                     "kv_session_next");
    add(&bytes, &token, sizeof token);
  }
  kv_session_close(session);
  kv_close(model);
  const std::vector<uint8_t> file = read_file(path);
  add(&bytes, file.data(), file.size());
  host::require(seen.calls > 2 && seen.same, "callbacks run in the host's own environment");
  host::require(control() == seen.wanted, "the host's environment is as it was");
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  const TempFolder folder;
  const int64_t tokens = host::times(argc, argv, 700);
  const char* const strategies[] = {"quest", "bounded", "ood"};
  const int traps[] = {0, FE_INVALID, FE_OVERFLOW, FE_DIVBYZERO,
                       FE_INVALID | FE_OVERFLOW | FE_DIVBYZERO | FE_UNDERFLOW};
  for (const char* strategy : strategies) {
    Environment{0, FE_TONEAREST, false}.set();
    const auto expected = results(folder.file("a.kv"), tokens, strategy);
    for (const int trap : traps)
      for (const int rounding : {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO})
        for (const bool flushes : {false, true}) {
          if ((trap != 0) + (rounding != FE_TONEAREST) + flushes > 1 && trap != traps[4]) continue;
          Environment{trap, rounding, flushes}.set();
          const auto found = results(folder.file("a.kv"), tokens, strategy);
          std::fesetenv(FE_DFL_ENV);
          host::require(found == expected, "the results are the same bits");
        }
  }
  return 0;
}
