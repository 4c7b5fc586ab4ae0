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
// or as many as the caller allows. Then it sees the best eight of them, its queries look for what
// those have, and scores are exact.
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
// "Sherlock Holmes", the right document was the best one for 41, and 42 answers were right.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "session/composition.h"
#include "session/overlap.h"

namespace kvasir {
namespace {

constexpr float retrieving = 0.5f;         // of the largest error of a layer
constexpr uint32_t most_layers = 4;        // each costs time with every document
constexpr uint32_t default_documents = 8;  // attended at most, unless the caller says how many
constexpr uint32_t looked_documents = 8;   // that the question sees
constexpr uint32_t scored_documents = 16;  // whose evidence is found then, exactly
constexpr float near_part = 0.75f, min_part = 0.4f;  // of the best evidence
constexpr float next_part = 2.0f / 3;                // of the last chosen one's
constexpr float min_evidence = 1.5f;
constexpr float written = 4;          // weight of c
constexpr uint32_t first_tokens = 4;  // of a text, which queries without a match attend (trace.cc)

// E of the documents of a step's scores.
class Evidence {
 public:
  Evidence(const DocumentScores& scores, ThreadPool* pool) : scores_(scores), pool_(pool) {
    for (const AttendedDocument& document : scores.documents)
      blocks_.emplace_back(Attention::score_block_count(*document.store));
    variances_.resize(blocks_.size());
  }

  // After each scoring of `rows` queries.
  void add(std::size_t rows) {
    const std::size_t n = blocks_.size();
    best_.resize(n * rows), sums_.assign(rows, 0);
    pool_->run(static_cast<uint32_t>(n), [&](uint32_t d, uint32_t) {
      for (std::size_t r = 0; r < rows; ++r) {
        const Row found = row_of(scores(d, r));
        best_[d * rows + r] = found.best;
        variances_[d] += found.variance;
      }
    });
    for (std::size_t d = 0; d < n; ++d)
      for (std::size_t r = 0; r < rows; ++r) sums_[r] += best_[d * rows + r];
    const float others = static_cast<float>(std::max<std::size_t>(n - 1, 1));
    pool_->run(static_cast<uint32_t>(n), [&](uint32_t d, uint32_t) {
      for (std::size_t r = 0; r < rows; ++r) {
        const float mean = (sums_[r] - best_[d * rows + r]) / others;
        if (!std::isfinite(mean)) continue;
        const std::span<const float> of_blocks = scores(d, r);
        for (std::size_t b = 0; b < of_blocks.size(); ++b) {
          const float above = std::max(0.0f, of_blocks[b] - mean);
          blocks_[d][b] += above * above;
        }
      }
    });
  }

  // E of a document, and its block b. overlap: [blocks] c.
  struct Best {
    float evidence = 0;
    uint32_t block = 0;
  };
  Best of(std::size_t document, std::span<const float> overlap) const {
    Best out;
    const std::vector<float>& e = blocks_[document];
    const double all = std::accumulate(variances_.begin(), variances_.end(), 0.0);
    const auto unit = static_cast<float>(all / static_cast<double>(variances_.size()));
    for (uint32_t b = 0; b < e.size() && unit > 0; ++b) {
      const float weight = 1 + written * overlap[b],
                  found =
                      (e[b] + (b + 1 < e.size() ? e[b + 1] : 0)) * weight * weight * weight / unit;
      if (found > out.evidence) out = {found, b};
    }
    return out;
  }

 private:
  std::span<const float> scores(std::size_t document, std::size_t r) const {
    const std::size_t blocks = blocks_[document].size();
    return {scores_.of_document[document] + r * blocks, blocks};
  }

