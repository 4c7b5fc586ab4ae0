// Which documents of a composed session an answer attends: those that the question is about.
//
// The queries of the question's tokens are scored against the keys of all candidates, in the layers
// that retrieve: those with the largest errors of selective attention in prefill (layer_probe.h),
// four at most. A query meets each document as if it were right before the question.
//
//   s[q][b]   the best score of query q in block b of 64 tokens
//   mean[q]   of the other documents' best scores for q
//   var       the mean variance of s[q] over the blocks of a document
//   e[b]      mean over q of max(0, s[q][b] - mean[q])^2 / var  what speaks for a block
//   c[b]      how much of the question stands in b and b + 1 as it is written (overlap.h), 0 to 1
//   E[d]      max over b of (e[b] + e[b + 1]) (1 + 4 c[b])^3    the evidence for a document
//
// The mean takes out what all documents have. A long document has more blocks than a short one, but
// a block must answer for the whole question: "code" here and "gate" there are no evidence.
// Keys find what is meant; words separate names and numbers.
//
// The question is run twice. Alone, with scores that the sketches estimate, it finds 16 documents,
// or as many as the caller allows: after each layer the better half of the documents goes on, at
// least 32 and as many as the caller allows. Then it sees the best eight of them, its queries look
// for what those have, and scores are exact.
// The evidence of this second run chooses:
//
//   - the documents with at least three quarters of the best one's evidence;
//   - and those with less, at least 40%, if the next one has at most two thirds of theirs: a
//     question may be about several documents;
//   - all, if the best one has less than 1.5: none stands out. Of 60 questions about no place
//     ("Summarize the documents.") to three models all had at most 1.1; of 114 about a fact, at
//     least 2.9.
//
// The rule was chosen with the bundled model on facts in 100 parts of "Sherlock Holmes" of 4,500
// tokens: the right document is the best one for 49 of 50 questions, and 48 answers are right; with
// the right document alone, all. Held out, 200 parts of "War and Peace" of 8,000 tokens: 50 of 50,
// and 49 answers; with the right document alone, 49 too. Without c, of the 50 questions about
// "Sherlock Holmes", the right document was the best one for 41, and 42 answers were right. Of 128
// parts of "War and Peace" of 4,200 tokens, the better half had the right one for all 50 questions.
#include <algorithm>
#include <cinttypes>
#include <memory>
#include <numeric>

#include "session/composition.h"
#include "session/evidence.h"
#include "session/overlap.h"

namespace kvasir {
namespace {

constexpr float retrieving = 0.5f;         // of the largest error of a layer
constexpr uint32_t most_layers = 4;        // each costs time with every document
constexpr uint32_t default_documents = 8;  // attended at most, unless the caller says how many
constexpr uint32_t looked_documents = 8;   // that the question sees
constexpr uint32_t scored_documents = 16;  // whose evidence is found then, exactly
constexpr uint32_t left_documents = 32;    // in every layer of the first run, at least
constexpr float near_part = 0.75f, min_part = 0.4f;  // of the best evidence
constexpr float next_part = 2.0f / 3;                // of the last chosen one's
constexpr float min_evidence = 1.5f;
constexpr uint32_t first_tokens = 4;  // of a text, which queries without a match attend (trace.cc)

}  // namespace

std::vector<bool> retrieval_layers(std::span<const float> errors, uint32_t layers) {
  if (errors.size() != layers) return std::vector<bool>(layers, true);  // too short to be measured
  std::vector<uint32_t> order(layers);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return errors[a] > errors[b]; });
  std::vector<bool> out(layers);
  for (uint32_t l : std::span(order).first(std::min(layers, most_layers)))
    out[l] = errors[l] >= retrieving * errors[order[0]];
  return out;
}

// What a ranking asks of its documents, in their order.
struct Session::Scoring {
  DocumentScores scores;
  std::vector<std::vector<float>> overlap;  // [documents][blocks] c
  std::vector<uint32_t> layers;             // [documents] in which each was scored
};

// Fills all but `take` and what a step decides.
Status Session::begin_scoring(const Choice& choice, std::span<const uint32_t> documents,
                              const Selector* estimates, Scoring* out) const {
  std::vector<BlockText> texts;
  for (uint32_t d : documents) {
    const ComposedDocument& document = sequence_.composed.documents->documents[d];
    const KvStore& store = document.session->store();
    const uint32_t near = store.sink_count() > 0 ? store.sink_count() : store.window_count();
    out->scores.left.push_back(static_cast<uint32_t>(out->scores.left.size()));
    out->scores.documents.push_back(
        {.store = &store,
         .tokens_before = document.tokens,
         .skipped = std::min(std::max(document.skipped, first_tokens), near - std::min(near, 1u)),
         .selector = estimates});
    texts.push_back({document_tokens(d), out->scores.documents.back().skipped,
                     store.sealed_tokens(), Attention::score_block_count(store),
                     Attention::score_block_tokens});
  }
  out->scores.layers = retrieval_layers(sequence_.layer_errors, model_->config().layers);
  out->layers.assign(documents.size(), 0);
  const auto question =
      choice.turn.subspan(choice.question.begin, choice.question.end - choice.question.begin);
  return find_overlap(model_->tokenizer(), question, texts, choice.cancel, pool_.get(),
                      &out->overlap);
}

