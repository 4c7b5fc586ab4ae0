// Steps of an answer with drafts: the model decides on several tokens at once. A step of up to
// ForwardStep::max_open_tokens has the bits of steps of one token each. The sampler draws
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
      return "the decode strategy keeps what it selects by from token to token";
    case DraftsOff::no_hidden:
      return "the last token's hidden state is unknown";
    case DraftsOff::slower:
      return "steps with drafts take longer than they save";
    case DraftsOff::memory:
      return "the memory limit has no room for what the MTP layer keeps";
    case DraftsOff::device_memory:
      return "the GPU has no room for steps with drafts";
    case DraftsOff::no_match:
      return "the newest tokens occur nowhere before";
  }
  return "";
}

static const char no_gpu_room[] =
    "the GPU has no room for steps with drafts: the answer goes on without";
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
  const uint32_t most = model_->device_weights().empty() ? ForwardStep::max_open_tokens
                                                         : ForwardStep::max_device_open_tokens;
  auto n = static_cast<uint32_t>(std::min<uint64_t>(left, most));
  n = std::min(n, query_group_tokens(model_->config().group()));
  n = sequence_.store.open_tokens(n);
  if (const KvStore* windows = sequence_.windows_or_null()) n = windows->open_tokens(n);
  if (!sequence_.store.check_budget(tokens + n).ok()) return 0;
  return n - std::min(n, 1u);
}

// The most of them by lookup: on a GPU a step with drafts has a recurrent state after each token.
uint32_t Session::lookup_room(uint32_t room) const {
  constexpr uint64_t most_bytes = 256 << 20;
  const uint32_t drafts = std::min(room, options_.lookup_tokens);
  if (!sequence_.states || model_->device_weights().empty()) return drafts;
  const uint64_t states = most_bytes / (sequence_.states->size() * sizeof(float));
  return static_cast<uint32_t>(std::min<uint64_t>(drafts, states - std::min<uint64_t>(states, 1)));
}

// Why the next step can have no drafts.
DraftsOff Session::why_no_drafts() const {
  if (no_device_room_) return DraftsOff::device_memory;
  if (tracing_ || options_.compare != CompareLevel::none || options_.select.certify)
    return DraftsOff::measured;
  if (chooses_once() || decode_.memory() ||
      strategy_needs(options_.select.strategy, StrategyInfo::needs_representatives))
    return DraftsOff::strategy;
  return DraftsOff::no;
}

// After a scan that brings no drafts, so many steps go without one that scans take a hundredth of
// the time of steps.
Session::Lookup Session::look_up(Token next, uint32_t room) {
  constexpr uint64_t share = 100, most_passed = 15;
  Lookup out;
  const uint32_t most = lookup_room(room);
  if (most == 0) return out;
  if (scans_passed_ > 0 && !options_.drafts_always) return --scans_passed_, out;
  const uint64_t begin = os::now_ns();
  out.match = find_newest(sequence_.tokens, next);
  if (out.match.found()) out.offer = {DraftSource::lookup, most, out.match.length};
  else pace_.note_no_match();
  const uint64_t alone = pace_.alone_ns();
  if (alone > 0 && choose_drafts(out.offer).drafts == 0)
    scans_passed_ =
        static_cast<uint32_t>(std::min(most_passed, (os::now_ns() - begin) * share / alone));
  return out;
}

DraftPace::Choice Session::choose_drafts(const DraftPace::Offer& offer) const {
  if (offer.most == 0) return {};
  if (options_.drafts_always) return {offer.most, 2};
  return pace_.measures(offer.source) ? DraftPace::Choice() : pace_.choose(offer);
}

// Appends drafts to the token of an answer that comes next.
Status Session::draft(const Cancel* cancel, Array<Token>* tokens) {
  offer_ = {}, passed_ = -1;
  if (!may_draft()) {
    if (options_.drafts_left_out) drafts_.off = why_left_out();
    return {};
  }
  if (const DraftsOff why = why_no_drafts(); why != DraftsOff::no) {
    drafts_.off = why;
    return {};
  }
  const uint32_t room = draft_room();
  if (room == 0) return {};  // the next token fills a page
  RETURN_IF_ERROR(draft_by_source(room, cancel, tokens));
  const uint64_t drafts = tokens->size() - 1;
  if (drafts == 0) return {};
  ++drafts_.steps, drafts_.drafted += drafts;
  drafts_.off = DraftsOff::no;
  if (offer_.source == DraftSource::lookup) drafts_.looked_up += drafts;
  return {};
}

