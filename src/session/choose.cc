// Which documents of a composed session an answer attends.
//
// The question alone is run, and its queries are scored against every candidate, in the layers that
// retrieve: those with the largest errors of selective attention in prefill (layer_probe.h). A
// score is that of a document's best key, with the query turned as if the document were right
// before the question. Sketches estimate it, with the centre of the store added, so scores of
// different documents are of one scale. The softmax over documents is sharp for a query head that
// looks for what only one document has, and even for others. So a document's score is the sum of
// its shares, each weighted by the square of what the softmax says (its divergence from an even
// one).
//
// Marks of turns do not count: what follows them is alike in all documents, or by chance.
//
// Measured with the bundled model: 40 documents of about 4,500 tokens with a fact each, eight of a
// kind. Of 40 questions, the right document was the best, and among the best two, four and eight.
// The rule was chosen among about 20 on these questions, so others will do worse: among 100
// documents it was 20, 25, 30 and 36 of 50.
//
//   layers that retrieve   weighted shares   25  30  34  37
//     with marks           weighted shares   21  25  32  38     squared shares   12  20  30  36
//   all layers             weighted shares   18  22  27  34
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <numeric>

#include "session/composition.h"

namespace kvasir {
namespace {

// Layers with at least this part of the largest error retrieve.
constexpr float retrieving = 0.5f;
// Chosen at most, unless all fit or the caller says how many.
constexpr uint32_t default_documents = 8;
constexpr uint32_t first_tokens = 4;  // of a text, which queries without a match attend (trace.cc)

std::vector<bool> retrieval_layers(std::span<const float> errors, uint32_t layers) {
  std::vector<bool> out(layers, true);
  if (errors.size() != layers) return out;  // too short to be measured
  const float largest = *std::max_element(errors.begin(), errors.end());
  for (uint32_t l = 0; l < layers; ++l) out[l] = errors[l] >= retrieving * largest;
  return out;
}

// Adds to sums, [documents], each document's weighted shares for the tokens first .. end - 1.
void add_shares(const DocumentScores& scores, std::size_t first, std::size_t end,
                std::vector<double>* sums) {
  const std::size_t rows = std::size_t{scores.tokens} * scores.heads, n = scores.documents;
  std::vector<double> shares(n);
  for (std::size_t layer = 0; layer < scores.best.size(); layer += n * rows)
    for (std::size_t row = first * scores.heads; row < end * scores.heads; ++row) {
      const auto score = [&](std::size_t d) {
        return static_cast<double>(scores.best[layer + d * rows + row]);
      };
      double largest = score(0), all = 0;
      for (std::size_t d = 1; d < n; ++d) largest = std::max(largest, score(d));
      for (std::size_t d = 0; d < n; ++d) all += std::exp(score(d) - largest);
      if (!std::isfinite(largest)) continue;
      double divergence = std::log(static_cast<double>(n)) - std::log(all);
      for (std::size_t d = 0; d < n; ++d) {
        shares[d] = std::exp(score(d) - largest) / all;
        if (shares[d] > 0) divergence += shares[d] * (score(d) - largest);
      }
      for (std::size_t d = 0; d < n; ++d) (*sums)[d] += shares[d] * divergence * divergence;
    }
}

}  // namespace

// scores: [candidates]
Status Session::score_documents(const Choice& choice, std::vector<float>* scores) {
  const ComposedState& composed = sequence_.composed;
  std::vector<AttendedDocument> documents;
  for (uint32_t d : composed.candidates) {
    const ComposedDocument& document = composed.documents->documents[d];
    const KvStore& store = document.session->store();
    const uint32_t near = store.sink_count() > 0 ? store.sink_count() : store.window_count();
    documents.push_back(
        {.store = &store,
         .tokens_before = document.tokens,
         .skipped = std::min(std::max(document.skipped, first_tokens), near - std::min(near, 1u))});
  }
  DocumentScores step_scores;
  step_scores.layers = retrieval_layers(sequence_.layer_errors, model_->config().layers);
  step_scores.heads = model_->config().heads;
  step_scores.documents = static_cast<uint32_t>(documents.size());
  if (sequence_.layer_errors.empty())
    log(1, "no document is long enough to show which layers retrieve: all layers choose");
  std::vector<double> sums(documents.size());
  KvStore store(sequence_.store);
  const std::span<const Token> question = choice.turn.first(choice.question.end);
  constexpr std::size_t most_floats = std::size_t{16} << 20;  // that a step's scores take
  const auto scored = static_cast<std::size_t>(
      std::count(step_scores.layers.begin(), step_scores.layers.end(), true));
  const std::size_t chunk = std::clamp<std::size_t>(
      most_floats / (std::max<std::size_t>(scored, 1) * documents.size() * step_scores.heads), 1,
      options_.prefill_chunk);
  for (std::size_t done = 0; done < question.size();) {
    ForwardStep step;
    step.tokens = question.subspan(done, std::min(chunk, question.size() - done));
    step.cancel = choice.cancel;
    step.documents = documents;
    step.scores = &step_scores;
    step_scores.tokens = step.size();
    step_scores.best.clear();
    RETURN_IF_ERROR(forward_->run(step, {store}));
    const std::size_t begin = std::max(done, std::min(choice.question.begin, done + step.size()));
    add_shares(step_scores, begin - done, step.size(), &sums);
    done += step.size();
  }
  const double all = std::accumulate(sums.begin(), sums.end(), 0.0);
  scores->clear();
  for (double sum : sums) scores->push_back(static_cast<float>(all > 0 ? sum / all : 0));
  return {};
}

// Chooses the documents for an answer: all candidates, if they fit; otherwise some of those with
// the largest scores.
Status Session::choose_documents(const Choice& choice) {
  if (!sequence_.is_composed()) return {};
  ComposedState& composed = sequence_.composed;
  const std::vector<ComposedDocument>& documents = composed.documents->documents;
  const std::size_t count = composed.candidates.size();
  const uint32_t asked = composed.documents->max_documents,
                 most = asked > 0 ? asked : default_documents;
  const uint64_t own = sequence_.tokens.size() + choice.turn.size() +
                       std::min(choice.more, options_.context / 8),
                 room = options_.context - std::min(options_.context, own);
  uint64_t all = 0;
  for (uint32_t d : composed.candidates) all += documents[d].tokens;
  if (all <= room && (asked == 0 || count <= asked)) {
    composed.scores.clear();
    attend(composed.candidates);
    return {};
  }
  std::vector<float> scores;
  RETURN_IF_ERROR(score_documents(choice, &scores));
  std::vector<uint32_t> order(count), chosen;
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  uint64_t taken = 0;
  for (uint32_t i : order) {
    const uint32_t d = composed.candidates[i];
    if (chosen.size() == most) break;
    if (taken + documents[d].tokens > room) {
      log(1, (documents[d].path + " is left out of the answer: the context has no room").c_str());
      continue;
    }
    chosen.push_back(d), taken += documents[d].tokens;
  }
  if (chosen.empty())
    return Status::error(Code::context_full,
                         "no document fits: the context is %" PRIu64 " tokens, of which %" PRIu64
                         " are for the question and its answer",
                         options_.context, own);
  std::sort(chosen.begin(), chosen.end());
  composed.scores = std::move(scores);
  attend(std::move(chosen));
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
