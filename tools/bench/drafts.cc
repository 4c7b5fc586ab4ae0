// What steps with drafts take, and what answers gain by them.
//
//   bench-drafts MODEL --costs --script chance:50 --script quotes:48:3
//   bench-drafts MODEL --file TEXT --ask QUESTION --lookup --mtp 3
//
// Each case is measured next to answers without drafts, in turn, and must have the same tokens.
// Times are those of a token after the first one: of the clock, and of all the process's threads,
// which other processes disturb less.
//
// Scripts draft tokens of the answer itself, or wrong ones. The text decides nothing, and the model
// may have random weights:
//
//   chance:P            each draft is right with P per cent, whatever the others are. At 50 a
//                       step keeps fewer than two tokens on average.
//   quotes:LENGTH:GAP   runs: all drafts within a quote of LENGTH tokens are right, all within the
//                       GAP tokens between two quotes wrong. The lookup's match is as long as the
//                       part of the quote that the answer has; in a gap, two tokens.
//   runs:LENGTH:GAP     the same, where the match says nothing: it is always a long one.
//
// Of the drafts of a session that always has 15, quotes:48:3 has half right: three steps keep 16
// tokens, three keep one (--always counts them). In quotes:48:48 half of the answer is quoted.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "session/session.h"

using namespace kvasir;

namespace {

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "bench-drafts: %s\n", why);
  std::exit(1);
}

void check(const Status& s) {
  if (!s.ok()) fail(s.message());
}

