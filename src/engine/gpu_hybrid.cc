// Co-execution: a GPU and the CPU attend each layer of a step together (attention/hybrid_gpu.h).
#include <algorithm>
#include <utility>

#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::plan_hybrid(const StepContext& c, Fallback* why) {
  const uint32_t rows = rows_of(c), n = c.tokens() / rows, size = c.store.pages().extents() + 1;
  const bool exact = c.attends_everything();
  if (refused_hybrid_.is(size, c.tokens())) return *why = Fallback::no_room, Status();
  if (selective_.holds_memory()) release_selective();
  const uint32_t least = std::max(c.tokens(), KvMirror::max_tokens);
  hybrid_.set_rows(rows);
  const auto prepare = [&] {
    RETURN_IF_ERROR(hybrid_.prepare(update_request(c), c.step.plan, exact, n, reserve()));
    return resize_attended(c.tokens());
  };
  Status s = resize(least);
  if (s.ok()) s = prepare();
  s = or_with_less(std::move(s), least, prepare);
  if (s.ok()) {
    refused_hybrid_ = {};
    mode_ = AttentionMode::co_execution;
    return {};
  }
  if (s.code() == Code::cancelled) return s;  // what has come stays
  release_hybrid();
  if (s.code() != Code::no_memory || c.step.open) return s;
  refused_hybrid_ = {size, c.tokens()};
  return *why = Fallback::no_room, Status();
}

// One graph holds a layer's projection and what begins with it. Where the layer's pages were read
// for its filter group, it holds the layer's attention too.
Status GpuExecutor::project_hybrid(uint32_t layer) {
  const uint32_t l = local_kv(layer);
  hybrid_.set_row(0);
  const auto [q, k, v] = projected(layer, attended(layer));
  const bool packed = hybrid_.is_packed(l);
  if (packed) enqueue(hybrid_.wait_for_packed(stream_));
  const float* const queries = q;
  as_graph(hybrid_part(layer) + (packed ? layers() : 0), [&, k = k, v = v] {
    enqueue_attended(layer);
    enqueue(hybrid_.enqueue_projected(stream_, l, queries, k, v));
    if (packed) {
      enqueue(hybrid_.enqueue_packed(stream_, l));
      enqueue(hybrid_.enqueue_finish(stream_, l, true, attended_output(layer), check(layer)));
      return;
    }
    float* host = attended_host_.get() + attended_at(layer);
    const std::size_t floats = n_ * config_.layer(layer).q_width();
    enqueue(ops_.download(stream_, host, queries, floats * sizeof(float)));
    enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  });
  return {};
}

Status GpuExecutor::attend_hybrid(uint32_t layer) {
  const uint32_t l = local_kv(layer);
  if (hybrid_.is_packed(l)) return {};
  for (uint32_t row = 0; row < rows_; ++row) {
    hybrid_.set_row(row);
    const DeviceActivations out = attended_row(attended_output(layer), row);
    if (row > 0) {
      const auto [q, k, v] = row_of(layer, attended(layer), row);
      enqueue(hybrid_.enqueue_projected(stream_, l, q, k, v));
    }
    enqueue(hybrid_.enqueue_near(l));
    RETURN_IF_ERROR(wait("a layer"));  // also for the row before, whose lists may change now
    hybrid_.set_layer({l, out, check(layer)});
    const float* q = row_of(layer, attended_host_.get() + attended_at(layer), row).q;
    RETURN_IF_ERROR(host_->attend_with_gpu(*step_, layer, q, &hybrid_));
    if (step_->cancel.fired()) return {};
    if (!hybrid_.is_finished())
      enqueue(hybrid_.enqueue_finish(stream_, l, false, out, check(layer)));
  }
  return {};
}

Status GpuExecutor::end_hybrid() {
  enqueue(hybrid_.enqueue_end(stream_));
  enqueue_end();
  enqueue_kept(stream_);
  enqueue_output();
  RETURN_IF_ERROR(wait("a step"));
  ReadCounts counts;
  hybrid_.collect(step_->step.plan, step_->attends_everything(), &counts);
  host_->attention().add_counts(counts);
  return finish_decode();
}

}  // namespace kvasir
