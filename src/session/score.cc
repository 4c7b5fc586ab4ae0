// Log-probabilities of given tokens after a sequence.
#include <algorithm>
#include <cmath>
#include <utility>

#include "session/restore.h"
#include "session/session.h"

namespace kvasir {

// Natural logarithm of the softmax. Sums in double, because a large vocabulary has many small
// terms.
static double log_probability(std::span<const float> logits, Token token) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x - top));
  return static_cast<double>(logits[static_cast<std::size_t>(token)] - top) - std::log(sum);
}

Status Session::score(std::span<const Token> tokens, float* log_probabilities, const Cancel* cancel,
                      Progress::Report report, Progress::Report prepare_report) {
  RETURN_IF_ERROR(check_has_tokens());
  RETURN_IF_ERROR(check_measure());
  RETURN_IF_ERROR(check_tokens(tokens));
  RETURN_IF_ERROR(check_room(tokens.size()));
  if (tokens.empty()) return {};
  trace_.reset();
  fetch_logits();
  const uint64_t begin = os::now_ns();
  RETURN_IF_ERROR(prefill_missing(cancel, report));
  // of a model with states before Restore, so that the next call needs no prefill
  if (sequence_.states) RETURN_IF_ERROR(refresh_logits(cancel, report));
  Progress progress(std::move(report));
  RETURN_IF_ERROR(prepare(cancel, std::move(prepare_report)));
  RETURN_IF_ERROR(make_room(tokens.size(), 0, cancel));
  Restore restore(this);
  Array<float> found(tokens.size());
  forward_->attention().reset_counts();
  RETURN_IF_ERROR(refresh_logits(cancel, {}));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled");
    const double logarithm = log_probability(sequence_.logits, tokens[i]);
    if (std::isnan(logarithm)) return not_a_number();
    found[i] = static_cast<float>(logarithm);
    const bool last = i + 1 == tokens.size();  // not appended: no later token attends it
    if (!last) RETURN_IF_ERROR(append_token(tokens[i], cancel));
    if (!progress.update(i + 1, tokens.size()) && !last)
      return Status::error(Code::cancelled, "stopped by the progress callback");
  }
  std::copy(found.begin(), found.end(), log_probabilities);
  last_ = {forward_->attention().counts(), tokens.size(), os::now_ns() - begin};
  return {};
}

}  // namespace kvasir