// After a scored layer: leaves the better half of the documents, and `least`.
static void narrow(const Evidence& evidence, std::span<const std::vector<float>> overlap,
                   std::size_t least, std::vector<uint32_t>* left) {
  const std::size_t count = std::max(least, (left->size() + 1) / 2);
  if (left->size() <= count) return;
  std::vector<std::pair<float, uint32_t>> found;
  for (uint32_t d : *left) found.emplace_back(-evidence.of(d, overlap[d]).evidence, d);
  std::sort(found.begin(), found.end());
  left->clear();
  for (const auto& [_, d] : std::span(found).first(count)) left->push_back(d);
  std::sort(left->begin(), left->end());
}

// Runs the question, alone or with the attended documents in view, and scores documents.
Status Session::score_question(const Choice& choice, bool sees, DocumentScores* scores) {
  KvStore store(sequence_.store);
  std::optional<KvStore> windows(sequence_.windows);
  std::optional<RecurrentState> states(sequence_.states);
  const std::span<const Token> text = choice.turn.first(choice.question.end);
  for (std::size_t done = 0; done < text.size();) {
    ForwardStep step;
    step.tokens =
        text.subspan(done, std::min<std::size_t>(options_.prefill_chunk, text.size() - done));
    step.cancel = choice.cancel;
    if (sees) fill_documents(false, true, &step);
    const std::size_t marks = choice.question.begin - std::min(choice.question.begin, done);
    scores->first = static_cast<uint32_t>(marks);
    scores->ends_step = done + step.tokens.size() == text.size();
    if (marks < step.tokens.size()) step.scores = scores;
    RETURN_IF_ERROR(
        forward_->run(step, {store, windows ? &*windows : nullptr, states ? &*states : nullptr}));
    done += step.tokens.size();
  }
  return {};
}

// Orders ranking->order by the evidence for the question, with the attended documents in view if
// `sees`.
Status Session::rank_documents(const Choice& choice, bool sees, Ranking* ranking) {
  std::vector<uint32_t>& documents = ranking->order;
  const std::unique_ptr<const Selector> estimates = make_bounded_selector();
  Scoring scoring;
  DocumentScores& scores = scoring.scores;
  RETURN_IF_ERROR(begin_scoring(choice, documents, sees ? nullptr : estimates.get(), &scoring));
  if (sequence_.layer_errors.empty())
    log(1, "no document is long enough to show which layers retrieve: all layers choose");
  std::vector<uint32_t> blocks;
  for (const auto& c : scoring.overlap) blocks.push_back(static_cast<uint32_t>(c.size()));
  Evidence evidence(scores, blocks, pool_.get());
  // A step after the first one would find some documents without scores.
  const bool narrows =
      !sees && !sequence_.layer_errors.empty() && choice.question.end <= options_.prefill_chunk;
  const std::size_t least = std::max(left_documents, sequence_.composed.documents->max_documents);
  scores.take = [&](std::size_t rows) { evidence.add(rows); };
  scores.end_layer = [&] {
    for (uint32_t d : scores.left) ++scoring.layers[d];
    if (narrows) narrow(evidence, scoring.overlap, least, &scores.left);
  };
  RETURN_IF_ERROR(score_question(choice, sees, &scores));
  std::fill(ranking->evidence.begin(), ranking->evidence.end(), 0.0f);
  ranking->stands_out = false;
  std::vector<uint32_t> order(documents.size());
  std::iota(order.begin(), order.end(), 0u);
  std::vector<float> found;
  for (uint32_t d : order) {
    const Evidence::Best best = evidence.of(d, scoring.overlap[d]);
    ranking->evidence[documents[d]] = best.evidence, ranking->blocks[documents[d]] = best.block;
    ranking->stands_out |= best.evidence >= min_evidence;
    found.push_back(best.evidence);
  }
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const std::vector<uint32_t>& layers = scoring.layers;
    return layers[a] != layers[b] ? layers[a] > layers[b] : found[a] > found[b];
  });
  for (uint32_t& d : order) d = documents[d];
  documents = std::move(order);
  return {};
}

// The first of `order` that fit, `most` at most, ascending. None: Code::context_full.
Status Session::fit_documents(std::span<const uint32_t> order, uint32_t most, uint64_t own,
                              bool logs, std::vector<uint32_t>* out) const {
  const std::vector<ComposedDocument>& documents = sequence_.composed.documents->documents;
  uint64_t room = options_.context - std::min(options_.context, own);
  out->clear();
  for (uint32_t d : order) {
    if (out->size() == most) break;
    if (documents[d].tokens <= room) out->push_back(d), room -= documents[d].tokens;
    else if (logs)
      log(1, (documents[d].path + " is left out of the answer: the context has no room").c_str());
  }
  if (out->empty())
    return Status::error(Code::context_full,
                         "no document fits: the context is %" PRIu64 " tokens, of which %" PRIu64
                         " are for the question and its answer",
                         options_.context, own);
  std::sort(out->begin(), out->end());
  return {};
}

