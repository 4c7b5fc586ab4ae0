// The memory that a GPU's layers take. Attention and the workspace make room for each other.
#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::resize(uint32_t n) {
  Status s = try_resize(n);
  while (s.code() == Code::no_memory && release_one()) s = try_resize(n);
  return s;
}

// Releases what can be made again, one part at a time. Returns false where there is none.
bool GpuExecutor::release_one() {
  if (!kept_halves_.empty()) return give_up_halves(), true;
  if (next_x_) return release_stream(), true;
  if (selective_.drop_hot_quads()) return true;
  if (prefill_attention_.holds_memory()) return release_prefill(), true;
  if (hybrid_.holds_memory()) return release_hybrid(), true;
  if (selective_.holds_memory()) return release_selective(), true;
  return false;
}

void GpuExecutor::trim() {
  release_prefill();
  selective_.trim(), hybrid_.trim();
}

Status GpuExecutor::try_resize(uint32_t n) {
  if (n <= capacity_) return {};
  release_workspace();  // never old and new together
  gave_way_ = false;
  const std::size_t bytes = work_.place(size_, n, nullptr),
                    experts = experts_work_.place(experts_size_, n, nullptr);
  RETURN_IF_ERROR(memory_.allocate(device_, bytes + experts, "a step's workspace"));
  work_.place(size_, n, memory_.get());
  experts_work_.place(experts_size_, n, memory_.get() + bytes);
  return capacity_ = n, Status();
}

void GpuExecutor::release_workspace() {
  capacity_ = 0, logits_stay_ = false;
  forget_graphs();
  wait_for_streams();  // a span's residual stream may be on its way
  memory_ = {}, second_x_ = {}, next_x_ = nullptr, coming_ = nullptr;
}

// What is under way goes to memory that others may get.
void GpuExecutor::abandon() noexcept {
  if (records_) {
    records_ = false;
    graphs_.abandon(stream_);
  }
  wait_for_streams();
  coming_ = nullptr, is_behind_ = false;
  error_ = 0;
  experts_status_ = Status();
}

void GpuExecutor::wait_for_streams() noexcept {
  if (stream_) (void)ops_.wait(stream_);
  if (copies_) (void)ops_.wait(copies_);
  for (DeviceStream* stream : deliveries_)
    if (stream) (void)ops_.wait(stream);
}

// Blocks of the sketch that another session has too stay, even of an idle session: a later try may
// find no more room than this one.
void GpuExecutor::release_selective() {
  wait_for_streams();  // something may be on its way to it
  forget_graphs();
  selective_.release();
  attended_ = {};
}

void GpuExecutor::release_windows() {
  wait_for_streams();
  forget_graphs();
  windows_.release();
}

void GpuExecutor::release_hybrid() {
  wait_for_streams();
  forget_graphs();
  hybrid_.release();
  attended_ = {};
}

void GpuExecutor::release_prefill() {
  if (!prefill_attention_.holds_memory() && !prefill_.get()) return;
  wait_for_streams();  // after a failure something may be on its way
  prefill_attention_.release();
  prefill_ = {}, prefill_host_ = {}, prefill_outputs_ = {};
  release_halves();
  outputs_room_ = 0, prefill_host_room_ = 0;
}

// What hot quads and pages that were read before leave free: a fork's workspace, this session's
// own, and what their states may still take.
uint64_t GpuExecutor::reserve() const {
  return (capacity_ < weights_.usual_step() ? 2 : 1) * workspace_bytes(weights_.usual_step()) +
         attended_.taken() + states_.reserve();
}

// What the CPU attends comes down and goes up through. Of layers that the GPU attends through a
// window, keys and values come down, and of those without attention nothing.
Status GpuExecutor::resize_host(uint32_t n) {
  bool down = false, up = false;
  for (uint32_t l = first_layer(); l < end_layer(); ++l) {
    if (!has_attention(l)) continue;
    up |= !attends_window(l);
    down |= !attends_window(l) || config_.layer(l).writes_kv;
  }
  const bool has_room = (!down || host_qkv_.get()) && (!up || host_a_.get());
  if (n <= host_capacity_ && has_room) return {};
  const uint32_t room = std::max(n, std::exchange(host_capacity_, 0));
  forget_graphs();
  host_qkv_ = {}, host_a_ = {};
  ThreadPool* const pool = step_->pool;
  if (down) RETURN_IF_ERROR(host_qkv_.allocate(device_, room * (size_.q + 2 * size_.kv), pool));
  if (up) RETURN_IF_ERROR(host_a_.allocate(device_, room * size_.q, pool));
  host_capacity_ = room;
  return {};
}

