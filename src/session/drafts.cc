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
    case DraftsOff::rejected:
      return "too few drafts were accepted";
  }
  return "";
}

// Whether drafts go on: a step with drafts costs more than one without.
static bool pays(const DraftCounts& drafts) {
  constexpr uint64_t tried = 24;                      // steps
  constexpr uint64_t numerator = 1, denominator = 4;  // accepted tokens a step
  return drafts.steps < tried || drafts.accepted * denominator >= drafts.steps * numerator;
}

// The most drafts of the next step.
uint32_t Session::draft_room() const {
  const uint64_t tokens = sequence_.tokens.size(), left = options_.context - tokens;
  const uint32_t group = model_->config().group(),
                 drafts = propose_ ? Drafter::max_tokens : options_.draft_tokens;
  if (!model_->device_weights().empty()) return 0;  // the bits of a step depend on its tokens there
  uint32_t n = static_cast<uint32_t>(std::min<uint64_t>(left, drafts + 1));
  n = std::min(n, query_group_tokens(group));
  n = sequence_.store.open_tokens(n);
  if (const KvStore* windows = sequence_.windows_or_null()) n = windows->open_tokens(n);
  if (!sequence_.store.check_budget(tokens + n).ok()) return 0;
  return n - std::min(n, 1u);
}

// Appends drafts to the token of an answer that comes next.
Status Session::draft(const Cancel* cancel, Array<Token>* tokens) {
  if ((!drafter_ && !propose_) || drafts_.off == DraftsOff::rejected) return {};
  drafts_.off = DraftsOff::no;
  if (tracing_ || options_.compare != CompareLevel::none || options_.select.certify)
    drafts_.off = DraftsOff::measured;
  else if (chooses_once() || decode_.memory()) drafts_.off = DraftsOff::strategy;
  else if (!pays(drafts_)) drafts_.off = DraftsOff::rejected;
  const uint32_t room = draft_room();
  if (drafts_.off != DraftsOff::no || room == 0) return {};
  if (propose_) propose_(tokens->back(), room, tokens);
  else
    RETURN_IF_ERROR(drafter_->draft(sequence_.tokens.size(), tokens->back(), room, cancel,
                                    &*sequence_.drafts, tokens));
  if (tokens->size() == 1) drafts_.off = DraftsOff::no_hidden;
  else ++drafts_.steps, drafts_.drafted += tokens->size() - 1;
  return {};
}

// Appends a token, and drafts after it as far as they are what is sampled. *token becomes the one
// after these.
Status Session::decode_step(const GenerateOptions& o, AnswerState* state, const TakeFn& take,
                            Token* token, Next* next) {
  Array<Token> tokens = {*token};
  RETURN_IF_ERROR(draft(o.cancel, &tokens));
  if (tokens.size() == 1) {
    RETURN_IF_ERROR(append_token(*token, o.cancel));
    RETURN_IF_ERROR(sample(o, state, sequence_.logits, token));
    *next = take(*token);
    return {};
  }
  Status sampled;
  const std::function<bool(std::span<float>, uint32_t)> goes_on = [&](std::span<float> logits,
                                                                      uint32_t i) {
    sampled = sample(o, state, logits, token);
    if (!sampled.ok()) return false;
    *next = take(*token);
    const bool accepted = *next == Next::token && i + 1 < tokens.size() && *token == tokens[i + 1];
    drafts_.accepted += accepted;
    return accepted;
  };
  uint64_t done = 0;
  RETURN_IF_ERROR(
      append({.tokens = tokens, .kind = TextKind::answer, .cancel = o.cancel, .goes_on = &goes_on},
             &done));
  return sampled;
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
