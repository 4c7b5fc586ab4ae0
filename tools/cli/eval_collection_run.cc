#include "eval_collection_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "failure.h"
#include "files.h"
#include "number_text.h"
#include "strategies.h"

namespace tool {
namespace {

constexpr uint64_t passage_tokens = 128;
constexpr uint64_t question_room = 1024;      // tokens of the context for a question and its answer
constexpr uint32_t short_answer_tokens = 96;  // the longest expected answer has about 60
constexpr uint64_t steps_of_question = 50;    // of a question and its answer
constexpr const char* between_documents = "\n\n";

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The share of the documents with the answer that were attended.
std::optional<double> share_attended(const std::vector<size_t>& sought,
                                     const std::vector<size_t>& attended) {
  if (sought.empty()) return {};
  const auto found = std::count_if(sought.begin(), sought.end(), [&](size_t d) {
    return std::find(attended.begin(), attended.end(), d) != attended.end();
  });
  return static_cast<double>(found) / static_cast<double>(sought.size());
}

double score_given(const CollectionQuestion& question, const Collection& collection,
                   const std::string& answer, std::optional<size_t> document) {
  switch (question.question.task) {
    case Task::source:
      return document == question.documents.front() ? 1 : 0;
    case Task::no_answer: {
      const auto is_in = [&](const std::string& value) {
        return answer.find(value) != std::string::npos;
      };
      return std::none_of(collection.values.begin(), collection.values.end(), is_in) ? 1 : 0;
    }
    default:
      return score_of(question.question, {answer});
  }
}

}  // namespace

CollectionEvaluation::CollectionEvaluation(Console& console, const EvalArguments& arguments)
    : AnyEvaluation(console, arguments) {
  if (!std::all_of(arguments.tasks.begin(), arguments.tasks.end(), is_of_collection))
    throw Failure(exit_usage,
                  "--task: tasks of a collection and tasks of single documents are measured apart; "
                  "name only one kind");
  if (!arguments.budgets.empty() || arguments.depths > 0)
    throw Failure(exit_usage, "--budget and --depths do not apply to the tasks of a collection");
  std::vector<std::string> strategies = arguments.strategies;
  if (strategies == std::vector<std::string>{"all"}) strategies = {"auto"};
  for (const std::string& name : strategies)
    if (const std::vector<std::string> known = strategy_choices("auto");
        std::find(known.begin(), known.end(), name) == known.end())
      throw Failure(exit_usage, "--strategy: unknown strategy '" + name + "'");
  for (const Way way :
       ways_of(arguments.ways.empty() ? std::vector<std::string>{"all"} : arguments.ways))
    for (const std::string& strategy : strategies) askings_.push_back({way, strategy});
  expect_parameters_used(arguments.session, strategies);
  prepare(strategies);
  console.terminal.draw("Generating documents");
  make_jobs(haystack());
  console.terminal.erase();
}

CollectionEvaluation::Job CollectionEvaluation::make_job(const Haystack& haystack,
                                                         uint64_t length) const {
  Job job{length,
          make_collection(haystack, {documents(), length, arguments_.questions, arguments_.seed}),
          {},
          {},
          {},
          {},
          {}};
  std::erase_if(job.collection.questions, [&](const CollectionQuestion& q) {
    const auto& tasks = arguments_.tasks;
    return std::find(tasks.begin(), tasks.end(), q.question.task) == tasks.end();
  });
  const std::string identity = model_identity_ + " " + prefill_identity_of(flags_) + " ";
  const CountTokens count = [&](std::string_view text) { return haystack.count(text); };
  for (size_t d = 0; d < job.collection.texts.size(); ++d) {
    const std::string& text = job.collection.texts[d];
    job.names.push_back(hex(hash_of(identity + text)));
    if (d > 0) job.joined += between_documents;
    job.starts.push_back(job.joined.size());
    job.joined += text;
    job.index.add(d, split_passages(text, passage_tokens, count), count);
  }
  job.joined_name = hex(hash_of(identity + job.joined));
  return job;
}

void CollectionEvaluation::make_jobs(const Haystack& haystack) {
  for (const uint64_t length : arguments_.lengths) {
    if (length + question_room > info_.context_tokens)
      throw Failure(exit_usage, "--length: " + grouped(length) +
                                    " tokens and a question are more than the model's context of " +
                                    grouped(info_.context_tokens));
    jobs_.push_back(make_job(haystack, length));
  }
}

std::string CollectionEvaluation::key_of(const Job& job, const Asking& asking,
                                         const CollectionQuestion& question) const {
  std::string parts = answer_identity(asking.strategy) + " " + job.joined_name + " " +
                      name_of(asking.way) + " " + name_of(question.question.task);
  if (asking.way == Way::composed) parts += " " + std::to_string(arguments_.attend);
  if (asking.way == Way::retrieved) parts += " " + std::to_string(retrieve());
  return hex(hash_of(parts + "\n" + question.question.turns.front().question));
}

// A joined prefill needs the context for all documents.
bool CollectionEvaluation::fits(const Job& job, Way way) const {
  return way != Way::joined || job.tokens() + question_room <= info_.context_tokens;
}

std::vector<const Result*> CollectionEvaluation::results() const {
  std::vector<const Result*> results;
  for (const Asking& asking : askings_)
    for (const Job& job : jobs_)
      for (const CollectionQuestion& question : job.collection.questions)
        if (const Result* result = stored_.find(key_of(job, asking, question)))
          results.push_back(result);
  return results;
}

size_t CollectionEvaluation::requested() const {
  size_t requested = 0;
  for (const Job& job : jobs_)
    for (const Asking& asking : askings_)
      requested += fits(job, asking.way) ? job.collection.questions.size() : 0;
  return requested;
}

// Of a question, in units of Estimate.
double CollectionEvaluation::cost_of(const Job& job, Way way) const {
  switch (way) {
    case Way::alone:
      return 2 * static_cast<double>(documents()) * decode_cost(steps_of_question, job.length);
    case Way::retrieved:
      return prefill_cost(retrieve()) / 8 + decode_cost(steps_of_question, retrieve());
    default:
      return decode_cost(steps_of_question, job.tokens());
  }
}

void CollectionEvaluation::expect(const Job& job) {
  bool any = false, any_joined = false;
  for (const Asking& asking : askings_) {
    if (!fits(job, asking.way)) {
      console_.terminal.note("joined is left out: " + grouped(job.tokens()) +
                             " tokens are more than the model's context");
      continue;
    }
    for (const CollectionQuestion& question : job.collection.questions) {
      if (!is_open(job, asking, question)) continue;
      estimate_.expect(Work::decode, cost_of(job, asking.way));
      (asking.way == Way::joined ? any_joined : any) |= asking.way != Way::retrieved;
    }
  }
  if (any) estimate_.expect(Work::prefill, documents() * prefill_cost(job.length));
  if (any_joined) estimate_.expect(Work::prefill, prefill_cost(job.tokens()));
}

std::vector<Session> CollectionEvaluation::open(const Job& job, const Asking& asking) {
  const SessionFlags flags = eval_flags(flags_, asking.strategy);
  std::vector<Session> sessions;
  if (asking.way == Way::joined) {
    files_->prefill({job.joined_name, grouped(job.tokens()) + " tokens of all documents",
                     job.tokens(), job.joined});
    sessions.push_back(files_->load(job.joined_name, flags));
    return sessions;
  }
  if (asking.way == Way::retrieved) return sessions;
  for (size_t d = 0; d < job.names.size(); ++d)
    files_->prefill({job.names[d],
                     "document " + std::to_string(d + 1) + " of " + std::to_string(documents()),
                     job.length, job.collection.texts[d]});
  if (asking.way == Way::composed) sessions.push_back(compose(job, flags));
  else
    for (const std::string& name : job.names) sessions.push_back(files_->load(name, flags));
  return sessions;
}

Session CollectionEvaluation::compose(const Job& job, const SessionFlags& flags) {
  std::vector<std::string> paths;
  std::vector<const char*> given;
  for (const std::string& name : job.names) paths.push_back(files_->path_of(name));
  for (const std::string& path : paths) given.push_back(path.c_str());
  const SessionOptions session_options(console_, flags);
  kv_compose_options options = initialised<kv_compose_options>();
  options.max_documents = arguments_.attend;
  options.session = session_options.get();
  const kv_control control = control_of(console_);
  kv_error error{};
  kv_session* session = nullptr;
  expect_done(kv_session_compose(model_.get(), given.data(), given.size(), &options, &control,
                                 &session, &error),
              error);
  return Session(session);
}

kv_answer CollectionEvaluation::answer_briefly(kv_session* session, const std::string& question,
                                               uint32_t flags, std::string* text, Result* result) {
  kv_generate_options options = initialised<kv_generate_options>();
  options.max_tokens = short_answer_tokens;
  options.flags = flags;
  return generate(session, question, options, text, result);
}

// The passage that the last answer, which was traced, attended most.
std::optional<kv_passage> CollectionEvaluation::first_passage(kv_session* session) {
  std::vector<kv_passage> passages(64);
  size_t count = 0;
  kv_error error{};
  check(kv_session_passages(session, passages.data(), passages.size(), &count, &error), error);
  if (count == 0) return {};
  return passages.front();
}

CollectionEvaluation::Given CollectionEvaluation::ask_composed(kv_session* session,
                                                               const std::string& question,
                                                               Result* result) {
  Given given;
  answer_briefly(session, question, KV_TRACE_PASSAGES, &given.text, result);
  if (const auto passage = first_passage(session)) given.document = passage->document;
  for (uint32_t d = 0; d < documents(); ++d) {
    kv_session_document document = initialised<kv_session_document>();
    kv_error error{};
    check(kv_session_get_document(session, d, &document, &error), error);
    if (document.flags & KV_DOCUMENT_ATTENDED) given.attended.push_back(d);
  }
  return given;
}

CollectionEvaluation::Given CollectionEvaluation::ask_joined(const Job& job, kv_session* session,
                                                             const std::string& question,
                                                             Result* result) {
  Given given;
  answer_briefly(session, question, KV_TRACE_PASSAGES, &given.text, result);
  if (const auto passage = first_passage(session); passage && passage->first_byte != UINT64_MAX) {
    const auto after = std::upper_bound(job.starts.begin(), job.starts.end(), passage->first_byte);
    given.document = static_cast<size_t>(after - job.starts.begin()) - 1;
  }
  for (size_t d = 0; d < documents(); ++d) given.attended.push_back(d);
  return given;
}

// Mean of ln(probability) of the tokens from `answer_at` on, at the end of the session.
double CollectionEvaluation::certainty(kv_session* session, uint64_t answer_at) {
  const std::vector<int32_t> tokens = tokens_of(session);
  if (tokens.size() <= answer_at) return -std::numeric_limits<double>::infinity();
  std::vector<float> logarithms(tokens.size() - answer_at);
  const kv_control control = control_of(console_);
  kv_error error{};
  check(kv_session_rewind(session, answer_at, &error), error);
  expect_done(kv_session_score(session, tokens.data() + answer_at, logarithms.size(),
                               logarithms.data(), &control, &error),
              error);
  double sum = 0;
  for (const float logarithm : logarithms) sum += static_cast<double>(logarithm);
  return sum / static_cast<double>(logarithms.size());
}

CollectionEvaluation::Given CollectionEvaluation::ask_alone(std::vector<Session>& sessions,
                                                            const std::string& question,
                                                            Result* result) {
  Given best;
  double most = -std::numeric_limits<double>::infinity();
  for (size_t d = 0; d < sessions.size(); ++d) {
    const Session conversation = fork(sessions[d].get());
    const uint64_t before = token_count(conversation.get());
    std::string text;
    const kv_answer facts =
        answer_briefly(conversation.get(), question, KV_KEEP_TURN, &text, result);
    const double certain = certainty(conversation.get(), before + facts.question_tokens);
    if (d == 0 || certain > most) best = {std::move(text), d, {d}}, most = certain;
  }
  return best;
}

CollectionEvaluation::Given CollectionEvaluation::ask_retrieved(const Job& job,
                                                                const SessionFlags& flags,
                                                                const std::string& question,
                                                                Result* result) {
  const std::vector<FoundPassage> passages = job.index.find(question, retrieve());
  Given given;
  std::string text;
  std::vector<size_t> ends;  // of each passage in `text`
  for (const FoundPassage& passage : passages) {
    text += passage.text + "\n";
    ends.push_back(text.size());
    if (given.attended.empty() || given.attended.back() != passage.document)
      given.attended.push_back(passage.document);
  }
  const Session session = open_session(console_, model_.get(), flags);
  bool interrupted = false;
  if (!text.empty()) files_->append(session.get(), text, 0, &interrupted);
  if (interrupted) stopped();
  answer_briefly(session.get(), question, KV_TRACE_PASSAGES, &given.text, result);
  if (const auto attended = first_passage(session.get());
      attended && attended->first_byte != UINT64_MAX) {
    const auto at = static_cast<size_t>(
        std::upper_bound(ends.begin(), ends.end(), attended->first_byte) - ends.begin());
    if (at < passages.size()) given.document = passages[at].document;
  }
  return given;
}

CollectionEvaluation::Given CollectionEvaluation::ask(const Job& job, const Asking& asking,
                                                      std::vector<Session>& sessions,
                                                      const std::string& question, Result* result) {
  switch (asking.way) {
    case Way::composed:
      return ask_composed(sessions.front().get(), question, result);
    case Way::joined:
      return ask_joined(job, sessions.front().get(), question, result);
    case Way::alone:
      return ask_alone(sessions, question, result);
    case Way::retrieved:
      break;
  }
  return ask_retrieved(job, eval_flags(flags_, asking.strategy), question, result);
}

void CollectionEvaluation::answer_all(const Job& job, const Asking& asking) {
  const auto& questions = job.collection.questions;
  if (!fits(job, asking.way) ||
      std::none_of(questions.begin(), questions.end(),
                   [&](const auto& q) { return is_open(job, asking, q); }))
    return;
  std::vector<Session> sessions = open(job, asking);
  progress_.begin(std::string(name_of(asking.way)) + " " + asking.strategy + " over " +
                  std::to_string(documents()) + " documents of " + grouped(job.length) + " tokens");
  for (const CollectionQuestion& question : questions) {
    Result result;
    result.key = key_of(job, asking, question);
    if (stored_.find(result.key)) continue;
    result.document = job.joined_name;
    result.length = job.length;
    result.strategy = name_of(asking.way);
    result.budget = asking.strategy;
    result.task = question.question.task;
    const Turn& turn = question.question.turns.front();
    const Clock::time_point start = Clock::now();
    const Given given = ask(job, asking, sessions, turn.question, &result);
    result.seconds = seconds_since(start);
    result.questions = {turn.question};
    result.expected = {turn.expected};
    result.answers = {given.text};
    result.score = score_given(question, job.collection, given.text, given.document);
    result.attended = share_attended(question.documents, given.attended);
    stored_.add(std::move(result));
    progress_.step(Work::decode, cost_of(job, asking.way));
  }
}

void CollectionEvaluation::run() {
  for (const Job& job : jobs_) expect(job);
  for (const Job& job : jobs_)
    for (const Asking& asking : askings_) answer_all(job, asking);
  console_.terminal.erase();
}

}  // namespace tool
