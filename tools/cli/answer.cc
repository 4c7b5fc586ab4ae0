#include "answer.h"

#include <exception>
#include <sstream>
#include <vector>

#include "failure.h"
#include "files.h"
#include "number_text.h"
#include "passages.h"
#include "system.h"

namespace tool {
namespace {

struct Stream {
  Console& console;
  bool shows_thought;
  std::string text, thought;
  std::exception_ptr failure;  // rethrown after the call, with its type

  void print(const std::string& part) const {
    if (!console.json) console.terminal.print(part);
  }
  void take_thought(const std::string& part) {
    if (shows_thought) print(thought.empty() ? "[thinking]\n" + part : part);
    thought += part;
  }
  void take_text(const std::string& part) {
    const bool first = text.empty() && !thought.empty() && shows_thought;
    print(first ? (thought.ends_with('\n') ? "[answer]\n" : "\n[answer]\n") + part : part);
    text += part;
  }
};

template <void (Stream::*take)(const std::string&)>
int32_t pass(const char* text, size_t size, void* user) {
  Stream& stream = *static_cast<Stream*>(user);
  try {
    (stream.*take)({text, size});
    return 0;
  } catch (...) {
    stream.failure = std::current_exception();
    return 1;
  }
}

kv_generate_options generate_options(const SamplingFlags& flags, Keep keep, bool trace,
                                     const std::vector<const char*>& stop) {
  kv_generate_options options = initialised<kv_generate_options>();
  options.max_tokens = flags.max_tokens;
  options.temperature = flags.temperature;
  options.top_k = flags.top_k;
  options.top_p = flags.top_p;
  options.min_p = flags.min_p;
  options.repetition_penalty = flags.repetition_penalty;
  options.seed = flags.seed;
  options.stop = stop.data();
  options.stop_count = static_cast<uint32_t>(stop.size());
  options.thinking = flags.thinks ? KV_THINKING_ON : KV_THINKING_OFF;
  options.thinking_tokens = flags.thinking_tokens;
  options.on_thinking = pass<&Stream::take_thought>;
  options.flags = (keep == Keep::yes ? KV_KEEP_TURN : 0) | (trace ? KV_TRACE_PASSAGES : 0);
  return options;
}

const char* stop_name(uint32_t reason) {
  switch (reason) {
    case KV_STOP_END_OF_TURN:
      return "end_of_turn";
    case KV_STOP_STRING:
      return "stop_string";
    case KV_STOP_MAX_TOKENS:
      return "max_tokens";
    case KV_STOP_CONTEXT_FULL:
      return "context_full";
    case KV_STOP_CANCELLED:
      return "cancelled";
    default:
      return "unknown";
  }
}

double seconds(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

// Tokens per second after the first one, which waits for the prefill of the question.
double decode_rate(const kv_answer& facts) {
  const double time = seconds(facts.total_ns - facts.first_token_ns);
  const uint64_t tokens = facts.thinking_tokens + facts.answer_tokens;
  return tokens > 1 && time > 0 ? static_cast<double>(tokens - 1) / time : 0;
}

// "; quest read 2.0% of the tokens, 3.1% of the pages": relative to full attention.
std::string selection_text(const Answer& answer) {
  const auto present = static_cast<double>(answer.facts.tokens_present);
  if (present <= 0) return "";
  const double in_pages = static_cast<double>(answer.stats.last_pages_touched) *
                          static_cast<double>(answer.stats.page_tokens);
  return std::string("; ") + answer.stats.decode_strategy + " read " +
         percent(static_cast<double>(answer.facts.tokens_read), present) + " of the tokens, " +
         percent(in_pages, present) + " of the pages";
}

}  // namespace

int32_t append_text(const char* text, size_t size, void* string) {
  try {
    static_cast<std::string*>(string)->append(text, size);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

Answer answer(Console& console, kv_session* session, const std::string& question,
              const SamplingFlags& flags, Keep keep, bool trace) {
  std::vector<const char*> stop;
  for (const std::string& text : flags.stop) stop.push_back(text.c_str());
  const kv_generate_options options = generate_options(flags, keep, trace, stop);
  const kv_control control = control_of(console);
  Answer result;
  Stream stream{console, flags.shows_thought, {}, {}, nullptr};
  kv_error error{};
  const kv_status status =
      kv_generate(session, question.data(), question.size(), &options, &control,
                  pass<&Stream::take_text>, &stream, &result.facts, &error);
  if (stream.failure) std::rethrow_exception(stream.failure);
  const bool printed = !stream.text.empty() || (stream.shows_thought && !stream.thought.empty());
  if (printed) stream.print("\n");
  if (status == KV_CANCELLED) {
    result.facts.stop_reason = KV_STOP_CANCELLED;
  } else {
    check(status, error);
  }
  result.text = std::move(stream.text);
  result.thought = std::move(stream.thought);
  result.stats = stats_of(session);
  result.stats_json = stats_json(session);
  return result;
}

std::vector<std::string> questions_of(const std::vector<std::string>& given,
                                      const std::string& document) {
  if (!given.empty()) return given;
  std::vector<std::string> questions;
  if (!system::is_terminal(system::Stream::input) && document != "-") {
    std::istringstream lines(read_file("-"));
    for (std::string line; std::getline(lines, line);)
      if (line.find_first_not_of(" \t\r") != std::string::npos) questions.push_back(line);
  }
  if (questions.empty())
    throw Failure(exit_usage,
                  "no question; put it at the end: kvasir ask -m MODEL -f DOCUMENT \"What ...?\"");
  return questions;
}

void answer_each(Console& console, const kv_model* model, kv_session* session,
                 const std::vector<std::string>& questions, const SamplingFlags& flags,
                 uint32_t passages) {
  Json& answers = console.result["answers"] = Json::array();
  for (const std::string& question : questions) {
    if (console.terminal.chatty()) console.terminal.print("\n> " + question + "\n");
    const Answer given = answer(console, session, question, flags, Keep::no, passages > 0);
    const bool stopped = given.facts.stop_reason == KV_STOP_CANCELLED;
    std::vector<AttendedPassage> attended;
    if (passages > 0 && !stopped) attended = passages_of(model, session, passages);
    print_passages(console, attended);
    console.terminal.note("  " + facts_line(given));
    Json entry = {{"question", question}, {"answer", given.text}};
    if (flags.thinks) entry["thought"] = given.thought;
    if (passages > 0) entry["passages"] = passages_json(attended);
    entry.update(facts_json(given));
    answers.push_back(std::move(entry));
    if (stopped) throw Failure(exit_cancelled, "stopped");
  }
}

std::string facts_line(const Answer& answer) {
  const kv_answer& facts = answer.facts;
  std::string line =
      grouped(facts.answer_tokens) + (facts.answer_tokens == 1 ? " token" : " tokens");
  if (facts.thinking_tokens > 0) line += " after " + grouped(facts.thinking_tokens) + " of thought";
  if (facts.stop_reason == KV_STOP_CANCELLED) line += " (stopped)";
  if (facts.stop_reason == KV_STOP_MAX_TOKENS) line += " (ended by --max-tokens)";
  if (facts.stop_reason == KV_STOP_CONTEXT_FULL) line += " (ended: the context is full)";
  if (facts.answer_tokens > 0) line += ", first after " + duration(seconds(facts.first_token_ns));
  if (decode_rate(facts) > 0) line += ", then " + rate(decode_rate(facts)) + " tokens/s";
  return line + selection_text(answer);
}

Json facts_json(const Answer& answer) {
  const kv_answer& facts = answer.facts;
  Json json;
  json["stop"] = stop_name(facts.stop_reason);
  json["question_tokens"] = facts.question_tokens;
  json["answer_tokens"] = facts.answer_tokens;
  json["thinking_tokens"] = facts.thinking_tokens;
  json["first_token_ms"] = seconds(facts.first_token_ns) * 1e3;
  json["total_ms"] = seconds(facts.total_ns) * 1e3;
  json["tokens_per_second"] = decode_rate(facts);
  json["tokens_read"] = facts.tokens_read;
  json["tokens_present"] = facts.tokens_present;
  json["stats"] = answer.stats_json;
  return json;
}

}  // namespace tool
