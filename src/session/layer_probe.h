// Measures during prefill which layers a choice of pages serves badly.
//
// That is a property of model and text. It is measured where the exact answer is known: in prefill,
// each time the text has grown by a quarter. A layer that retrieves shows it only where the text
// has something to retrieve, so that the largest error counts.
#pragma once

#include <memory>

#include "engine/step.h"
#include "select/plan.h"
#include "session/sequence.h"

namespace kvasir {

class LayerProbe {
 public:
  // tokens of a step that measures, where other steps are not exact
  static constexpr uint32_t chunk = 128;

  static bool is_due(const SequenceState& sequence);
  // Makes the step measure. errors: [layers]; it outlives the step.
  void plan(const SelectOptions& options, SequenceState* sequence, ForwardStep* step,
            Array<float>* errors);
  // After such a step. Does not fail.
  static void note(const Array<float>& errors, SequenceState* sequence);

 private:
  std::unique_ptr<const Selector> selector_;
};

}  // namespace kvasir
