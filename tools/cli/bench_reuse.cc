// What a saved document costs to use again: each measurement begins with a load of the file.
#include <algorithm>
#include <filesystem>

#include "bench_measure.h"
#include "failure.h"
#include "number_text.h"
#include "strategies.h"
#include "system.h"

namespace tool {
namespace {

constexpr uint64_t rewind_tokens = 10, edit_tokens = 100;

class Reuse {
 public:
  Reuse(Console& console, const BenchModel& model, const BenchArguments& arguments)
      : console_(console), model_(model), arguments_(arguments),
        options_(console, flags_for(arguments.session, arguments.strategies.front())),
        tokens_(arguments.depths.back()) {}

  ReuseCost run();

 private:
  Session load(Samples* load_ms = nullptr);
  double first_token_ms(kv_session* session);
  void rewind();
  void prefix();
  void edit();

  Console& console_;
  const BenchModel& model_;
  const BenchArguments& arguments_;
  const SessionOptions options_;
  const uint64_t tokens_;  // in the file
  ReuseCost cost_;
};

Session Reuse::load(Samples* load_ms) {
  const Stopwatch watch;
  Session session = load_cache(console_, model_.model.get(), arguments_.cache, options_);
  if (load_ms) load_ms->values.push_back(watch.seconds() * 1e3);
  return session;
}

double Reuse::first_token_ms(kv_session* session) {
  return static_cast<double>(short_answer(console_, session, 1).first_token_ns) * 1e-6;
}

void Reuse::rewind() {
  const Session session = load();
  kv_error error{};
  const Stopwatch watch;
  check(kv_session_rewind(session.get(), tokens_ - std::min(tokens_, rewind_tokens), &error),
        error);
  first_token_ms(session.get());
  cost_.rewind_ms.values.push_back(watch.seconds() * 1e3);
}

void Reuse::prefix() {
  kv_error error{};
  kv_session* loaded = nullptr;
  const kv_control control = control_of(console_);
  const Stopwatch watch;
  check_cache(kv_load_prefix(model_.model.get(), arguments_.cache.c_str(), tokens_ - tokens_ / 10,
                             options_.get(), &control, &loaded, &error),
              error, arguments_.cache);
  const Session session(loaded);
  first_token_ms(session.get());
  cost_.prefix_ms.values.push_back(watch.seconds() * 1e3);
}

// The last tokens of the document are replaced by as many others.
void Reuse::edit() {
  const Session session = load();
  const uint64_t count = std::min(tokens_, edit_tokens);
  const std::vector<int32_t> all = tokens_of(session.get());
  const std::vector<int32_t> others(all.rbegin(), all.rbegin() + static_cast<ptrdiff_t>(count));
  kv_error error{};
  const kv_control control = control_of(console_);
  const Stopwatch watch;
  check(kv_session_rewind(session.get(), tokens_ - count, &error), error);
  check(kv_prefill_tokens(session.get(), others.data(), count, &control, nullptr, &error), error);
  cost_.edit_ms.values.push_back(watch.seconds() * 1e3);
}

ReuseCost Reuse::run() {
  cost_.strategy = arguments_.strategies.front();
  cost_.file_bytes = std::filesystem::file_size(system::path(arguments_.cache));
  for (uint32_t i = 0; i < arguments_.repetitions; ++i) {
    console_.terminal.draw("Measuring the use of " + arguments_.cache);
    const Session session = load(&cost_.load_ms);
    cost_.first_token_ms.values.push_back(first_token_ms(session.get()));
    rewind();
    prefix();
    edit();
  }
  return cost_;
}

}  // namespace

ReuseCost measure_reuse(Console& console, const BenchModel& model,
                        const BenchArguments& arguments) {
  return Reuse(console, model, arguments).run();
}

}  // namespace tool
