// Measures during prefill which layers have large errors with selective attention.
//
// The errors depend on model and text. They are measured in exact prefill, each time the text has
// grown by a quarter. A retrieval layer has a large error only where the text has something to
// retrieve, so the largest error counts.
#pragma once

#include <memory>

#include "engine/step.h"
#include "select/plan.h"
#include "session/sequence.h"

namespace kvasir {

class LayerProbe {
 public:
  // Tokens of a measuring step, which is exact: in sparse prefill, and in the prefill of a GPU,
  // which waits while the CPU measures.
  static constexpr uint32_t chunk = 128, gpu_chunk = 512;

  static bool is_due(const SequenceState& sequence);
  // Adds the measurement to a step. errors: [layers]; it must outlive the step.
  void plan(const SelectOptions& options, SequenceState* sequence, ForwardStep* step,
            Array<float>* errors);
  // After such a step. Does not fail.
  static void note(const Array<float>& errors, SequenceState* sequence);

 private:
  std::unique_ptr<const Selector> selector_;
};

}  // namespace kvasir
