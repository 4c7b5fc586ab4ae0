// Sessions over several saved documents.
//
// Layers with a sliding window or a recurrent state see the questions and answers alone: a window
// would hold the end of the last document, and states of documents cannot be joined. The other
// layers find what is asked for. Trained readers, facts in 8 documents of 4,500 tokens: the shape
// of gemma3 answers 26 of 32 (28 with the right document alone), that of qwen35 21 of 32 (24).
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <numeric>

#include "session/composition.h"

namespace kvasir {
namespace {

// Why a model's documents cannot be composed; null: they can.
const char* why_not_composable(const Model& model) {
  for (const LayerConfig& layer : model.config().layer_configs)
    if (layer.has_attention() && layer.has_rope() && layer.qk_norm_after_rope &&
        layer.qk_norm != QkNorm::none && layer.qk_norm != QkNorm::plain)
      return "it scales queries after RoPE, so that they cannot be turned to other positions";
  return nullptr;
}

}  // namespace

// Refuses strategies that carry data from layer to layer, or need more of a document than its
// sketch.
Status Session::check_composed_strategy(const SelectOptions& select) {
  if (select.certify)
    return Status::error(Code::unsupported, "an answer over several documents is not certified");
  const StrategyInfo* info = strategy_info(select.strategy);
  constexpr uint32_t others =
      StrategyInfo::filters | StrategyInfo::chooses_once | StrategyInfo::needs_representatives;
  if (!info || (!info->has(others) && !info->index)) return {};
  return Status::error(Code::unsupported,
                       "strategy '%s' does not attend several documents: use auto, full, bounded, "
                       "window, quest, flat or dipr",
                       select.strategy.c_str());
}

Status Session::check_composable(const Model& model, const SessionOptions& options) {
  if (const char* why = why_not_composable(model))
    return Status::error(Code::unsupported,
                         "the model cannot attend several documents: %s; load one document", why);
  if (options.draft_tokens > 0)
    return Status::error(Code::unsupported,
                         "draft_tokens is %u: the MTP layer does not attend several documents",
                         options.draft_tokens);
  return check_composed_strategy(options.select);
}

Status Session::compose(const std::shared_ptr<const Model>& model, const ComposeRequest& request,
                        const SessionOptions& options, std::unique_ptr<Session>* out) {
  const uint64_t begin = os::now_ns();
  const std::span<const std::string> paths = request.paths;
  if (paths.empty()) return Status::error(Code::bad_argument, "there is no document to compose");
  auto documents = std::make_shared<Composition>();
  documents->max_documents = request.most;
  std::unique_ptr<Session> session;
  if (paths.size() == 1) {
    RETURN_IF_ERROR(load(model, paths[0], options, false, request.cancel, {}, &session));
    if (!session->sequence_.is_composed()) {  // saved over several, it has its own
      documents->documents.push_back({paths[0], nullptr, session->sequence_.tokens.size(), 0});
      session->sequence_.composed = {documents, {0}, {0}, {}, 0, false};
    }
    *out = std::move(session);
    return {};
  }
  RETURN_IF_ERROR(check_composable(*model, options));
  RETURN_IF_ERROR(check_memory_budget(options.memory, options.full_precision));
  SessionOptions unlimited = options;  // limit_documents() divides the memory
  unlimited.memory.bytes = 0;
  RETURN_IF_ERROR(open(model, unlimited, &session));
  session->options_.memory.bytes = options.memory.bytes;
  RETURN_IF_ERROR(
      session->add_documents(paths, request.cancel, request.leaves_out, documents.get()));
  if (documents->documents.empty())
    return Status::error(Code::not_found, "none of %zu documents can be used", paths.size());
  RETURN_IF_ERROR(session->limit_documents(documents.get(), options.memory.bytes, request.cancel));
  SequenceState& sequence = session->sequence_;
  sequence.composed = {documents, {}, {}, {}, 0, true};
  RETURN_IF_ERROR(session->set_candidates({}));
  session->load_ns_ = os::now_ns() - begin;
  *out = std::move(session);
  return {};
}

Status Session::add_document(const std::string& path, const FileStamp& stamp,
                             std::unique_ptr<Session> document, Composition* to) {
  const SequenceState& s = document->sequence_;
  if (s.turn != Turn::document && s.turn != Turn::tokens)
    return Status::error(Code::bad_argument,
                         "%s is not a document alone: compose files that were saved before the "
                         "first question; nothing was loaded",
                         path.c_str());
  if (to->documents.empty()) {
    sequence_.turn = sequence_.document_turn = s.turn;
    sequence_.chat = s.chat;
    options_.instructions = document->options_.instructions;
  } else if (s.turn != sequence_.turn || s.chat != sequence_.chat ||
             document->instructions() != instructions()) {
    const char* what = s.turn != sequence_.turn   ? "another kind of text"
                       : s.chat != sequence_.chat ? "another chat format"
                                                  : "other instructions";
    return Status::error(Code::model_mismatch,
                         "%s has %s than %s: prefill one of them again; nothing was loaded",
                         path.c_str(), what, to->documents[0].path.c_str());
  }
  const uint64_t opening = document->opening_tokens();
  if (opening >= s.tokens.size())
    return Status::error(Code::bad_argument, "%s has no text; nothing was loaded", path.c_str());
  const uint64_t first_page =
      s.store.pages().pages() > 0 ? s.store.sink_count() : s.store.window_count();
  ComposedDocument& added = to->documents.emplace_back();
  added.path = path;
  RETURN_IF_ERROR(os::absolute_path(path, &added.absolute_path));
  added.stamp = stamp;
  added.tokens = s.tokens.size();
  added.skipped = static_cast<uint32_t>(std::min(opening, first_page));
  Array<float>& errors = sequence_.layer_errors;
  errors.resize(std::max(errors.size(), s.layer_errors.size()));
  for (std::size_t l = 0; l < s.layer_errors.size(); ++l)
    errors[l] = std::max(errors[l], s.layer_errors[l]);
  added.session = std::move(document);
  return {};
}

// Divides the memory among the documents and the session's own sequence: each gets what it needs at
// least, documents three quarters of the rest for pages.
Status Session::limit_documents(Composition* composition, uint64_t limit, const Cancel* cancel) {
  if (limit == 0) return {};
  const uint64_t own_tokens = std::max<uint64_t>(4096, sequence_.tokens.size());
  MemoryBudget budget;
  budget.spill_folder = options_.memory.spill_folder;
  budget.reaper = options_.memory.reaper;
  uint64_t needed = sequence_.store.min_bytes(own_tokens), tokens = 0;
  for (ComposedDocument& document : composition->documents) {
    KvStore& store = document.session->sequence_.store;
    if (store.window_tokens() == KvStore::keep_all)
      return Status::error(Code::bad_argument,
                           "memory_limit is set, but %s has full precision, which stays in memory: "
                           "compose it without a limit; nothing was loaded",
                           document.path.c_str());
    RETURN_IF_ERROR(store.set_budget(budget, document.tokens, cancel));  // no limit yet
    needed += store.min_bytes(document.tokens), tokens += document.tokens;
  }
  if (needed > limit)
    return Status::error(Code::limit,
                         "memory_limit is %" PRIu64 " bytes: %zu documents of %" PRIu64
                         " tokens take at least %" PRIu64 "; nothing was loaded",
                         limit, composition->documents.size(), tokens, needed);
  const uint64_t room = (limit - needed) / 4 * 3;
  uint64_t given = 0;
  for (ComposedDocument& document : composition->documents) {
    KvStore& store = document.session->sequence_.store;
    const double part = static_cast<double>(document.tokens) / static_cast<double>(tokens);
    budget.bytes =
        store.min_bytes(document.tokens) + static_cast<uint64_t>(static_cast<double>(room) * part);
    RETURN_IF_ERROR(store.set_budget(budget, document.tokens, cancel));
    given += budget.bytes;
  }
  MemoryBudget own = sequence_.store.budget();
  own.bytes = limit - given;
  return sequence_.store.set_budget(own, sequence_.tokens.size(), cancel);
}

Status Session::set_candidates(std::span<const uint32_t> documents) {
  ComposedState& composed = sequence_.composed;
  if (!composed.documents)
    return Status::error(Code::bad_state, "the session was not composed: it has one document");
  const auto count = static_cast<uint32_t>(composed.documents->documents.size());
  for (std::size_t i = 0; i < documents.size(); ++i)
    if (documents[i] >= count || (i > 0 && documents[i] <= documents[i - 1]))
      return Status::error(Code::bad_argument,
                           "document %u is not one of %u, or not after the one before it",
                           documents[i], count);
  std::vector<uint32_t> candidates(documents.begin(), documents.end());
  if (candidates.empty()) {
    candidates.resize(count);
    std::iota(candidates.begin(), candidates.end(), 0u);
  }
  composed.candidates = std::move(candidates);
  composed.scores.clear();
  return {};
}

Status Session::document(std::size_t index, DocumentReport* out) const {
  const ComposedState& composed = sequence_.composed;
  if (!composed.documents)
    return Status::error(Code::bad_state, "the session was not composed: it has one document");
  const std::vector<ComposedDocument>& documents = composed.documents->documents;
  if (index >= documents.size())
    return Status::error(Code::not_found, "there are %zu documents", documents.size());
  const auto is = [&](const std::vector<uint32_t>& in) {
    return std::lower_bound(in.begin(), in.end(), index);
  };
  *out = {.path = documents[index].path.c_str(), .tokens = document_tokens(index).size()};
  const auto candidate = is(composed.candidates), chosen = is(composed.chosen);
  out->is_candidate = candidate != composed.candidates.end() && *candidate == index;
  out->is_chosen = chosen != composed.chosen.end() && *chosen == index;
  if (out->is_candidate && !composed.scores.empty())
    out->score = static_cast<double>(
        composed.scores[static_cast<std::size_t>(candidate - composed.candidates.begin())]);
  return {};
}

std::span<const Token> Session::document_tokens(std::size_t index) const {
  const ComposedDocument& document = sequence_.composed.documents->documents[index];
  const std::span<const Token> own = document.session ? document.session->tokens() : tokens();
  return own.first(std::min<std::size_t>(document.tokens, own.size()));  // a rewind may cut it
}

std::vector<DocumentReport> Session::documents() const {
  std::vector<DocumentReport> out;
  for (DocumentReport report; document(out.size(), &report).ok();) out.push_back(report);
  return out;
}

// Makes later steps attend these documents, ascending.
void Session::attend(std::vector<uint32_t> documents) {
  ComposedState& composed = sequence_.composed;
  composed.chosen = std::move(documents);
  composed.passages.clear();
  composed.tokens = 0;
  for (std::size_t i = 0; i < composed.chosen.size(); ++i) {
    const ComposedDocument& document = composed.documents->documents[composed.chosen[i]];
    composed.tokens += document.tokens - (i > 0 ? document.skipped : 0);
  }
  documents_planned_ = false;
}

// The budget of a document with `sealed` of `all` tokens, unless the caller has set one: documents
// divide the least budget that one sequence would have.
static void share_budget(uint64_t sealed, uint64_t all, SelectOptions* options) {
  const StrategyInfo& info = *strategy_info(options->strategy);
  const bool chosen = options->budget_tokens > 0 || options->budget_fraction > 0;
  if (info.budget_fraction == 0 || chosen || all == 0) return;
  const double tokens = static_cast<double>(sealed),
               least = static_cast<double>(info.budget_floor) * tokens / static_cast<double>(all);
  options->budget_tokens = std::max<uint64_t>(
      1, static_cast<uint64_t>(std::ceil(std::max(info.budget_fraction * tokens, least))));
  if (info.has(StrategyInfo::takes_coverage) && options->coverage == 0)
    options->coverage = default_coverage;
}

// `auto` goes by the tokens of all chosen documents. A document without a sketch is short, or of an
// older version: it is attended exactly.
void Session::plan_documents() {
  const ComposedState& composed = sequence_.composed;
  const auto layers = model_->config().layers;
  const auto chosen = [&](std::size_t i) -> const ComposedDocument& {
    return composed.documents->documents[composed.chosen[i]];
  };
  const std::size_t count = composed.chosen.size();
  uint64_t sealed = 0, after = 0;
  for (std::size_t i = 0; i < count; ++i) sealed += chosen(i).session->store().sealed_tokens();
  SelectOptions select = options_.select;
  select.strategy = make_plan(select, sealed, layers, {}).strategy->name;
  attended_.assign(count, {}), document_plans_.resize(count), document_selectors_.clear();
  document_selectors_.resize(count);
  for (std::size_t i = count; i-- > 0;) {
    const Session& session = *chosen(i).session;
    const KvStore& store = session.store();
    SelectOptions own = select;
    if (strategy_needs(select.strategy, StrategyInfo::needs_sketch) && !store.sketch().built()) {
      own = {};
      if (store.pages().pages() > 1)
        log(2, (chosen(i).path + " has no sketch of its keys: all of it is attended").c_str());
    }
    if (own.strategy == "auto") own.strategy = "full";
    share_budget(store.sealed_tokens(), sealed, &own);
    Plan& plan = document_plans_[i];
    plan = make_plan(own, store.sealed_tokens(), layers, session.sequence_.layer_errors);
    if (plan.strategy->make && store.pages().pages() > 1)
      document_selectors_[i] = plan.strategy->make();
    AttendedDocument& document = attended_[i];
    document.store = &store;
    document.tokens_before = after + chosen(i).tokens;
    document.skipped = i > 0 ? chosen(i).skipped : 0;
    if (!composed.passages.empty()) document.hidden = composed.passages[i];
    document.plan = &plan;
    document.selector = document_selectors_[i].get();
    after += chosen(i).tokens - document.skipped;
  }
  documents_planned_ = true;
}

// batches: the tokens of the step may share a selection.
void Session::fill_documents(bool traced, bool batches, ForwardStep* step) {
  if (!sequence_.is_composed()) return;
  if (!documents_planned_) plan_documents();
  for (std::size_t i = 0; i < attended_.size(); ++i) {
    Plan& plan = document_plans_[i];
    plan.query_batch = batches && !traced && step->tokens.size() > 1 && plan.share_heads &&
                       plan.strategy->has(StrategyInfo::batches_queries);
    attended_[i].trace = traced ? &document_traces_[i] : nullptr;
  }
  step->documents = attended_;
}

void Session::trace_documents() {
  if (!sequence_.is_composed()) return;
  traced_documents_ = sequence_.composed.chosen;
  document_traces_.reserve(sequence_.composed.chosen.size());
  for (uint32_t d : sequence_.composed.chosen) {
    const ComposedDocument& document = sequence_.composed.documents->documents[d];
    document_traces_.emplace_back(model_->config().heads, sequence_.store.shape().page.block_tokens,
                                  document.tokens, document.session->opening_tokens());
  }
}

// Passages of all chosen documents, by their shares of what the answer attended in all of them.
Status Session::add_document_passages(std::vector<Passage>* out) const {
  Trace::Scale all;
  for (const Trace& trace : document_traces_)
    all.sum += trace.sum(), all.largest = std::max(all.largest, trace.largest());
  for (std::size_t i = 0; i < document_traces_.size(); ++i) {
    const std::size_t first = out->size();
    const uint32_t d = traced_documents_[i];
    sequence_.composed.documents->documents[d].session->add_passages(document_traces_[i], all, out);
    for (std::size_t p = first; p < out->size(); ++p) (*out)[p].document = d;
  }
  std::stable_sort(out->begin(), out->end(),
                   [](const Passage& a, const Passage& b) { return a.share > b.share; });
  out->resize(std::min(out->size(), Trace::max_passages));
  return {};
}

// Comparisons and certificates are of one store.
Status Session::check_measure() const {
  return options_.compare != CompareLevel::none || options_.select.certify
             ? refuse_composed(
                   "is neither compared with exact attention nor certified: measure "
                   "one document")
             : Status();
}

Status Session::refuse_composed(const char* what) const {
  if (!sequence_.is_composed()) return {};
  return Status::error(Code::unsupported, "a session over several documents %s", what);
}

}  // namespace kvasir
