// A step that a GPU attends alone: it chooses by its sketch and attends what it chose, or attends
// everything.
#include <algorithm>
#include <utility>

#include "engine/gpu_executor.h"

namespace kvasir {

// Falls through to co-execution where the GPU cannot choose, or not keep all that it attends.
Status GpuExecutor::plan_selective(const StepContext& c, Fallback* why) {
  const Plan& plan = c.step.plan;
  const bool exact = c.attends_everything();
  const uint32_t rows = rows_of(c), n = c.tokens() / rows;
  release_prefill();
  mode_ = AttentionMode::cpu;
  *why = selective_.refuses(c.store, plan, exact, n);
  if (*why != Fallback::none) {
    if (hybrid_.refuses(c.store, plan, exact, n) == Fallback::none) return plan_hybrid(c, why);
    const bool other = !exact && !plan.strategy->has(StrategyInfo::on_device);
    if (other && selective_.holds_memory()) release_selective();
    trim();
    return {};
  }
  const uint32_t size = c.store.pages().extents() + 1;
  Refused& refused = exact ? refused_all_ : refused_selective_;
  if (refused.is(size, c.tokens()) || (exact && !selective_.may_keep_all(c.store, reserve())))
    return without_selective(c, exact, why);
  if (hybrid_.holds_memory()) release_hybrid();

  const uint32_t least = std::max(c.tokens(), KvMirror::max_tokens);
  selective_.set_rows(rows);
  const auto prepare = [&] {
    RETURN_IF_ERROR(selective_.prepare(update_request(c), plan, exact, n));
    return resize_attended(c.tokens());
  };
  Status s = resize(least);
  if (s.ok()) s = prepare();
  if (s.code() == Code::no_memory && selective_.drop_hot_quads()) s = prepare();
  s = or_with_less(std::move(s), least, prepare);
  // A later prefill wants more room, and attention would give way to it each time. Where little
  // memory is left, the room is made now.
  const uint64_t workspace = workspace_bytes(weights_.usual_step());
  const auto lacks_room = [&] {
    return s.ok() && !gave_way_ && capacity_ < weights_.usual_step() && device_->left() < workspace;
  };
  if (lacks_room()) (void)selective_.drop_hot_quads();
  if (lacks_room()) {
    release_selective();
    if (s = resize(weights_.usual_step()); s.ok()) s = prepare();
  }
  if (s.ok()) s = selective_.keep_hot_quads(c.store, plan, reserve(), stream_);
  // All tokens are attended by the CPU, or with it, where the GPU cannot keep them.
  const bool pins =
      exact && s.ok() && selective_.needs_staging() && selective_.cannot_share() == Fallback::none;
  if (pins) return *why = Fallback::pinning, Status();
  const bool keeps = !exact || !s.ok() || c.store.pages().pages() == 0 ||
                     (selective_.keeps_all(c.store) && !selective_.needs_staging());
  if (s.ok() && keeps) {
    refused = {};
    mode_ = AttentionMode::gpu_selective;
    return {};
  }
  if (s.code() == Code::cancelled) return s;  // what has come stays
  release_selective();
  if (!s.ok() && (s.code() != Code::no_memory || (c.step.open && !exact))) return s;
  refused = {size, c.tokens()};  // tried again for a longer sequence or a smaller step
  return without_selective(c, exact, why);
}

// Where the GPU has no room to attend alone.
Status GpuExecutor::without_selective(const StepContext& c, bool exact, Fallback* why) {
  *why = Fallback::no_room;
  return exact ? plan_hybrid(c, why) : Status();
}

Status GpuExecutor::attend_selective(uint32_t layer) {
  if (replays_ || error_) return {};
  const StepContext& c = *step_;
  for (uint32_t row = 0; row < rows_ && !error_; ++row) {
    selective_.set_row(row);
    const auto [q, k, v] = row_of(layer, attended(layer), row);
    if (attends_last() && row + 1 < rows_) {
      enqueue(selective_.enqueue_keys(stream_, local_kv(layer), q, k, v));
      continue;
    }
    enqueue(selective_.enqueue_choice(stream_, local_kv(layer), q, k, v));
    if (error_) return {};
    if (selective_.needs_staging()) {
      RETURN_IF_ERROR(selective_.stage_chosen(c.store, c.step.plan, local_kv(layer), c.cancel,
                                              c.pool, stream_));
      if (c.cancel.fired()) return {};
    }
    enqueue(selective_.enqueue_chosen(stream_, local_kv(layer),
                                      attended_row(attended_output(layer), row), check(layer)));
  }
  return {};
}

// What the layers leave comes to host memory and goes to the store while the GPU computes the
// output. Nothing of it is visible before the commit.
Status GpuExecutor::end_selective() {
  if (!replays_) {
    enqueue_end();
    end_recording();
  }
  enqueue(ops_.after(copies_, stream_));
  if (logits_ > 0) as_graph(output_part(), [&] { enqueue_output(); });
  enqueue(selective_.enqueue_results(copies_));
  enqueue_kept(copies_);
  enqueue(ops_.wait(copies_));
  const StepContext& c = *step_;
  ReadCounts counts;
  Status stored;
  if (!error_ && !c.cancel.fired()) stored = store_selective(&counts);
  if (Status s = wait("a step"); !s.ok())
    return s.code() == Code::corrupt && !stored.ok() ? std::move(stored) : std::move(s);
  if (c.cancel.fired()) return {};
  RETURN_IF_ERROR(std::move(stored));
  host_->attention().add_counts(counts);
  return {};
}

// NaN may come from a damaged page.
Status GpuExecutor::store_selective(ReadCounts* counts) {
  RETURN_IF_ERROR(selective_.collect(step_->store, step_->pool, counts));
  return *bad_layer_.get() == no_layer ? finish_decode() : Status();
}

}  // namespace kvasir
