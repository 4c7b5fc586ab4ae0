// What steps with drafts take, and what answers gain by them.
//
//   bench-drafts MODEL [document tokens [answer tokens [percent]]]      [512, 192, several]
//
// percent: of drafts that are right; with it, only answers are measured.
// First the time of a step by its tokens, in steps of one: drafts that are never accepted, as many
// as asked for. Then the time of answers, against the same without drafts: of each step's drafts a
// part is right, and the session chooses how many it has. The model may have random weights: the
// text decides nothing.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "session/session.h"

using namespace kvasir;

namespace {

[[noreturn]] void fail(const Status& s) {
  std::fprintf(stderr, "bench-drafts: %s\n", s.message());
  std::exit(1);
}

void check(const Status& s) {
  if (!s.ok()) fail(s);
}

struct Bench {
  std::shared_ptr<const Model> model;
  Array<Token> document;
  uint32_t answer_tokens;
  std::vector<Token> answer = {};  // of the sequence without drafts

  struct Result {
    double seconds = 0;
    DraftCounts drafts;
  };

  std::unique_ptr<Session> open(bool always) const {
    SessionOptions options;
    options.lookup_tokens = 0;
    options.drafts_always = always;
    std::unique_ptr<Session> session;
    check(Session::open(model, options, &session));
    uint64_t done = 0;
    check(session->prefill_tokens(document, nullptr, nullptr, {}, &done));
    return session;
  }

  Result run(Session* session) {
    GenerateOptions options;
    options.max_tokens = answer_tokens;
    options.keep = true;
    Answer out;
    check(session->generate(
        "", options, [](std::string_view) { return 0; }, &out));
    answer.assign(session->tokens().begin(), session->tokens().end());
    return {1e-9 * static_cast<double>(out.total_ns - out.first_token_ns) /
                static_cast<double>(out.answer_tokens),
            session->stats().drafts};
  }

  // A part of a step's drafts is right, the first ones: `share` in the mean.
  Session::DraftFn scripted(const Session& session, double share, uint32_t most) const {
    return [&session, script = answer, share, most, state = uint32_t{1}](
               Token, uint32_t count, Array<Token>* out) mutable {
      const std::size_t at = session.tokens().size() + 1;
      state = state * 1664525 + 1013904223;
      const double random = (state >> 8) / double{1 << 24};
      count = std::min(count, most);
      // uniform, but for shares next to none and all
      const double part = share <= 0.5 ? 2 * share * random : 1 - 2 * (1 - share) * random;
      const auto right = static_cast<uint32_t>(part * (count + 1));
      for (uint32_t i = 0; i < count; ++i) {
        const Token good = at + i < script.size() ? script[at + i] : 3;
        out->push_back(i < right ? good : good == 5 ? 6 : 5);
      }
    };
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2)
    return std::fprintf(stderr, "bench-drafts MODEL [document [answer [percent]]]\n"), 2;
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  Bench bench;
  check(Model::open(argv[1], "", &bench.model));
  const auto number = [&](int i, uint32_t other) {
    return argc > i ? static_cast<uint32_t>(std::atoi(argv[i])) : other;
  };
  bench.document.resize(number(2, 512));
  for (std::size_t i = 0; i < bench.document.size(); ++i)
    bench.document[i] = static_cast<Token>(10 + i * 7919 % 200);
  bench.answer_tokens = number(3, 192);
  const auto document = bench.open(false);
  const auto fork = [&](const Session& of) {
    std::unique_ptr<Session> out;
    check(of.fork(&out));
    return out;
  };
  (void)bench.run(fork(*document).get());
  const double alone = bench.run(fork(*document).get()).seconds;
  std::printf("a token alone: %.2f ms\n", 1e3 * alone);
  const auto always = bench.open(true);
  std::vector<uint32_t> sizes = {1, 2, 3, 5, 7, 11, 15};
  std::vector<double> shares = {0.0, 0.25, 0.5, 0.75, 1.0};
  if (argc > 4) sizes.clear(), shares = {number(4, 0) / 100.0};
  for (const uint32_t drafts : sizes) {
    const auto session = fork(*always);
    session->draft_by(bench.scripted(*session, 0, drafts));
    const auto steps = bench.run(session.get());
    std::printf(
        "steps of up to %2u tokens: %5.2f (%.1f drafts)\n", drafts + 1, steps.seconds / alone,
        static_cast<double>(steps.drafts.drafted) / static_cast<double>(steps.drafts.steps));
  }
  constexpr std::size_t repetitions = 7;  // of which the median counts: other processes disturb
  for (const double share : shares) {
    std::vector<double> gains;
    DraftCounts counts;
    while (gains.size() < repetitions) {
      const double before = bench.run(fork(*document).get()).seconds;
      const auto session = fork(*document);
      session->draft_by(bench.scripted(*session, share, 15));
      const auto drafted = bench.run(session.get());
      gains.push_back(before / drafted.seconds);
      counts = drafted.drafts;
    }
    std::nth_element(gains.begin(), gains.begin() + repetitions / 2, gains.end());
    std::printf("%3.0f%% right: %5.2f x, %llu steps with drafts, %llu of %llu accepted\n",
                100 * share, gains[repetitions / 2], static_cast<unsigned long long>(counts.steps),
                static_cast<unsigned long long>(counts.accepted),
                static_cast<unsigned long long>(counts.drafted));
  }
  return 0;
}
