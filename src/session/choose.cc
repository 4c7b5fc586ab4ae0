// Which documents of a composed session an answer attends.
#include <algorithm>
#include <cinttypes>

#include "session/composition.h"

namespace kvasir {

// Chooses the documents for a question's tokens and `more` tokens after them. They must be known
// before the question is prefilled.
Status Session::choose_documents(std::span<const Token> question, uint64_t more,
                                 const Cancel* cancel) {
  if (!sequence_.is_composed()) return {};
  ComposedState& composed = sequence_.composed;
  (void)cancel, (void)more;
  attend(composed.candidates);
  if (sequence_.positions() + question.size() < options_.context) return {};
  return Status::error(
      Code::context_full,
      "%zu documents and the question take %" PRIu64 " of %" PRIu64 " tokens: attend fewer",
      composed.chosen.size(), sequence_.positions() + question.size(), options_.context);
}

}  // namespace kvasir
