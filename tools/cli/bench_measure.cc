#include "bench_measure.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <random>
#include <span>

#include "failure.h"
#include "files.h"
#include "number_text.h"
#include "strategies.h"
#include "synthetic.h"
#include "system.h"

namespace tool {
namespace {

constexpr const char* short_question = "What is the pass key?";

// Removes the cache file of a measurement, also after a failure.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(system::path(path_), ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Bench {
 public:
  Bench(Console& console, const BenchModel& model, const BenchArguments& arguments)
      : console_(console), model_(model), arguments_(arguments) {
    make_tokens();
    if (arguments_.synthetic)
      synthetic_ = std::make_unique<SyntheticDocument>(
          console_, model_.info, flags_for(arguments_.session, "auto"), arguments_.seed);
    base_ = arguments_.cache.empty()
                ? open_session(console_, model_.model.get(), flags_for(arguments_.session, "auto"))
                : open_cache();
  }

  std::vector<DepthResult> run();

 private:
  void make_tokens();
  Session open_cache();
  void warm_up();
  void grow_to(uint64_t depth);
  void prefill(kv_session* session, uint64_t at, uint64_t count, Progress* progress);
  double decode(kv_session* session, uint64_t count);
  void prepare(kv_session* session, const std::string& strategy);
  DepthResult at_depth(uint64_t depth);
  void measure_prefill(DepthResult& result);
  void measure_decode(DepthResult& result, DecodeSpeed& speed);
  std::vector<MappedCost> mapped(uint64_t depth);
  void measure_mapped(const std::string& path, uint64_t depth, MappedCost& cost);
  void draw_progress(uint64_t depth, const std::string& measurement);

  Console& console_;
  const BenchModel& model_;
  const BenchArguments& arguments_;
  std::vector<int32_t> tokens_;                   // [deepest + prompt]
  std::unique_ptr<SyntheticDocument> synthetic_;  // null: the sequence is prefilled
  Session base_;
  uint64_t depth_ = 0;  // tokens in base_
};

void Bench::make_tokens() {
  const uint64_t count = arguments_.depths.back() + std::max<uint64_t>(arguments_.prompt, 1);
  if (arguments_.text.empty()) {
    std::mt19937_64 random(arguments_.seed);
    std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(model_.info.vocabulary) - 1);
    tokens_.resize(count);
    for (int32_t& token : tokens_) token = any(random);
    return;
  }
  const std::vector<int32_t> text = tokenize(model_.model.get(), read_file(arguments_.text), 0);
  if (text.empty()) throw Failure(exit_file, arguments_.text + " is empty");
  while (tokens_.size() < count)
    tokens_.insert(tokens_.end(), text.begin(),
                   text.begin() + static_cast<ptrdiff_t>(
                                      std::min<uint64_t>(text.size(), count - tokens_.size())));
}

Session Bench::open_cache() {
  const SessionOptions options(console_, flags_for(arguments_.session, "auto"));
  depth_ = arguments_.depths.back();
  return load_cache(console_, model_.model.get(), arguments_.cache, options);
}

void Bench::prefill(kv_session* session, uint64_t at, uint64_t count, Progress* progress) {
  kv_error error{};
  const kv_control control = control_of(console_, progress);
  check(kv_prefill_tokens(session, tokens_.data() + at, count, &control, nullptr, &error), error);
}

// Seconds of `count` forward passes, greedy.
double Bench::decode(kv_session* session, uint64_t count) {
  const kv_control control = control_of(console_);
  kv_error error{};
  int32_t token = 0;
  // The first one may use the logits of the prefill.
  check(kv_session_next(session, nullptr, &control, &token, nullptr, &error), error);
  const Stopwatch watch;
  for (uint64_t i = 0; i < count; ++i)
    check(kv_session_next(session, nullptr, &control, &token, nullptr, &error), error);
  return watch.seconds();
}

// Builds the strategy's index, in the base for all forks and the saved file, because
// kv_session_next builds none. Uploads to GPUs what they read.
void Bench::prepare(kv_session* session, const std::string& strategy) {
  set_strategy(session, flags_for(arguments_.session, strategy));
  Progress progress(console_.terminal, "Preparing " + strategy, Unit::tokens);
  const kv_control control = control_of(console_, &progress);
  kv_error error{};
  check(kv_session_prepare(session, &control, &error), error);
}

void Bench::draw_progress(uint64_t depth, const std::string& measurement) {
  console_.terminal.draw("Measuring at " + grouped(depth) + " tokens: " + measurement);
}

// Brings the weights into memory and the CPU to its full clock.
void Bench::warm_up() {
  console_.terminal.draw("Warming up");
  const Session session =
      open_session(console_, model_.model.get(), flags_for(arguments_.session, "auto"));
  prefill(session.get(), 0, std::min<uint64_t>(tokens_.size(), 128), nullptr);
  decode(session.get(), 4);
}

void Bench::grow_to(uint64_t depth) {
  if (depth == depth_) return;
  if (synthetic_) {
    synthetic_->grow_to(depth);
    base_ = synthetic_->open(model_.model.get(), std::span(tokens_).first(depth));
    depth_ = depth;
    return;
  }
  Progress progress(console_.terminal, "Prefilling to " + grouped(depth), Unit::tokens, depth_);
  prefill(base_.get(), depth_, depth - depth_, &progress);
  depth_ = depth;
}