uint64_t cpu_ns() { return static_cast<uint64_t>(std::clock()) * (1'000'000'000 / CLOCKS_PER_SEC); }

// Whose drafts an answer has.
struct Case {
  enum class Kind { alone, lookup, layer, both, chance, quotes, runs } kind = Kind::alone;
  std::string name;
  uint32_t percent = 0, length = 0, gap = 0;

  bool scripted() const { return kind >= Kind::chance; }
  bool by_layer() const { return kind == Kind::layer || kind == Kind::both; }
  bool in_quote(std::size_t at) const { return at % (length + gap) >= gap; }
};

Case parse_script(const std::string& text) {
  Case c{.name = text};
  if (std::sscanf(text.c_str(), "chance:%u", &c.percent) == 1 && c.percent <= 100)
    return c.kind = Case::Kind::chance, c;
  for (const auto& [form, kind] :
       {std::pair{"quotes:%u:%u", Case::Kind::quotes}, std::pair{"runs:%u:%u", Case::Kind::runs}})
    if (std::sscanf(text.c_str(), form, &c.length, &c.gap) == 2 && c.length > 0 &&
        c.length <= 1 << 20 && c.gap <= 1 << 20)
      return c.kind = kind, c;
  fail("--script is chance:PERCENT, quotes:LENGTH:GAP or runs:LENGTH:GAP");
}

struct Options {
  std::string model, file, device = "cpu";
  std::vector<std::string> questions, scripts;
  uint32_t answer = 192, document = 256, threads = 0, repetitions = 5, layer = 0;
  bool costs = false, lookup = false, always = false, fresh = false, cpu_clock = false,
       same = false;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Bench {
 public:
  explicit Bench(Options o) : o_(std::move(o)) { reopen(); }

  void run_costs();
  void run_case(const Case& c);

 private:
  struct Result {
    double wall = 0, cpu = 0;  // nanoseconds of a token
    uint64_t tokens = 0, steps = 0;
    DraftCounts drafts;
    std::string text;
    std::vector<Token> sequence;  // with the answer, where it is kept
  };

  void reopen() {
    documents_.clear(), model_.reset();
    check(Model::open(o_.model, "", &model_, {o_.device}));
  }
  Session* open(const Case& c);
  void script(const Case& c, Session* session);
  Result answer(const Case& c, const std::string& question);
  void add_question(const Case& c, const std::string& question);

  const Options o_;
  std::shared_ptr<const Model> model_;
  std::map<Case::Kind, std::unique_ptr<Session>> documents_;
  std::vector<Token> script_;  // the answer of the newest session without drafts
  // Of a case.
  struct Sums {
    std::vector<double> walls, cpus;  // ratios
    uint64_t drafted = 0, accepted = 0, tokens = 0, steps = 0, drafted_steps = 0;
  } sums_;
};

// The session that has the document.
Session* Bench::open(const Case& c) {
  std::unique_ptr<Session>& document = documents_[c.scripted() ? Case::Kind::chance : c.kind];
  if (!document) {
    SessionOptions options;
    options.threads = o_.threads;
    options.lookup_tokens =
        c.kind == Case::Kind::lookup || c.kind == Case::Kind::both ? options.lookup_tokens : 0;
    options.draft_tokens = c.by_layer() ? o_.layer : 0;
    options.drafts_always = o_.always;
    if (o_.cpu_clock) options.clock = cpu_ns;
    check(Session::open(model_, options, &document));
    uint64_t done = 0, bytes = 0;
    if (!o_.file.empty()) {
      std::ifstream in(o_.file, std::ios::binary);
      std::ostringstream text;
      text << in.rdbuf();
      if (!in || text.str().empty()) fail("--file cannot be read");
      check(document->prefill(text.str(), false, nullptr, {}, &done, &bytes));
    } else {
      Array<Token> tokens;
      for (uint32_t i = 0; i < o_.document; ++i)
        tokens.push_back(static_cast<Token>(10 + i * 7919 % 200));
      check(document->prefill_tokens(tokens, nullptr, nullptr, {}, &done));
    }
  }
  return document.get();
}

void Bench::script(const Case& c, Session* session) {
  if (!c.scripted()) return;
  const std::size_t base = session->tokens().size();
  const auto next_at = [session, base] { return session->tokens().size() + 1 - base; };
  session->draft_by(
      [this, c, base, next_at, state = uint32_t{1}](Token, uint32_t count,
                                                    Array<Token>* out) mutable {
        for (uint32_t i = 0; i < count; ++i) {
          state = state * 1664525 + 1013904223;
          const std::size_t at = next_at() + i;
          const bool right =
              c.kind == Case::Kind::chance ? (state >> 8) % 100 < c.percent : c.in_quote(at);
          const Token good = base + at < script_.size() ? script_[base + at] : 3;
          out->push_back(right ? good : good == 5 ? 6 : 5);
        }
      },
      [c, next_at]() -> uint32_t {
        if (c.kind != Case::Kind::quotes) return LookupMatch::max_length;
        const std::size_t in_period = next_at() % (c.length + c.gap),
                          quoted = in_period - std::min<std::size_t>(in_period, c.gap);
        return static_cast<uint32_t>(
            std::clamp<std::size_t>(quoted, LookupMatch::min_length, LookupMatch::max_length));
      });
}

Bench::Result Bench::answer(const Case& c, const std::string& question) {
  if (o_.fresh) reopen();
  Session* session = open(c);
  std::unique_ptr<Session> fork;
  if (!o_.same) check(session->fork(&fork)), session = fork.get();
  script(c, session);
  GenerateOptions options;
  options.max_tokens = o_.answer;
  options.keep = !o_.same;
  uint64_t first_cpu = 0;
  Answer out;
  std::string text;
  check(session->generate(
      question, options,
      [&](std::string_view more) {
        if (first_cpu == 0) first_cpu = cpu_ns();
        text += more;
        return 0;
      },
      &out));
  const uint64_t end = cpu_ns();
  if (out.answer_tokens < 2) fail("the answer has no tokens to measure");
  const auto tokens = static_cast<double>(out.answer_tokens - 1);
  return {static_cast<double>(out.total_ns - out.first_token_ns) / tokens,
          static_cast<double>(end - (first_cpu > 0 ? first_cpu : end)) / tokens,
          out.answer_tokens,
          out.answer_tokens - std::min(session->stats().drafts.accepted, out.answer_tokens),
          session->stats().drafts,
          std::move(text),
          {session->tokens().begin(), session->tokens().end()}};
}

void Bench::add_question(const Case& c, const std::string& question) {
  Result alone = answer({}, question);
  script_ = std::move(alone.sequence);
  const Result drafted = answer(c, question);
  if (drafted.text != alone.text) fail("drafts have changed the answer");
  sums_.walls.push_back(alone.wall / drafted.wall);
  if (drafted.cpu > 0) sums_.cpus.push_back(alone.cpu / drafted.cpu);
  sums_.drafted += drafted.drafts.drafted, sums_.accepted += drafted.drafts.accepted;
  sums_.drafted_steps += drafted.drafts.steps;
  sums_.tokens += drafted.tokens, sums_.steps += drafted.steps;
}

void Bench::run_case(const Case& c) {
  sums_ = {};
  const std::vector<std::string> one = {""};
  for (uint32_t i = 0; i < o_.repetitions; ++i)
    for (const std::string& question : o_.questions.empty() ? one : o_.questions)
      add_question(c, question);
  const auto part = [](uint64_t a, uint64_t b) {
    return static_cast<double>(a) / static_cast<double>(std::max<uint64_t>(b, 1));
  };
  std::printf(
      "%-14s %5.2f x by the clock, %5.2f x by CPU time; %.2f tokens a step; %.0f of %.0f drafts "
      "accepted (%.0f%%), %.1f a step\n",
      c.name.c_str(), median(sums_.walls), median(sums_.cpus), part(sums_.tokens, sums_.steps),
      part(sums_.accepted, sums_.walls.size()), part(sums_.drafted, sums_.walls.size()),
      100 * part(sums_.accepted, sums_.drafted), part(sums_.drafted, sums_.drafted_steps));
}

// The time of a step by its tokens, in steps of one: sizes in turn, drafts that are never accepted.
void Bench::run_costs() {
  struct Sample {
    std::vector<double> walls, cpus;
  };
  std::map<uint32_t, Sample> samples;
  SessionOptions options;
  options.threads = o_.threads, options.lookup_tokens = 0, options.drafts_always = true;
  std::unique_ptr<Session> session;
  check(Session::open(model_, options, &session));
  Array<Token> tokens;
  for (uint32_t i = 0; i < o_.document; ++i)
    tokens.push_back(static_cast<Token>(10 + i * 7919 % 200));
  uint64_t done = 0;
  check(session->prefill_tokens(tokens, nullptr, nullptr, {}, &done));
  constexpr uint32_t sizes[] = {1, 2, 3, 4, 6, 8, 12, 16};
  uint32_t turn = 0, size = 0;
  std::size_t at = 0;
  uint64_t wall = 0, cpu = 0;
  session->draft_by([&](Token, uint32_t count, Array<Token>* out) {
    if (size > 0 && session->tokens().size() == at + 1) {
      samples[size].walls.push_back(static_cast<double>(os::now_ns() - wall));
      samples[size].cpus.push_back(static_cast<double>(cpu_ns() - cpu));
    }
    const uint32_t drafts = std::min(count, sizes[turn++ % std::size(sizes)] - 1);
    size = drafts + 1, at = session->tokens().size();
    for (uint32_t i = 0; i < drafts; ++i) out->push_back(5);
    wall = os::now_ns(), cpu = cpu_ns();
  });
  GenerateOptions answers;
  answers.max_tokens = o_.answer;
  Answer out;
  check(session->generate(
      "", answers, [](std::string_view) { return 0; }, &out));
  if (!samples.contains(1)) fail("the answer is too short to measure steps");
  const double one_wall = median(samples[1].walls), one_cpu = median(samples[1].cpus);
  std::printf("a step of one token: %.2f ms, %.2f ms of CPU time\n", 1e-6 * one_wall,
              1e-6 * one_cpu);
  for (const auto& [n, s] : samples)
    std::printf("%2u tokens: %5.2f by the clock, %5.2f by CPU time (%zu steps)\n", n,
                median(s.walls) / one_wall, median(s.cpus) / std::max(one_cpu, 1.0),
                s.walls.size());
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  CLI::App app("Measures steps with drafts, and answers with them next to answers without.");
  Options o;
  app.add_option("MODEL", o.model)->required();
  app.add_option("--device", o.device, "multiplies weights: cpu, cuda [cpu]");
  app.add_flag("--costs", o.costs, "the time of a step by its tokens");
  app.add_option("--script", o.scripts, "chance:PERCENT, quotes:LENGTH:GAP or runs:LENGTH:GAP");
  app.add_flag("--lookup", o.lookup, "drafts by lookup, as sessions have them");
  app.add_option("--mtp", o.layer, "drafts of the MTP layer for a step, alone and with lookup")
      ->check(CLI::Range(1u, Drafter::max_tokens));
  app.add_option("--file", o.file, "a text to prefill, in place of --document tokens");
  app.add_option("--document", o.document, "tokens [256]")->check(CLI::Range(1u, 1u << 24));
  app.add_option("--ask", o.questions, "a question, asked of a fork of the document each time");
  app.add_option("--answer", o.answer, "tokens of an answer at most [192]")
      ->check(CLI::Range(2u, 1u << 20));
  app.add_option("--threads", o.threads, "0: one per CPU");
  app.add_option("--repetitions", o.repetitions, "of which the median counts [5]")
      ->check(CLI::Range(1u, 1000u));
  app.add_flag("--always", o.always, "drafts as many as there are, whether or not they pay");
  app.add_flag("--same", o.same, "asks one session again and again, in place of a fork each time");
  app.add_flag("--fresh", o.fresh, "opens the model for each answer: nothing is known of costs");
  app.add_flag("--cpu-clock", o.cpu_clock, "sessions judge drafts by CPU time, not by the clock");
  CLI11_PARSE(app, argc, argv);
  std::vector<Case> cases;
  for (const std::string& text : o.scripts) cases.push_back(parse_script(text));
  if (o.lookup) cases.push_back({.kind = Case::Kind::lookup, .name = "lookup"});
  if (o.layer > 0) cases.push_back({.kind = Case::Kind::layer, .name = "mtp"});
  if (o.layer > 0 && o.lookup) cases.push_back({.kind = Case::Kind::both, .name = "mtp, lookup"});
  if (o.same && !o.scripts.empty()) fail("--same has no scripts");
  if (cases.empty() && !o.costs) fail("give --costs, --script, --lookup or --mtp");
  Bench bench(o);
  if (o.costs) bench.run_costs();
  for (const Case& c : cases) bench.run_case(c);
  return 0;
}
