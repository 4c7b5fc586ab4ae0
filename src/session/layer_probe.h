// Measures during prefill which layers have large errors with selective attention.
//
// The errors depend on model and text. They are measured by tokens of a prefill that attend every
// token, each time the text has grown by a quarter. A retrieval layer has a large error only where
// the text has something to retrieve, so the largest error counts.
#pragma once

#include <memory>

#include "engine/step.h"
#include "select/plan.h"
#include "session/sequence.h"

namespace kvasir {

class LayerProbe {
 public:
  // Tokens of a measuring step of a sparse prefill, unless GPUs attended the last step. The step is
  // exact.
  static constexpr uint32_t chunk = 128;
  // First tokens of a GPU's step that are measured. The CPU attends what each sees of the step,
  // while the GPU computes other layers.
  static constexpr uint32_t gpu_tokens = 512;

  static bool is_due(const SequenceState& sequence);
  // Adds the measurement to a step, of its first max_tokens tokens at most. errors: [layers]; it
  // must outlive the step.
  void plan(const SelectOptions& options, SequenceState* sequence, uint32_t max_tokens,
            ForwardStep* step, Array<float>* errors);
  // After such a step. Does not fail.
  static void note(const Array<float>& errors, SequenceState* sequence);

 private:
  std::unique_ptr<const Selector> selector_;
};

}  // namespace kvasir