void Bench::measure_prefill(DepthResult& result) {
  draw_progress(result.depth, "prefill");
  const Session session = fork(base_.get());
  // not the strategy prepared last: some store more during prefill
  set_strategy(session.get(), flags_for(arguments_.session, "auto"));
  const Stopwatch watch;
  prefill(session.get(), result.depth, arguments_.prompt, nullptr);
  result.prefill_tokens_per_second.values.push_back(static_cast<double>(arguments_.prompt) /
                                                    watch.seconds());
}

void Bench::measure_decode(DepthResult& result, DecodeSpeed& speed) {
  draw_progress(result.depth, "decode, " + speed.strategy);
  const Session session = fork(base_.get());
  if (result.depth == 0) prefill(session.get(), 0, 1, nullptr);  // decode needs a token before it
  prepare(session.get(), speed.strategy);
  const double seconds = decode(session.get(), arguments_.generate);
  speed.tokens_per_second.values.push_back(static_cast<double>(arguments_.generate) / seconds);
  speed.stats = stats_json(session.get());
}

DepthResult Bench::at_depth(uint64_t depth) {
  grow_to(depth);
  DepthResult result;
  result.depth = depth;
  for (const std::string& strategy : arguments_.strategies)
    result.decode.push_back({strategy, {}, {}});
  for (const DecodeSpeed& speed : result.decode)
    if (depth > 0 && (arguments_.generate > 0 || arguments_.mapped))
      prepare(base_.get(), speed.strategy);
  // Strategies alternate, so that a change in the machine's load affects all of them.
  for (uint32_t repetition = 0; repetition < arguments_.repetitions; ++repetition) {
    if (arguments_.prompt > 0) measure_prefill(result);
    if (arguments_.generate == 0) continue;
    for (DecodeSpeed& speed : result.decode) measure_decode(result, speed);
  }
  if (arguments_.mapped && depth > 0) result.mapped = mapped(depth);
  return result;
}

std::vector<MappedCost> Bench::mapped(uint64_t depth) {
  const TemporaryFile file(arguments_.folder + "/kvasir-bench-" +
                           std::to_string(system::process_number()) + ".kv");
  save(console_, base_.get(), file.path());
  // the measurement of memory covers the file alone
  if (depth == arguments_.depths.back()) base_.reset(), synthetic_.reset();
  std::vector<MappedCost> costs;
  for (const std::string& strategy : arguments_.strategies) {
    MappedCost cost;
    cost.strategy = strategy;
    for (uint32_t i = 0; i < arguments_.repetitions; ++i) measure_mapped(file.path(), depth, cost);
    costs.push_back(std::move(cost));
  }
  return costs;
}

void Bench::measure_mapped(const std::string& path, uint64_t depth, MappedCost& cost) {
  draw_progress(depth, "mapped file, " + cost.strategy);
  const SessionOptions options(console_, flags_for(arguments_.session, cost.strategy));
  const Stopwatch watch;
  const Session session = load_cache(console_, model_.model.get(), path, options);
  cost.load_ms.values.push_back(watch.seconds() * 1e3);
  const kv_answer answer =
      short_answer(console_, session.get(), std::max<uint64_t>(arguments_.generate, 1));
  cost.first_token_ms.values.push_back(static_cast<double>(answer.first_token_ns) * 1e-6);

  cost.resident_bytes = resident_bytes_of(path).value_or(0);
  cost.private_bytes = stats_of(session.get()).private_bytes;
  cost.stats = stats_json(session.get());
  if (arguments_.generate > 0) {
    prepare(session.get(), cost.strategy);
    cost.tokens_per_second.values.push_back(static_cast<double>(arguments_.generate) /
                                            decode(session.get(), arguments_.generate));
  }
  kv_error error{};
  kv_file_info info = initialised<kv_file_info>();
  check(kv_file_inspect(path.c_str(), &info, &error), error);
  cost.kv_bytes = info.kv_bytes;
}

std::vector<DepthResult> Bench::run() {
  warm_up();
  std::vector<DepthResult> results;
  for (const uint64_t depth : arguments_.depths) results.push_back(at_depth(depth));
  console_.terminal.erase();
  return results;
}

}  // namespace

double Samples::median() const {
  if (values.empty()) return 0;
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end());
  const size_t half = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

Session load_cache(Console& console, kv_model* model, const std::string& path,
                   const SessionOptions& options) {
  kv_error error{};
  kv_session* loaded = nullptr;
  const kv_control control = control_of(console);
  check_cache(kv_load(model, path.c_str(), options.get(), &control, &loaded, &error), error, path);
  return Session(loaded);
}

kv_answer short_answer(Console& console, kv_session* session, uint64_t count) {
  kv_generate_options generate = initialised<kv_generate_options>();
  generate.max_tokens = static_cast<uint32_t>(count);
  const kv_control control = control_of(console);
  kv_answer answer = initialised<kv_answer>();
  kv_error error{};
  const std::string question = short_question;
  check(kv_generate(session, question.data(), question.size(), &generate, &control, nullptr,
                    nullptr, &answer, &error),
        error);
  return answer;
}

std::vector<DepthResult> measure(Console& console, const BenchModel& model,
                                 const BenchArguments& arguments) {
  return Bench(console, model, arguments).run();
}

}  // namespace tool
