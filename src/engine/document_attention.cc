// Documents before a sequence: each is attended with turned queries, and the results are merged.
//
//   (o, lse)  of the sequence's own tokens
//   for each document:  q' = q turned by the tokens between;  (o', lse') over the document
//     lse'' = ln(e^lse + e^lse')      o = o e^(lse - lse'') + o' e^(lse' - lse'')
//
// The score of a query at position p with a key at position k depends on p - k alone: that is what
// RoPE is for. So a key that was saved at k of its document, whose first token is at d, is met by
// the query turned from p to p - d. Keys are centred per store: lse has the centre's score back
// before it is compared.
#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/first_failure.h"
#include "backend/query_groups.h"
#include "engine/host_attention.h"
#include "os/os.h"

namespace kvasir {

// How the document's keys meet the queries. Of latent attention, the last numbers of a query have
// RoPE.
QueryTurn HostAttention::turn_of(const StepContext& c, const LayerConfig& layer,
                                 std::size_t document) const {
  if (!layer.is_latent() && !layer.has_rope()) return {};
  const RopeConfig& rope = config_.ropes[layer.rope];
  const float* cos = c.turns + document * 2 * config_.angles() + config_.angles_before(layer.rope);
  return {cos, cos + config_.angles(), layer.is_latent() ? layer.latent.rank : 0, rope.dim,
          rope.neox};
}

// Merges a document's output and lse of a token into out and lse_.
void HostAttention::merge_document(uint32_t token, const float* part, const float* part_lse,
                                   float* out) {
  const std::size_t heads = config_.heads, dim = config_.head_dim;
  for (std::size_t i = token * heads, end = i + heads; i < end; ++i) {
    const float a = lse_[i], b = part_lse[i], m = std::max(a, b),
                all = m + std::log(std::exp(a - m) + std::exp(b - m)), x = std::exp(a - all),
                y = std::exp(b - all);
    float* to = out + i * dim;
    const float* from = part + i * dim;
    for (std::size_t j = 0; j < dim; ++j) to[j] = to[j] * x + from[j] * y;
    lse_[i] = all;
  }
}

// By all threads at once; none has a trace.
Status HostAttention::attend_together(std::span<const AttentionRequest> documents,
                                      const AttentionRequest& own, float* out) {
  const std::size_t width = std::size_t{own.tokens} * config_.heads * config_.head_dim,
                    lses = std::size_t{own.tokens} * config_.heads;
  part_.resize(documents.size() * width), part_lse_.resize(documents.size() * lses);
  RETURN_IF_ERROR(attention_.run_together(documents, part_.data(), part_lse_.data()));
  if (own.cancel.fired()) return {};
  pool_->run(own.tokens - own.first, [&](uint32_t task, uint32_t) {
    const uint32_t token = own.first + task;
    for (std::size_t d = 0; d < documents.size(); ++d) {
      attention_.add_centre_scores(documents[d], token, 1, part_lse_.data() + d * lses);
      merge_document(token, part_.data() + d * width, part_lse_.data() + d * lses, out);
    }
  });
  return {};
}

// Of the documents of a step.
std::vector<AttentionRequest> HostAttention::document_requests(const StepContext& c,
                                                               const LayerConfig& layer,
                                                               const AttentionRequest& own) const {
  std::vector<AttentionRequest> out;
  for (const AttendedDocument& document : c.step.documents)
    out.push_back({.layer = own.layer,
                   .first = own.first,
                   .tokens = own.tokens,
                   .q = own.q,
                   .turn = turn_of(c, layer, out.size()),
                   .store = *document.store,
                   .selector = document.plan->is_dense(own.layer) ? nullptr : document.selector,
                   .plan = *document.plan,
                   .is_apart = true,
                   .skipped = document.skipped,
                   .hidden = document.hidden,
                   .cancel = own.cancel});
  return out;
}

// What a layer of each document has besides pages is verified at its first use, together with that
// of the layers behind it up to `end`: few tasks of one layer would leave threads idle.
Status HostAttention::check_documents(std::span<const AttentionRequest> documents, uint32_t layer,
                                      uint32_t end, const CancelLatch& cancel) const {
  const auto checked = [&](const AttentionRequest& d) { return d.store.has_checked_rows(layer); };
  if (std::all_of(documents.begin(), documents.end(), checked)) return {};
  FirstFailure failure;
  const uint32_t layers = end - layer, tasks = static_cast<uint32_t>(documents.size()) * layers;
  pool_->run(tasks, [&](uint32_t task, uint32_t) {
    if (cancel.fired()) return;
    Status s = documents[task / layers].store.check_rows(layer + task % layers, cancel);
    if (!s.ok()) failure.note(std::move(s));
  });
  return std::move(failure).take();
}

// own: the request of the sequence's own tokens, whose output and lse_ are computed.
Status HostAttention::attend_documents(const StepContext& c, const LayerConfig& layer,
                                       const AttentionRequest& own, float* out) {
  const uint32_t n = c.tokens(), heads = layer.heads;
  const std::size_t width = n * layer.q_width(), lses = std::size_t{n} * heads;
  const std::vector<AttentionRequest> requests = document_requests(c, layer, own);
  RETURN_IF_ERROR(check_documents(requests, own.layer, own.store.shape().layers, own.cancel));
  if (own.cancel.fired()) return {};
  attention_.add_centre_scores(own, 1, lse_.get());
  // A single document too, if its tasks are enough for all threads.
  const bool enough =
      requests.size() > 1 ||
      (n - own.first > 1 &&
       query_groups(n - own.first, config_.group()) * config_.kv_heads >= pool_->threads());
  if (enough && !c.step.documents[0].trace && attention_.can_run_together(requests)) {
    RETURN_IF_ERROR(attend_together(requests, own, out));
    return end_documents(c, own);
  }
  part_.resize(width), part_lse_.resize(lses);
  shifts_.resize(requests.size() * heads);
  float *const part = part_.data(), *const part_lse = part_lse_.data();
  for (std::size_t d = 0; d < requests.size(); ++d) {
    const AttentionRequest& request = requests[d];
    const AttendedDocument& document = c.step.documents[d];
    attention_.set_trace(document.trace);
    Status s = attention_.run(request, part, part_lse);
    attention_.set_trace(c.step.trace);
    RETURN_IF_ERROR(std::move(s));
    if (own.cancel.fired()) return {};
    float* shifts = shifts_.data() + d * heads;
    const std::size_t last = lses - heads;
    std::copy_n(part_lse + last, heads, shifts);
    attention_.add_centre_scores(request, 1, part_lse);
    for (uint32_t h = 0; h < heads; ++h) shifts[h] = part_lse[last + h] - shifts[h];
    pool_->run(own.tokens - own.first, [&](uint32_t task, uint32_t) {
      merge_document(own.first + task, part, part_lse, out);
    });
    if (!request.selector) document.store->drop_resident_pages(own.layer);
  }
  for (std::size_t d = 0; d < c.step.documents.size(); ++d) {
    if (!c.step.documents[d].trace) continue;
    float* totals = shifts_.data() + d * heads;
    for (uint32_t h = 0; h < heads; ++h)
      totals[h] = lse_[std::size_t{n - 1} * heads + h] - totals[h];
    c.step.documents[d].trace->end_layer(totals, pool_);
  }
  return end_documents(c, own);
}

// lse_ has all documents.
Status HostAttention::end_documents(const StepContext& c, const AttentionRequest& own) {
  attention_.add_centre_scores(own, -1, lse_.get());
  if (c.step.trace)
    c.step.trace->end_layer(lse_.get() + std::size_t{own.tokens - 1} * config_.heads, pool_);
  return {};
}

bool HostAttention::ends_after(const ForwardStep& step, uint32_t layer) const {
  if (!step.scores || !step.scores->ends_step) return false;
  for (uint32_t l = layer + 1; l < config_.depth(); ++l) {
    const LayerConfig& later = config_.layer(l);
    if (later.has_attention() && !later.is_windowed() && step.scores->layers[later.kv])
      return false;
  }
  return true;
}

// Scores tokens of a step, for as many KV heads at once as there is room for.
Status HostAttention::score_tokens(std::span<const AttentionRequest> documents,
                                   DocumentScores* scores) {
  const std::size_t rows =
      std::size_t{documents[0].tokens - documents[0].first} * config_.group();  // of a KV head
  std::vector<std::size_t> begins;
  std::size_t floats = 0;  // of a KV head
  for (const AttentionRequest& request : documents) {
    begins.push_back(floats);
    floats += rows * Attention::score_block_count(request.store);
  }
  const auto together = static_cast<uint32_t>(
      std::clamp<std::size_t>(DocumentScores::max_joint_floats / floats, 1, config_.kv_heads));
  if (floats * together > scores->floats) {
    scores->scores = {};  // never old and new together
    scores->scores = make_buffer<float>(floats * together);
    os::prefer_huge_pages(scores->scores.get(), floats * together * sizeof(float));
    scores->floats = floats * together;
  }
  scores->facts.resize(documents.size() * rows * together);
  for (uint32_t first = 0, end; first < config_.kv_heads; first = end) {
    end = std::min(first + together, config_.kv_heads);
    const std::size_t taken = rows * (end - first);
    std::vector<Attention::ScoredRows> out;
    scores->of_document.clear();
    for (std::size_t begin : begins) {
      scores->of_document.push_back(scores->scores.get() + begin * (end - first));
      out.push_back({scores->of_document.back(), scores->facts.data() + out.size() * taken});
    }
    RETURN_IF_ERROR(attention_.score_blocks(documents, first, end, out));
    if (documents[0].cancel.fired()) return {};
    scores->take(taken);
  }
  return {};
}

Status HostAttention::score_documents(const StepContext& c, const LayerConfig& layer,
                                      const AttentionRequest& own) {
  DocumentScores& scores = *c.step.scores;
  if (!scores.layers[own.layer]) return {};
  std::vector<AttentionRequest> requests;
  std::size_t blocks = 0;
  for (uint32_t d : scores.left) {
    const AttendedDocument& document = scores.documents[d];
    requests.push_back({.layer = own.layer,
                        .q = own.q,
                        .turn = turn_of(c, layer, c.step.documents.size() + d),
                        .store = *document.store,
                        .selector = document.selector,
                        .plan = own.plan,
                        .is_apart = true,
                        .skipped = document.skipped,
                        .cancel = own.cancel});
    blocks += Attention::score_block_count(*document.store);
  }
  RETURN_IF_ERROR(check_documents(requests, own.layer, own.layer + 1, own.cancel));
  const auto most = static_cast<uint32_t>(std::clamp<std::size_t>(
      scores.max_floats / (blocks * config_.group()), 1, c.tokens()));  // tokens
  for (uint32_t first = scores.first; first < c.tokens(); first += most) {
    for (AttentionRequest& request : requests)
      request.first = first, request.tokens = std::min(first + most, c.tokens());
    if (own.cancel.fired()) return {};
    RETURN_IF_ERROR(score_tokens(requests, &scores));
  }
  for (const AttentionRequest& request : requests)
    if (!request.selector) request.store.drop_resident_pages(own.layer);
  if (scores.end_layer && !own.cancel.fired()) scores.end_layer();
  return {};
}

}  // namespace kvasir
