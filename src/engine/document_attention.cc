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

#include "engine/host_attention.h"

namespace kvasir {

// turned = the queries as the document's keys meet them. Of latent attention, the last numbers of
// a query have RoPE.
void HostAttention::turn_queries(const StepContext& c, const LayerConfig& layer,
                                 std::size_t document, const float* q, float* turned) {
  const std::size_t width = layer.q_width();
  const bool turns = layer.is_latent() || layer.has_rope();
  const RopeConfig* rope = turns ? &config_.ropes[layer.rope] : nullptr;
  const std::size_t first = layer.is_latent() ? layer.latent.rank : 0;
  const float* cos =
      turns ? c.turns + document * 2 * config_.angles() + config_.angles_before(layer.rope)
            : nullptr;
  pool_->run(c.tokens(), [&](uint32_t t, uint32_t) {
    float* to = turned + t * width;
    std::copy_n(q + t * width, width, to);
    if (rope)
      cpu_kernels().rope(to + first, layer.heads, layer.head_dim, rope->dim, cos,
                         cos + config_.angles(), rope->neox);
  });
}

// Merges part_ and part_lse_ into out and lse_.
void HostAttention::merge_document(const AttentionRequest& own, float* out) {
  const std::size_t heads = config_.heads, dim = config_.head_dim;
  pool_->run(own.tokens - own.first, [&](uint32_t task, uint32_t) {
    for (std::size_t i = (own.first + task) * heads, end = i + heads; i < end; ++i) {
      const float a = lse_[i], b = part_lse_[i], m = std::max(a, b),
                  all = m + std::log(std::exp(a - m) + std::exp(b - m)), x = std::exp(a - all),
                  y = std::exp(b - all);
      float* to = out + i * dim;
      const float* from = part_.data() + i * dim;
      for (std::size_t j = 0; j < dim; ++j) to[j] = to[j] * x + from[j] * y;
      lse_[i] = all;
    }
  });
}

// own: the request of the sequence's own tokens, whose output and lse_ are computed.
Status HostAttention::attend_documents(const StepContext& c, const LayerConfig& layer,
                                       const AttentionRequest& own, float* out) {
  const uint32_t n = c.tokens(), heads = layer.heads, first = own.first;
  const std::size_t width = layer.q_width();
  turned_.resize(n * width), part_.resize(n * width), part_lse_.resize(std::size_t{n} * heads);
  shifts_.resize(c.step.documents.size() * heads);
  attention_.add_centre_scores(own, 1, lse_.get());
  for (std::size_t d = 0; d < c.step.documents.size(); ++d) {
    const AttendedDocument& document = c.step.documents[d];
    const Plan& plan = *document.plan;
    turn_queries(c, layer, d, own.q, turned_.data());
    const AttentionRequest request{
        .layer = own.layer,
        .first = first,
        .tokens = n,
        .q = turned_.data(),
        .store = *document.store,
        .selector = plan.is_dense(own.layer) ? nullptr : document.selector,
        .plan = plan,
        .is_apart = true,
        .skipped = document.skipped,
        .hidden = document.hidden,
        .cancel = own.cancel};
    attention_.set_trace(document.trace);
    Status s = attention_.run(request, part_.data(), part_lse_.data());
    attention_.set_trace(c.step.trace);
    RETURN_IF_ERROR(std::move(s));
    if (own.cancel.fired()) return {};
    float* shifts = shifts_.data() + d * heads;
    const std::size_t last = std::size_t{n - 1} * heads;
    std::copy_n(part_lse_.data() + last, heads, shifts);
    attention_.add_centre_scores(request, 1, part_lse_.data());
    for (uint32_t h = 0; h < heads; ++h) shifts[h] = part_lse_[last + h] - shifts[h];
    merge_document(own, out);
    if (!request.selector) document.store->drop_resident_pages(own.layer);
  }
  for (std::size_t d = 0; d < c.step.documents.size(); ++d) {
    if (!c.step.documents[d].trace) continue;
    float* totals = shifts_.data() + d * heads;
    for (uint32_t h = 0; h < heads; ++h)
      totals[h] = lse_[std::size_t{n - 1} * heads + h] - totals[h];
    c.step.documents[d].trace->end_layer(totals, pool_);
  }
  attention_.add_centre_scores(own, -1, lse_.get());
  if (c.step.trace) c.step.trace->end_layer(lse_.get() + std::size_t{n - 1} * heads, pool_);
  return {};
}

Status HostAttention::score_documents(const StepContext& c, const LayerConfig& layer,
                                      const AttentionRequest& own) {
  DocumentScores& scores = *c.step.scores;
  if (!scores.layers[own.layer]) return {};
  const std::size_t count = scores.documents.size(), size = c.tokens() * layer.q_width();
  turned_.resize(count * size);
  std::vector<AttentionRequest> requests;
  std::vector<std::size_t> begins;
  std::size_t floats = 0;
  for (std::size_t d = 0; d < count; ++d) {
    const AttendedDocument& document = scores.documents[d];
    turn_queries(c, layer, c.step.documents.size() + d, own.q, turned_.data() + d * size);
    requests.push_back({.layer = own.layer,
                        .first = scores.first,
                        .tokens = c.tokens(),
                        .q = turned_.data() + d * size,
                        .store = *document.store,
                        .selector = document.selector,
                        .plan = own.plan,
                        .is_apart = true,
                        .skipped = document.skipped,
                        .cancel = own.cancel});
    begins.push_back(floats);
    floats += std::size_t{c.tokens() - scores.first} * layer.heads *
              Attention::score_block_count(*document.store);
  }
  scores.scores.resize(floats), scores.of_document.clear();
  for (std::size_t begin : begins) scores.of_document.push_back(scores.scores.data() + begin);
  RETURN_IF_ERROR(attention_.score_blocks(requests, scores.of_document));
  if (!own.cancel.fired()) scores.take();
  for (const AttendedDocument& document : scores.documents)
    if (!document.selector) document.store->drop_resident_pages(own.layer);
  return {};
}

}  // namespace kvasir
