// Builds the data of a strategy besides the KV cache: sketch, index, a selection made once.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "session/session.h"

namespace kvasir {

constexpr uint32_t asked_tokens = 32;  // of the text, per passage from which an index is built

// Sealed tokens from which prefill builds a sketch. In a shorter text a strategy builds it on
// demand.
constexpr uint64_t sketch_context = 1024;
// New tokens are inserted from 1/64 of the sealed tokens on. Scoring fewer tokens is faster than
// copying the graph.
constexpr uint64_t min_insertion = 64;
// Sealed tokens from which an index is built. In a shorter text all tokens are scored.
constexpr uint64_t index_context = 2048;

Status Session::build_sketch(const Cancel* cancel) {
  const ModelConfig& c = model_->config();
  const auto add_moment = [&](uint32_t layer, uint32_t head, double* moment) {
    sequence_.queries.add_moment(cpu_kernels(), layer, head, c.kv_heads,
                                 sequence_.store.shape().page.dim, moment);
  };
  return sequence_.store.build_sketch(add_moment, cpu_kernels(), pool_.get(), cancel);
}

// Called at the end of a document, when the sequence has every token. After a cancel the next use
// of the sketch builds it from the same queries. Drops an older sketch, so that on the CPU the new
// one equals that of an uncancelled call. On a GPU its bases are of all pages then, not of those of
// the last steps.
Status Session::finish_sketch(const Cancel* cancel) {
  Status s = build_sketch(cancel);
  if (s.code() != Code::cancelled) return s;
  sequence_.store.forget_sketch();
  return {};
}

// At the end of a prefill, or before its last `more` tokens: true the first time, and when the text
// has grown by a quarter since.
bool Session::sketch_is_due(uint64_t more) const {
  const KvStore& store = sequence_.store;
  const uint64_t pages = store.pages().pages() +
                         store.pages_after(uint64_t{store.window_count()} + more),
                 built = store.sketch().built_pages();
  return pages * store.shape().page.page_tokens >= sketch_context && pages * 4 >= built * 5 &&
         pages > built;
}

// Lets the last steps of a prefill find the sketch, while a GPU computes. Of a long text that is
// only slightly less of it than all; in a short one it is at least three quarters. In spans the
// last one finds it, of all keys.
void Session::plan_sketch(KeySketch::Build* sketch, ForwardStep* step) const {
  // With half of them the GPU waited for 16 cores: 8B shape, H200, steps of 4,096.
  constexpr uint64_t tokens = 24576;
  const uint64_t chunk = options_.prefill_chunk, left = step->size() + step->follows;
  if (model_->device_weights().empty() || !step->queries ||
      step->size() < RecentQueries::capacity || !sketch_is_due(left))
    return;
  if (step->chunk > 0) {  // each layer has all keys when the next one is computed
    if (step->follows > 0) return;
    // With one chunk of each layer bases are found, with the others keys are covered.
    const auto chunks = static_cast<uint32_t>(ceil_div(step->size(), step->chunk));
    sketch->begin_step(1, std::clamp(chunks - 1, 1u, KeySketch::Build::most_parts));
    return void(step->sketch = sketch);
  }
  const uint64_t now = sequence_.store.tokens();
  const bool begins = left <= tokens && 4 * (now + step->size()) >= 3 * (now + left);
  if (!sketch->begun() && !begins) return;
  const uint64_t steps =
      1 + step->follows / chunk + (step->follows % chunk >= RecentQueries::capacity ? 1 : 0);
  // A step that is probed leaves the CPU little time. The steps around it find its bases, unless
  // there are too few.
  constexpr uint64_t few = 2;
  const uint64_t probed_at = sequence_.probed_at;
  const bool probes_later = steps > few && probed_at > 0 && 4 * (now + left) >= 5 * probed_at;
  uint64_t finding = steps;
  if (step->probe && steps > 1) {
    if (sketch->begun()) return;
    ++finding;
  } else if (probes_later) {
    --finding;
  }
  sketch->begin_step(static_cast<uint32_t>(finding));
  step->sketch = sketch;
}

// Builds the sketch or the representatives of the planned strategy, if prefill has not built them
// or answers have doubled the sequence. The sequence keeps them.
Status Session::prepare_strategy(const Cancel* cancel, Progress* progress) {
  const bool has_sketch = sequence_.store.sketch().is_current();
  if (sequence_.store.pages().pages() < 2 ||
      (has_sketch && sequence_.store.representatives().known()))
    return {};
  const Plan plan = make_plan(options_.select, sequence_.store.sealed_tokens(),
                              model_->config().layers, sequence_.layer_errors);
  if (plan.strategy->has(StrategyInfo::needs_representatives) &&
      !sequence_.store.representatives().known())
    return prefill_again(cancel, progress);
  if (has_sketch || !plan.strategy->has(StrategyInfo::needs_sketch)) return {};
  log(2, "building the sketch of the keys");
  RETURN_IF_ERROR(build_sketch(cancel));
  if (progress) (void)progress->update(1, 1);
  return {};
}

// Finds the representatives of a sequence that was prefilled without them, by a second prefill into
// a separate store.
Status Session::prefill_again(const Cancel* cancel, Progress* progress) {
  log(1, "the text has no representative tokens: prefilling it again, once");
  KvStore store(sequence_.store.shape(), sequence_.store.window_tokens());
  std::optional<KvStore> windows = make_windows(*model_, store.window_tokens(), 0);
  std::optional<RecurrentState> states = make_states(model_->config(), 0);
  MemoryBudget rest = options_.memory;
  rest.states = states ? states->step_bytes() : 0;
  rest.checkpoints = 0;
  rest.drafts = {};
  if (rest.bytes) {  // both stores share the budget, and the second needs as much as the first
    if (sequence_.store.private_bytes() > rest.bytes / 2)
      RETURN_IF_ERROR(sequence_.store.shrink(cancel));
    const uint64_t used = sequence_.store.private_bytes() +
                          (sequence_.windows ? sequence_.windows->private_bytes() : 0) +
                          (sequence_.states ? sequence_.states->bytes() : 0) +
                          (sequence_.drafts ? sequence_.drafts->private_bytes() : 0);
    rest.bytes -= std::min(rest.bytes - 1, used);
  }
  if (Status s = store.set_budget(rest, sequence_.tokens.size(), cancel); s.code() == Code::limit) {
    return Status::error(Code::limit,
                         "no room for the second prefill that finds representative tokens: what is "
                         "left of %s",
                         s.message());
  } else if (!s.ok()) {
    return s;
  }
  for (std::size_t at = 0; at < sequence_.tokens.size();) {
    if (progress && !progress->update(at, sequence_.tokens.size()))
      return Status::error(Code::cancelled, "stopped by the progress callback");
    ForwardStep step;
    step.tokens = std::span<const Token>(sequence_.tokens)
                      .subspan(at, std::min<std::size_t>(options_.prefill_chunk,
                                                         sequence_.tokens.size() - at));
    step.cancel = cancel;
    RETURN_IF_ERROR(
        forward_->run(step, {store, windows ? &*windows : nullptr, states ? &*states : nullptr}));
    at += step.tokens.size();
  }
  sequence_.store.take_representatives(std::move(store));
  if (progress) (void)progress->update(sequence_.tokens.size(), sequence_.tokens.size());
  return {};
}

bool Session::chooses_once() const {
  const StrategyInfo* info = strategy_info(options_.select.strategy);
  return info && info->has(StrategyInfo::chooses_once) && !options_.full_precision;
}

// Called at the first step of an answer, for strategies that choose once. Selects again by the same
// queries if there is no selection, as after kv_load.
Status Session::choose_once(const Cancel* cancel) {
  if (!chooses_once() || decode_.has_chosen()) return {};
  if (sequence_.observed.queries.count() == 0)
    sequence_.observed = {sequence_.queries, sequence_.store.pages().pages()};
  ForwardStep step;
  plan_step(&step);
  const Plan& plan = decode_.plan();
  const uint32_t layers = model_->config().layers;
  std::vector<uint64_t> budgets(layers);
  for (uint32_t l = 0; l < layers; ++l) budgets[l] = plan.is_dense(l) ? 0 : plan.budget(l);
  const CancelLatch latch(cancel);
  const uint32_t end = std::min(sequence_.observed.pages, sequence_.store.pages().pages());
  if (!decode_.selector()->observe(
          {cpu_kernels(), sequence_.store.pages(), pool_.get(), latch, sequence_.observed.queries,
           model_->config().heads, 1, end, budgets, plan.share_heads},
          decode_.memory()))
    return sequence_.store.pages().damaged();
  if (latch.fired()) return Status::error(Code::cancelled, "cancelled");
  decode_.set_chosen(true);
  sequence_.store.drop_resident_pages();
  return {};
}

Status Session::prepare(const Cancel* cancel, Progress::Report report) {
  RETURN_IF_ERROR(sequence_.store.check_file());
  RETURN_IF_ERROR(prefill_missing(cancel, report));
  Progress progress(std::move(report));
  RETURN_IF_ERROR(prepare_strategy(cancel, &progress));
  return prepare_index(true, cancel, &progress);
}

Status Session::prepare_devices(const Cancel* cancel, Progress::Report report) {
  if (model_->device_weights().empty() || sequence_.tokens.empty() || sequence_.is_composed())
    return {};
  fetch_logits();
  ForwardStep step;
  step.cancel = cancel;
  plan_step(&step);
  Progress progress(std::move(report));
  return forward_->prepare(step, &sequence_.store, &progress);
}

// Prepares the index of the planned strategy. make: builds a missing index, and rebuilds it when
// the sequence has a quarter more tokens than at the build. Fewer new tokens are inserted, from
// 1/min_insertion of the sealed tokens on. Without make the index is only checked; the strategy
// scores tokens outside it.
Status Session::prepare_index(bool make, const Cancel* cancel, Progress* progress) {
  const uint64_t sealed = sequence_.store.sealed_tokens();
  const ModelConfig& config = model_->config();
  const Plan plan = make_plan(options_.select, sealed, config.layers, sequence_.layer_errors);
  if (!plan.strategy->index) return {};
  const IndexKind kind = *plan.strategy->index;
  const uint32_t graphs = options_.select.head_graphs ? config.heads / config.kv_heads : 1;
  TokenIndexes::Entry known = sequence_.store.indexes().of(kind);
  if (known.index) RETURN_IF_ERROR(known.index->check(cancel));
  if (!make) {
    if (known.index && known.index->graphs() != graphs && !std::exchange(graphs_logged_, true))
      log(1, graphs == 1 ? "the index has a graph per query head, unlike head_graphs: it stays in "
                           "use until the next build"
                         : "the index has one graph per group of query heads, unlike head_graphs: "
                           "it stays in use until the next build");
    return {};
  }
  if (known.index && known.index->graphs() == graphs) {
    const uint64_t built = std::min(known.index->built(), known.valid),
                   unknown = sealed - known.valid;
    if ((sealed - built) * 4 >= built) known = {};
    else if (!takes_insertions(kind) || unknown * min_insertion < sealed) return {};
  } else {
    known = {};
  }
  if (sealed < index_context) return {};
  const uint64_t bytes = known.index ? known.index->bytes() / known.index->items() * sealed
                                     : index_bytes(kind, sequence_.store.shape(), graphs, sealed);
  Status room = make_room_for_index(kind, bytes, cancel);
  std::shared_ptr<TokenIndex> index;
  if (room.ok()) {
    RETURN_IF_ERROR(make_index({kind, graphs, known, cancel, progress}, &index));
    room = make_room_for_index(kind, index->private_bytes(), cancel);
  }
  if (room.code() == Code::limit && known.index) {
    log(1,
        "memory_limit has no room for a larger index: tokens that it lacks are scored one by one");
    return {};
  }
  if (!room.ok()) return room;
  sequence_.store.set_index(std::move(index), static_cast<uint32_t>(sealed));
  return {};
}

// Makes room for an index of `bytes` bytes, which replaces the index of its kind.
Status Session::make_room_for_index(IndexKind kind, uint64_t bytes, const Cancel* cancel) {
  const std::shared_ptr<TokenIndex>& old = sequence_.store.indexes().of(kind).index;
  const uint64_t more = bytes - std::min(bytes, old ? old->private_bytes() : 0);
  return fit_drafts(
      [&] { return sequence_.store.keep_within_budget(sequence_.tokens.size(), more, 0, cancel); });
}

Status Session::make_index(const IndexRequest& request, std::shared_ptr<TokenIndex>* out) {
  const auto& [kind, graphs, known, cancel, progress] = request;
  log(2, known.index ? "inserting new tokens into the index of the keys"
                     : "building the index of the keys");
  const uint64_t begin = os::now_ns();
  IndexQueries queries;
  if (!known.index)
    RETURN_IF_ERROR(collect_queries(wanted_queries(kind), index_steps(sequence_.store.shape()),
                                    cancel, progress, &queries));
  IndexOrder order{kind, sequence_.store.pages(), queries, graphs, known, {}, &nearest_by_};
  for (const DeviceWeights& weights : model_->device_weights())
    order.devices.push_back(weights.device());
  RETURN_IF_ERROR(build_index(order, cpu_kernels(), pool_.get(), cancel, progress, out));
  sequence_.store.drop_resident_pages();
  index_ns_ = os::now_ns() - begin;
  return {};
}

// The first half of a passage becomes the question, the second half the answer.
Status Session::question_passages(uint32_t count, std::vector<Array<Token>>* out) const {
  const Tokenizer& tokenizer = model_->tokenizer();
  const ChatMarks& marks = sequence_.chat.marks();
  Array<Token> open, close;
  const Tokenizer::Part opens[] = {{marks.document_close, true}, {marks.question_open, true}},
                        closes[] = {{marks.question_close, true},
                                    {model_->thinking(sequence_.chat).skip, true}};
  RETURN_IF_ERROR(tokenizer.encode(opens, false, &open));
  RETURN_IF_ERROR(tokenizer.encode(closes, false, &close));
  const auto size = static_cast<uint32_t>(open.size() + close.size()) + asked_tokens,
             pieces = std::max(1u, count / size);
  const uint64_t from = sequence_.tokens.size() - asked_tokens;
  for (uint32_t p = 0; p < pieces; ++p) {
    const Token* passage = sequence_.tokens.data() + from * p / pieces;
    Array<Token>& piece = out->emplace_back(open);
    piece.insert(piece.end(), passage, passage + asked_tokens / 2);
    piece.insert(piece.end(), close.begin(), close.end());
    piece.insert(piece.end(), passage + asked_tokens / 2, passage + asked_tokens);
  }
  return {};
}

// Collects the queries from which an index is built. They must resemble the queries that will
// search it (measured in select/graph/ood.cc). So each passage is run as a question on a copy of
// the sequence, in place of its newest tokens. Prefill then need not keep queries, and a loaded
// sequence yields the same ones. steps: progress steps that follow.
Status Session::collect_queries(uint32_t count, uint64_t steps, const Cancel* cancel,
                                Progress* progress, IndexQueries* out) {
  if (count == 0) return {};
  const auto tokens = static_cast<uint32_t>(std::min<uint64_t>(count, sequence_.tokens.size() / 2));
  std::vector<Array<Token>> pieces;
  RETURN_IF_ERROR(question_passages(tokens, &pieces));
  const auto size = static_cast<uint32_t>(pieces[0].size()),
             n = size * static_cast<uint32_t>(pieces.size());
  *out = IndexQueries(sequence_.store.shape(), model_->config().heads, n);
  for (uint32_t at = 0; at < n; at += size) {
    if (!progress->update(at, n + steps))
      return Status::error(Code::cancelled, "stopped by the progress callback; no index was built");
    KvStore copy(sequence_.store);
    std::optional<KvStore> windows(sequence_.windows);
    std::optional<RecurrentState> states(sequence_.states);
    const uint64_t end = sequence_.tokens.size() - size;
    if (sequence_.resume_point(end) == end) {
      RETURN_IF_ERROR(copy.rewind(end, cpu_kernels()));
      if (windows) RETURN_IF_ERROR(windows->rewind(end, cpu_kernels()));
      if (states) RETURN_IF_ERROR(states->rewind(end));
    }  // otherwise the passage follows the text
    for (uint32_t done = 0; done < size; done += options_.prefill_chunk) {
      ForwardStep step;
      step.tokens = std::span<const Token>(pieces[at / size])
                        .subspan(done, std::min(options_.prefill_chunk, size - done));
      step.cancel = cancel;
      step.asked = out;
      step.asked_at = at + done;
      RETURN_IF_ERROR(
          forward_->run(step, {copy, windows ? &*windows : nullptr, states ? &*states : nullptr}));
    }
  }
  return {};
}

}  // namespace kvasir
