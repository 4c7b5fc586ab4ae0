#include "session/layer_probe.h"

#include <algorithm>

namespace kvasir {

constexpr char probe_strategy[] = "quest";
constexpr uint64_t probe_context = 2048;  // sealed tokens: fewer leave little unread
constexpr double probe_fraction = 0.02;   // small, so that unread tokens cause measurable errors
constexpr uint32_t probe_tokens = 32;

bool LayerProbe::is_due(const SequenceState& sequence) {
  const uint64_t sealed = sequence.store.sealed_tokens();
  return sealed >= probe_context && sealed * 4 >= sequence.probed_at * 5;
}

void LayerProbe::plan(const SelectOptions& options, SequenceState* sequence, uint32_t max_tokens,
                      ForwardStep* step, Array<float>* errors) {
  if (!selector_) selector_ = strategy_info(probe_strategy)->make();
  SelectOptions select = options;
  select.strategy = probe_strategy;
  select.schedule = BudgetSchedule::uniform;
  select.budget_tokens = 0;
  select.budget_fraction = probe_fraction;
  select.unit_tokens = 0;
  const uint32_t layers = sequence->store.shape().layers;
  step->probe_plan = make_plan(select, sequence->store.sealed_tokens(), layers, {});
  step->probe = selector_.get();
  step->probe_tokens = probe_tokens;
  step->probe_span = std::min(max_tokens, step->size());
  errors->resize(layers);
  sequence->layer_errors.reserve(layers);  // note() must not fail, because it follows the commit
  step->errors = errors->data();
}

void LayerProbe::note(const Array<float>& errors, SequenceState* sequence) {
  Array<float>& largest = sequence->layer_errors;
  largest.resize(errors.size());
  for (std::size_t l = 0; l < errors.size(); ++l) largest[l] = std::max(largest[l], errors[l]);
  sequence->probed_at = sequence->store.sealed_tokens();
}

}  // namespace kvasir
