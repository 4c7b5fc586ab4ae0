// The plan of a step: what the executors are asked for, before any of them computes.
#include "engine/forward.h"
#include "offload/kv_mirror.h"

namespace kvasir {

using GpuWork = HostAttention::GpuWork;

// What a GPU may attend. Of an open step each token is attended as in a step of its own. A budget
// spills pages, which no GPU follows. A trace, an index, documents before the sequence, and a
// probe in a step of decode need every query on the CPU.
LayerExecutor::Request Forward::request_of(const StepContext& c) const {
  const ForwardStep& step = c.step;
  const uint32_t n = c.tokens();
  const bool chooses = step.selector != nullptr;
  const Fallback why = chooses && step.trace ? Fallback::traced : Fallback::attends_everything;
  if (!step.documents.empty() || step.scores) return {GpuWork::none, Fallback::documents};
  if (c.gpus == 0 || step.trace || step.keys_only) return {GpuWork::none, why};
  const bool by_tiles = step.plan.by_blocks && step.plan.strategy->has(StrategyInfo::samples_tiles);
  if ((!chooses || by_tiles) && !step.memory && n > 1 && !step.open)
    return {GpuWork::prefill, Fallback::none};
  const bool few = n <= KvMirror::max_tokens && (chooses || n == 1 || step.open);
  if (few && !step.probe && !step.asked && c.store.budget().bytes == 0)
    return {GpuWork::decode, Fallback::none};
  return {GpuWork::none, why};
}

Status Forward::make_plan(const StepContext& c) {
  const LayerExecutor::Request request = request_of(c);
  RETURN_IF_ERROR(host_.begin(c, request.gpu));
  for (std::size_t i = 0; i < executors_.size(); ++i) {
    plan_.runs[i].by_layers = false;
    RETURN_IF_ERROR(executors_[i]->plan(c, request, &plan_.runs[i]));
  }
  return {};
}

Status Forward::prepare(const ForwardStep& planned, KvStore* store, Progress* progress) {
  end_spans();
  last_is_span_ = false;
  const Token any = 0;
  ForwardStep step = planned;
  step.tokens = {&any, 1};  // a step of an answer
  const CancelLatch cancel(step.cancel);
  const std::size_t gpus = model_->device_weights().size();
  const StepContext c{step,  cancel,  *store,  nullptr, nullptr,
                      pool_, nullptr, nullptr, nullptr, static_cast<uint32_t>(gpus)};
  const auto stopped = [] {
    return Status::error(Code::cancelled, "stopped by the progress callback");
  };
  for (std::size_t i = 0; i < gpus; ++i) {
    LayerRun& run = plan_.runs[i];
    do {
      if (cancel.fired()) return Status::error(Code::cancelled, "cancelled");
      RETURN_IF_ERROR(executors_[i]->plan(c, {GpuWork::decode, Fallback::none}, &run));
      if (!progress->update(run.staging == Fallback::pinning ? i : i + 1, gpus)) return stopped();
    } while (run.staging == Fallback::pinning);
  }
  return {};
}

}  // namespace kvasir