  // The best score of a row, and the variance of those that are finite. By lanes, since one sum
  // would wait for each addition.
  struct Row {
    float best;
    double variance;
  };
  static Row row_of(std::span<const float> scores) {
    constexpr std::size_t lanes = 8;
    float best[lanes];
    double sums[lanes] = {}, squares[lanes] = {}, counts[lanes] = {};
    std::fill_n(best, lanes, -std::numeric_limits<float>::infinity());
    const auto add = [&](std::size_t lane, float s) {
      const double finite = s - s == 0 ? 1 : 0, x = s - s == 0 ? static_cast<double>(s) : 0;
      best[lane] = s > best[lane] ? s : best[lane];
      sums[lane] += x, squares[lane] += x * x, counts[lane] += finite;
    };
    std::size_t i = 0;
    for (; i + lanes <= scores.size(); i += lanes)
      for (std::size_t lane = 0; lane < lanes; ++lane) add(lane, scores[i + lane]);
    for (; i < scores.size(); ++i) add(i % lanes, scores[i]);
    const auto total = [](const double(&x)[lanes]) { return std::accumulate(x, x + lanes, 0.0); };
    const double count = total(counts), mean = total(sums) / count;
    return {*std::max_element(best, best + lanes),
            count > 0 ? std::max(0.0, total(squares) / count - mean * mean) : 0};
  }

  const DocumentScores& scores_;
  ThreadPool* pool_;
  std::vector<std::vector<float>> blocks_;  // e, [documents][blocks]
  std::vector<float> best_, sums_;          // [documents][rows], [rows]
  std::vector<double> variances_;           // [documents] sums over queries
};

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

// Orders ranking->order by the evidence for the question, with the attended documents in view if
// `sees`.
Status Session::rank_documents(const Choice& choice, bool sees, Ranking* ranking) {
  std::vector<uint32_t>& documents = ranking->order;
  const std::unique_ptr<const Selector> estimates = make_bounded_selector();
  DocumentScores scores;
  std::vector<BlockText> texts;
  std::size_t blocks = 0;
  for (uint32_t d : documents) {
    const ComposedDocument& document = sequence_.composed.documents->documents[d];
    const KvStore& store = document.session->store();
    const uint32_t near = store.sink_count() > 0 ? store.sink_count() : store.window_count();
    scores.documents.push_back(
        {.store = &store,
         .tokens_before = document.tokens,
         .skipped = std::min(std::max(document.skipped, first_tokens), near - std::min(near, 1u)),
         .selector = sees ? nullptr : estimates.get()});
    texts.push_back({document_tokens(d), scores.documents.back().skipped, store.sealed_tokens(),
                     Attention::score_block_count(store), Attention::score_block_tokens});
    blocks += texts.back().blocks;
  }
  scores.layers = retrieval_layers(sequence_.layer_errors, model_->config().layers);
  if (sequence_.layer_errors.empty())
    log(1, "no document is long enough to show which layers retrieve: all layers choose");
  Evidence evidence(scores, pool_.get());
  KvStore store(sequence_.store);
  std::optional<KvStore> windows(sequence_.windows);
  std::optional<RecurrentState> states(sequence_.states);
  const std::span<const Token> text = choice.turn.first(choice.question.end);
  const std::size_t chunk = std::clamp<std::size_t>(
      DocumentScores::max_floats / (blocks * model_->config().group()), 1, options_.prefill_chunk);
  scores.take = [&](std::size_t rows) { evidence.add(rows); };
  for (std::size_t done = 0; done < text.size();) {
    ForwardStep step;
    step.tokens = text.subspan(done, std::min(chunk, text.size() - done));
    step.cancel = choice.cancel;
    if (sees) fill_documents(false, true, &step);
    const std::size_t marks = choice.question.begin - std::min(choice.question.begin, done);
    scores.first = static_cast<uint32_t>(marks);
    scores.ends_step = done + step.tokens.size() == text.size();
    if (marks < step.tokens.size()) step.scores = &scores;
    RETURN_IF_ERROR(
        forward_->run(step, {store, windows ? &*windows : nullptr, states ? &*states : nullptr}));
    done += step.tokens.size();
  }
  const auto question =
      text.subspan(choice.question.begin, choice.question.end - choice.question.begin);
  std::vector<std::vector<float>> overlap;
  RETURN_IF_ERROR(
      find_overlap(model_->tokenizer(), question, texts, choice.cancel, pool_.get(), &overlap));
  std::fill(ranking->evidence.begin(), ranking->evidence.end(), 0.0f);
  ranking->stands_out = false;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    const Evidence::Best best = evidence.of(i, overlap[i]);
    ranking->evidence[documents[i]] = best.evidence, ranking->blocks[documents[i]] = best.block;
    ranking->stands_out |= best.evidence >= min_evidence;
  }
  std::stable_sort(documents.begin(), documents.end(), [&](uint32_t a, uint32_t b) {
    return ranking->evidence[a] > ranking->evidence[b];
  });
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