// How many of the first documents the question is about.
static std::size_t chosen_count(std::span<const uint32_t> order, std::span<const float> evidence) {
  const float best = evidence[order[0]];
  std::size_t count = 1;
  for (std::size_t i = 1; i < order.size() && evidence[order[i]] >= min_part * best; ++i) {
    const float own = evidence[order[i]], next = i + 1 < order.size() ? evidence[order[i + 1]] : 0;
    if (own >= near_part * best || next <= next_part * own) count = i + 1;
  }
  return count;
}

// Orders candidates by their evidence, the best first, and leaves out those without enough.
Status Session::find_documents(const Choice& choice, uint64_t own, Ranking* ranking) {
  std::vector<uint32_t>& order = ranking->order;
  std::vector<uint32_t> seen;
  if (order.size() > looked_documents || !all_fit(order, own))
    RETURN_IF_ERROR(rank_documents(choice, false, ranking));
  RETURN_IF_ERROR(fit_documents(order, looked_documents, own, false, &seen));
  attend(std::move(seen));
  const uint32_t most = sequence_.composed.documents->max_documents;
  order.resize(std::min<std::size_t>(order.size(), std::max(scored_documents, most)));
  RETURN_IF_ERROR(rank_documents(choice, true, ranking));
  if (ranking->stands_out) order.resize(chosen_count(order, ranking->evidence));
  return {};
}

// [chosen] where the evidence of the chosen documents is, as far as it is in whole pages. Empty: in
// one document, or nowhere.
std::vector<PageRange> Session::passages_of(const Ranking& ranking) const {
  std::vector<PageRange> out;
  const ComposedState& composed = sequence_.composed;
  if (!ranking.stands_out || composed.chosen.size() < 2) return out;
  for (uint32_t d : composed.chosen) {
    const KvStore& store = composed.documents->documents[d].session->store();
    const uint32_t pages = Attention::score_block_tokens / store.shape().page.page_tokens,
                   first = ranking.blocks[d] * pages;
    // none of the first block, which has the sinks and the window too
    const uint32_t end = std::min(first + 2 * pages, store.pages().pages());
    out.push_back(first > 0 ? PageRange{first, end} : PageRange());
  }
  return out;
}

bool Session::all_fit(std::span<const uint32_t> documents, uint64_t own) const {
  uint64_t tokens = own;
  for (uint32_t d : documents) tokens += sequence_.composed.documents->documents[d].tokens;
  return tokens <= options_.context;
}

// Chooses the documents for an answer. Without a question those of the last answer stay.
// passages: of the chosen ones, as passages_of().
Status Session::choose_documents(const Choice& choice, std::vector<PageRange>* passages) {
  if (!sequence_.is_composed()) return {};
  ComposedState& composed = sequence_.composed;
  std::vector<uint32_t> chosen = composed.chosen;
  Ranking ranking{composed.candidates, {}, {}, false};
  const uint32_t asked = composed.documents->max_documents;
  const uint64_t own =
      sequence_.tokens.size() + choice.turn.size() + std::min(choice.more, options_.context / 8);
  const std::vector<uint32_t>& order = ranking.order;
  const bool questioned = choice.question.end > choice.question.begin,
             stays = !questioned && !chosen.empty() && all_fit(chosen, own) &&
                     std::includes(order.begin(), order.end(), chosen.begin(), chosen.end());
  if (stays) return {};
  if (questioned && !(all_fit(order, own) && (order.size() == 1 || asked >= order.size()))) {
    ranking.evidence.resize(composed.documents->documents.size());
    ranking.blocks.resize(ranking.evidence.size());
    RETURN_IF_ERROR(find_documents(choice, own, &ranking));
  }
  RETURN_IF_ERROR(fit_documents(order, asked > 0 ? asked : default_documents, own, true, &chosen));
  const float all = std::accumulate(ranking.evidence.begin(), ranking.evidence.end(), 0.0f);
  composed.scores.clear();
  for (uint32_t d : composed.candidates)
    if (!ranking.evidence.empty())
      composed.scores.push_back(all > 0 ? ranking.evidence[d] / all : 0);
  attend(std::move(chosen));
  *passages = passages_of(ranking);
  return {};
}

// After an answer that failed and left no token.
void Session::take_back_choice(const ComposedState& before) {
  sequence_.composed.chosen = before.chosen;
  sequence_.composed.scores = before.scores;
  sequence_.composed.tokens = before.tokens;
  documents_planned_ = false;
}

}  // namespace kvasir