// Of what the text and the MTP layer have, takes what is expected to save more time.
Status Session::draft_by_source(uint32_t room, const Cancel* cancel, Array<Token>* tokens) {
  const Token next = tokens->back();
  if (propose_) {
    offer_ = {DraftSource::lookup, room,
              proposed_match_ ? proposed_match_() : LookupMatch::max_length};
    if (const uint32_t n = choose_drafts(offer_).drafts; n > 0)
      return propose_(next, n, tokens), Status();
    if (proposed_match_) {
      Array<Token> first;
      propose_(next, 1, &first);
      if (!first.empty()) passed_ = first[0];
    }
    if (!pace_.measures(offer_.source)) drafts_.off = DraftsOff::slower;
    return {};
  }
  const Lookup lookup = look_up(next, room);
  const DraftPace::Offer layer{DraftSource::layer,
                               drafter_ ? std::min(room, options_.draft_tokens) : 0};
  const DraftPace::Choice by_lookup = choose_drafts(lookup.offer), by_layer = choose_drafts(layer);
  if (by_lookup.drafts > 0 && by_lookup.gain >= by_layer.gain) {
    offer_ = lookup.offer;
    append_lookup(sequence_.tokens, next, lookup.match, by_lookup.drafts, tokens);
  } else if (by_layer.drafts > 0) {
    offer_ = layer;
    Status s = drafter_->draft(sequence_.tokens.size(), next, by_layer.drafts, cancel,
                               &*sequence_.drafts, tokens);
    if (s.code() == Code::no_memory && !model_->device_weights().empty()) {
      tokens->resize(1);
      log(1, no_gpu_room);
      no_device_room_ = true, drafts_.off = DraftsOff::device_memory;
      return {};
    }
    RETURN_IF_ERROR(std::move(s));
    if (tokens->size() == 1) drafts_.off = DraftsOff::no_hidden;
  } else {
    offer_ = lookup.offer;
    if (lookup.match.found()) {
      Array<Token> first;
      append_lookup(sequence_.tokens, next, lookup.match, 1, &first);
      passed_ = first[0];
    }
    const bool measures = pace_.measures(DraftSource::lookup) || pace_.measures(DraftSource::layer);
    if (options_.drafts_left_out) drafts_.off = why_left_out();
    else if (!lookup.match.found() && !drafter_) drafts_.off = DraftsOff::no_match;
    else if (!measures) drafts_.off = DraftsOff::slower;
  }
  return {};
}

// decode_step(), by the clock.
Status Session::decode_timed(const GenerateOptions& o, AnswerState* state, const TakeFn& take,
                             Token* token, Next* next) {
  if (!may_draft()) return decode_step(o, state, take, token, next);
  const auto now = [&] { return options_.clock ? options_.clock() : os::now_ns(); };
  const uint64_t begin = now(), drafted = drafts_.drafted, tokens = sequence_.tokens.size();
  const auto recordings = [&] {
    return forward_->recordings() + (drafter_ ? drafter_->preparations() : 0);
  };
  const uint64_t recorded = recordings();
  RETURN_IF_ERROR(decode_step(o, state, take, token, next));
  const auto drafts = static_cast<uint32_t>(drafts_.drafted - drafted);
  pace_.note({offer_, drafts, static_cast<uint32_t>(sequence_.tokens.size() - tokens),
              now() - begin, recordings() != recorded});
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
    RETURN_IF_ERROR(append_token(*token, o.cancel, takes_largest(o.sampling)));
    RETURN_IF_ERROR(sample_next(o, state, token));
    if (passed_ >= 0) pace_.note_passed(offer_, *token == passed_);
    *next = take(*token);
    return Status();
  };
  if (tokens.size() == 1) return alone();
  Status sampled;
  bool begun = false;
  const std::function<bool(std::span<float>, Token, uint32_t)> goes_on =
      [&](std::span<float> logits, Token best, uint32_t i) {
        begun = true;
        sampled = sample(o, state, logits, best, token);
        if (!sampled.ok()) return false;
        *next = take(*token);
        const bool accepted =
            *next == Next::token && i + 1 < tokens.size() && *token == tokens[i + 1];
        drafts_.accepted += accepted;
        if (offer_.source == DraftSource::lookup) drafts_.lookup_accepted += accepted;
        return accepted;
      };
  uint64_t done = 0;
  Status s = append({.tokens = tokens,
                     .kind = TextKind::answer,
                     .cancel = o.cancel,
                     .goes_on = &goes_on,
                     .greedy = takes_largest(o.sampling)},
                    &done);
  if (s.code() != Code::no_memory || begun || model_->device_weights().empty())
    return s.ok() ? std::move(sampled) : std::move(s);
  // A GPU needs more for such a step.
  log(1, no_gpu_room);
  no_device_room_ = true, drafts_.off = DraftsOff::device_memory;
  --drafts_.steps, drafts_.drafted -= tokens.size() - 1;
  if (offer_.source == DraftSource::lookup) drafts_.looked_up -= tokens.size() - 1;
  return alone();
}

// While it samples, the sequence has the tokens before the sampled one.
Status Session::run_open_step(const AppendRequest& request, ForwardStep* step) {
  Array<Token>& tokens = sequence_.tokens;
  const std::size_t vocabulary = model_->config().vocabulary;
  if (open_logits_.size() < step->size() * vocabulary)  // to shrink it would clear rows again
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
      const Token best = step->best && step->best[0] >= 0 ? step->best[stays] : -1;
      accepted = (*request.goes_on)({step->logits + stays * vocabulary, vocabulary}, best, stays);
    }
    *kept = stays;
    return end ? end(kept) : Status();
  };
  Attention& attention = forward_->attention();
  const ReadCounts before = attention.counts();
  RETURN_IF_ERROR(forward_->run(*step, sequence_.stores()));
  attention.keep_counts(before, stays, step->size());
  step->accept = nullptr;
  step->tokens = step->tokens.first(stays);
  return {};
}

}  // namespace kvasir
