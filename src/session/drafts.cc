// Steps of an answer with drafts: the model decides on several tokens at once. A step of a few
// tokens has the bits of steps of one token each (ForwardStep::max_open_tokens). The sampler draws
// after each of them as it would without drafts, from the same logits, seed and position. A draft
// is accepted where it is what was drawn. So the answer is that of decoding alone, whatever the
// drafts are: a draft d is accepted with probability p(d), and what stands in its place otherwise
// has the distribution p given that it is not d.
#include <algorithm>
#include <utility>

#include "backend/query_groups.h"
#include "session/session.h"

namespace kvasir {

const char* name_of(DraftsOff why) {
  switch (why) {
    case DraftsOff::no:
      return "";
    case DraftsOff::measured:
      return "a measurement needs each token alone";
    case DraftsOff::strategy:
      return "the decode strategy keeps a selection from token to token";
    case DraftsOff::no_hidden:
      return "the last token's hidden state is unknown";
    case DraftsOff::slower:
      return "steps with drafts take longer than they save";
    case DraftsOff::memory:
      return "the memory limit has no room for what the MTP layer keeps";
    case DraftsOff::device_memory:
      return "the GPU has no room for steps with drafts";
  }
  return "";
}

static const char left_out[] =
    "memory_limit has no room for what the MTP layer keeps: answers have no drafts";

// Sets a budget by options. Where it is too small with drafts, leaves them out.
Status Session::set_budget(SessionOptions* o, const std::function<Status()>& set) {
  Status s = set();
  if (s.code() != Code::limit || o->memory.drafts.layers == 0) return s;
  o->memory.drafts = {};
  RETURN_IF_ERROR(set());
  o->drafts_left_out = true;
  if (o->log) o->log(1, left_out);
  return {};
}

// Leaves drafts out where something fits the budget only without them. fit: tries it.
Status Session::fit_drafts(const std::function<Status()>& fit) {
  KvStore& store = sequence_.store;
  const StoreShape counted = store.budget().drafts;
  Status s = fit();
  if (!sequence_.drafts || s.code() != Code::limit) return s;
  store.count_drafts({});
  s = fit();
  if (!s.ok()) {
    store.count_drafts(counted);
    return s;
  }
  drafter_.reset(), sequence_.drafts.reset();
  options_.memory.drafts = {}, options_.drafts_left_out = true;
  log(1, left_out);
  return s;
}

// The most drafts of the next step.
uint32_t Session::draft_room() const {
  const uint64_t tokens = sequence_.tokens.size(), left = options_.context - sequence_.positions();
  const uint32_t group = model_->config().group(),
                 drafts = propose_ ? Drafter::max_tokens : options_.draft_tokens;
  uint32_t n = static_cast<uint32_t>(std::min<uint64_t>(left, drafts + 1));
  n = std::min(n, query_group_tokens(group));
  n = sequence_.store.open_tokens(n);
  if (const KvStore* windows = sequence_.windows_or_null()) n = windows->open_tokens(n);
  if (!sequence_.store.check_budget(tokens + n).ok()) return 0;
  return n - std::min(n, 1u);
}

// Why the next step can have no drafts.
DraftsOff Session::why_no_drafts() const {
  if (options_.drafts_left_out && !propose_) return DraftsOff::memory;
  if (no_device_room_) return DraftsOff::device_memory;
  if (tracing_ || options_.compare != CompareLevel::none || options_.select.certify)
    return DraftsOff::measured;
  if (chooses_once() || decode_.memory()) return DraftsOff::strategy;
  return pace_.pauses() && !options_.drafts_always ? DraftsOff::slower : DraftsOff::no;
}

// Appends drafts to the token of an answer that comes next.
Status Session::draft(const Cancel* cancel, Array<Token>* tokens) {
  if (options_.draft_tokens == 0 && !propose_) return {};
  drafts_.off = why_no_drafts();
  if (drafts_.off != DraftsOff::no || !(options_.drafts_always || pace_.tries())) return {};
  const uint32_t room = draft_room();
  if (room == 0) return {};
  if (propose_) propose_(tokens->back(), room, tokens);
  else
    RETURN_IF_ERROR(drafter_->draft(sequence_.tokens.size(), tokens->back(), room, cancel,
                                    &*sequence_.drafts, tokens));
  if (tokens->size() == 1) drafts_.off = DraftsOff::no_hidden;
  else ++drafts_.steps, drafts_.drafted += tokens->size() - 1;
  return {};
}

// decode_step(), by the clock.
Status Session::decode_timed(const GenerateOptions& o, AnswerState* state, const TakeFn& take,
                             Token* token, Next* next) {
  if (options_.draft_tokens == 0 && !propose_) return decode_step(o, state, take, token, next);
  const auto now = [&] { return options_.clock ? options_.clock() : os::now_ns(); };
  const uint64_t begin = now(), drafted = drafts_.drafted, tokens = sequence_.tokens.size();
  RETURN_IF_ERROR(decode_step(o, state, take, token, next));
  pace_.note(static_cast<uint32_t>(drafts_.drafted - drafted),
             static_cast<uint32_t>(sequence_.tokens.size() - tokens), now() - begin);
  drafts_.step_ns = pace_.drafted_ns(), drafts_.alone_ns = pace_.alone_ns();
  return {};
}

// Appends a token, and drafts after it as far as they are what is sampled. *token becomes the one
// after these.
Status Session::decode_step(const GenerateOptions& o, AnswerState* state, const TakeFn& take,
                            Token* token, Next* next) {
  Array<Token> tokens = {*token};
  RETURN_IF_ERROR(draft(o.cancel, &tokens));
  const auto alone = [&] {
    RETURN_IF_ERROR(append_token(*token, o.cancel));
    RETURN_IF_ERROR(sample(o, state, sequence_.logits, token));
    *next = take(*token);
    return Status();
  };
  if (tokens.size() == 1) return alone();
  Status sampled;
  bool begun = false;
  const std::function<bool(std::span<float>, uint32_t)> goes_on = [&](std::span<float> logits,
                                                                      uint32_t i) {
    begun = true;
    sampled = sample(o, state, logits, token);
    if (!sampled.ok()) return false;
    *next = take(*token);
    const bool accepted = *next == Next::token && i + 1 < tokens.size() && *token == tokens[i + 1];
    drafts_.accepted += accepted;
    return accepted;
  };
  uint64_t done = 0;
  Status s = append(
      {.tokens = tokens, .kind = TextKind::answer, .cancel = o.cancel, .goes_on = &goes_on}, &done);
  if (s.code() != Code::no_memory || begun || model_->device_weights().empty())
    return s.ok() ? std::move(sampled) : std::move(s);
  // A GPU needs more for such a step.
  log(1, "the GPU has no room for steps with drafts: the answer goes on without");
  no_device_room_ = true, drafts_.off = DraftsOff::device_memory;
  --drafts_.steps, drafts_.drafted -= tokens.size() - 1;
  return alone();
}

// While it samples, the sequence has the tokens before the sampled one.
Status Session::run_open_step(const AppendRequest& request, ForwardStep* step) {
  Array<Token>& tokens = sequence_.tokens;
  const std::size_t vocabulary = model_->config().vocabulary;
  open_logits_.resize(step->size() * vocabulary);
  step->want = ForwardStep::Logits::all;
  step->logits = open_logits_.data();
  step->open = true;
  uint32_t stays = 0;
  const struct Cut {  // however the step ends
    Array<Token>& tokens;
    std::size_t before;
    ~Cut() { tokens.resize(before); }
  } cut{tokens, tokens.size()};
  step->accept = [&, end = std::move(step->accept)](uint32_t* kept) {
    for (bool accepted = true; accepted; ++stays) {
      tokens.push_back(step->tokens[stays]);
      accepted = (*request.goes_on)({step->logits + stays * vocabulary, vocabulary}, stays);
    }
    *kept = stays;
    return end ? end(kept) : Status();
  };
  RETURN_IF_ERROR(forward_->run(*step, sequence_.stores()));
  step->accept = nullptr;
  step->tokens = step->tokens.first(stays);
  return {};
}

}  // namespace kvasir