// What the experts of the CPU get and make comes down and goes up through.
Status GpuExecutor::resize_experts(uint32_t n) {
  if (!experts_)
    experts_ = std::make_unique<CpuExperts>(config_, model_.weights(), first_layer(), step_->pool);
  if (n <= experts_capacity_) return {};
  experts_capacity_ = 0;
  RETURN_IF_ERROR(experts_x_.allocate(device_, n * size_.width));
  experts_h_ = {};  // never old and new together
  experts_h_ = make_buffer<float>(2 * n * size_.width);
  experts_capacity_ = n;
  return {};
}

Status GpuExecutor::resize_attended(uint32_t n) {
  n = std::max(n, max_alone);  // graphs of steps of one token stay when some of a few follow
  const std::size_t floats = attention_number_.back() * std::size_t{n} * (size_.q + 2 * size_.kv);
  if (floats * sizeof(float) <= attended_.bytes()) return {};
  forget_graphs();
  attended_ = {};
  Status s = attended_.allocate(device_, floats, "a step's queries, keys and values");
  if (s.ok()) s = attended_host_.allocate(device_, floats);
  if (!s.ok()) attended_ = {};
  return s;
}

// Logits of one token, or of an open step's, are computed with the step.
Status GpuExecutor::prepare_output() {
  static_assert(max_alone == ForwardStep::max_device_open_tokens && max_alone <= logit_rows);
  if (!weights_.has_output() || (!open_ && step_->step.want != ForwardStep::Logits::last))
    return {};
  const uint32_t wanted = step_->step.logits_wanted(), room = open_ ? max_alone : 1;
  if (wanted > host_logits_room_) {
    host_logits_room_ = 0;
    forget_graphs();
    RETURN_IF_ERROR(host_logits_.allocate(device_, room * size_.vocabulary));
    host_logits_room_ = room;
  }
  logits_ = wanted;
  if (step_->step.hidden_wanted() == wanted) {
    if (!host_hidden_.get())
      RETURN_IF_ERROR(host_hidden_.allocate(device_, max_alone * size_.width));
    hidden_ = wanted;
  }
  // A factor of the logits and a cap change no order.
  if (!step_->step.best || wanted == 0 || !(config_.logit_scale > 0)) return {};
  constexpr uint32_t parts = max_alone * largest_parts;
  if (!best_.get()) RETURN_IF_ERROR(best_.allocate(device_, parts, "a step's largest logits"));
  if (!host_best_.get()) RETURN_IF_ERROR(host_best_.allocate(device_, parts));
  finds_best_ = true;
  return {};
}

bool GpuExecutor::last_logits(float* out) {
  if (!std::exchange(logits_stay_, false)) return false;
  enqueue(ops_.download(stream_, out, work_.logits, size_.vocabulary * sizeof(float)));
  return wait("the output").ok();
}

// Pinned memory for what a step of a few tokens begins with, so that it waits for no copy. Null:
// the step has more, or there is none.
float* GpuExecutor::small_inputs() {
  if (n_ > max_alone) return nullptr;
  const std::size_t joined = weights_.inputs().w.data ? weights_.inputs().w.cols : 0;
  if (small_inputs_.get()) return small_inputs_.get();
  forget_graphs();  // they upload no inputs
  const std::size_t floats = max_alone * (size_.width + 2 * size_.angles + joined);
  return small_inputs_.allocate(device_, floats).ok() ? small_inputs_.get() : nullptr;
}

// Graphs hold addresses.
void GpuExecutor::forget_moved_graphs() {
  const uint64_t now = selective_.generation() + hybrid_.generation() + windows_.generation();
  if (std::exchange(graph_generation_, now) != now) forget_graphs();
}

}  // namespace kvasir
