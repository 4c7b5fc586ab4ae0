// A text that is read by a stage on a device.
#include "model/stage_device.h"

namespace kvasir {

Status DeviceStage::can_read(const Attending& of, uint32_t n, const char** why_not) {
  attention_.trim(), beside_.trim();
  if ((*why_not = reading_.refuses(of.store, n))) return release_reading(), Status();
  const uint32_t size = of.store.pages().extents() + 1;
  if (unread_size_ == size && n >= unread_n_) return *why_not = no_room, Status();
  const auto prepare = [&] {
    Status s = resize(n);
    if (s.ok()) s = resize_read(n);
    if (s.ok()) s = reading_.prepare(of.store, n, of.pool, stream_, of.cancel);
    return s;
  };
  Status s = prepare();
  if (s.code() == Code::no_memory && attention_.drop_hot_quads()) s = prepare();
  if (s.code() == Code::no_memory && attention_.holds_memory()) release_attention(), s = prepare();
  if (s.code() == Code::no_memory && beside_.holds_memory()) release_beside(), s = prepare();
  if (s.ok()) return unread_size_ = 0, Status();
  if (s.code() == Code::cancelled) return s;  // what has come stays
  release_reading();
  if (s.code() != Code::no_memory) return s;
  unread_size_ = size, unread_n_ = n;  // as refused_size_
  return *why_not = no_room, Status();
}

Status DeviceStage::read(const Attending& of, uint32_t outputs, const Meanwhile& meanwhile, const Take& take) {
  const std::size_t n = step_.n, projected = n * (size_.q + 2 * size_.kv), heads = totals_floats(step_.n), floats = read_floats(step_.n);
  const auto give = [&](uint32_t l) {
    float *qkv = read_.get() + l % 2 * floats, *totals = qkv + projected, *a = totals + heads;
    if (l > first_layer()) check_and_give_rest(l - 1, read_.get() + (l - 1) % 2 * floats + projected + heads);
    give_projection(l, qkv);
    do_(reading_.give(stream_, local(l), qkv, qkv + n * size_.q, qkv + n * (size_.q + size_.kv), a, totals));
  };
  const auto give_copy = [&](uint32_t l) {
    do_(ops_.after(copies_, stream_));
    const float* from = read_.get() + l % 2 * floats;
    const std::size_t first = projected + heads, outputs_size = outputs * size_.q;  // what comes down always, and where it is asked for
    do_(ops_.download(copies_, read_host_.get() + l % 2 * first, from, first * sizeof(float)));
    if (outputs) do_(ops_.download(copies_, read_outputs_.get() + l % 2 * outputs_size, from + first, outputs_size * sizeof(float)));
    do_(ops_.download(copies_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  };
  const auto hand_over = [&] {
    give(first_layer());
    give_copy(first_layer());
    if (Status s = meanwhile(); !s.ok()) return s;
    for (uint32_t l = first_layer(); l < end_layer(); ++l) {
      l + 1 < end_layer() ? give(l + 1) : give_last_rest(l, read_.get() + l % 2 * floats + projected + heads, of.wanted);
      if (Status s = wait("a layer", copies_); !s.ok()) return s;
      if (step_.cancel->fired()) return Status();
      const float* host = read_host_.get() + l % 2 * (projected + heads);
      const float* output = outputs ? read_outputs_.get() + l % 2 * outputs * size_.q : nullptr;
      const Read its{host, host + n * size_.q, host + n * (size_.q + size_.kv), host + projected, output};
      if (Status s = take(l, its); !s.ok()) return s;
      do_(reading_.put_ahead(of.store, local(l), of.pool, copies_));
      if (l + 1 < end_layer()) give_copy(l + 1);
    }
    do_(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
    return Status();
  };
  has_read_ = true;
  Status s;
  if (outputs_room_ < outputs) {
    outputs_room_ = 0;
    if (s = read_outputs_.allocate(device_, std::size_t{2} * outputs * size_.q); s.ok()) outputs_room_ = outputs;
  }
  float* const x = work_.x;
  try {
    if (s.ok()) s = hand_over();
  } catch (const std::bad_alloc&) {
    (void)ops_.wait(copies_), (void)ops_.wait(stream_), work_.x = x;
    throw;
  }
  do_(ops_.wait(copies_));
  Status rest = wait("a step");  // nothing is left under way
  if (s.ok() && !step_.cancel->fired()) s = std::move(rest);
  return s;
}

Status DeviceStage::resize_read(uint32_t n) {
  if (2 * read_floats(n) * sizeof(float) <= read_.bytes()) return {};
  read_ = {}, read_host_ = {}, read_host_room_ = 0;
  const std::size_t room = 2 * (read_floats(n) - n * size_.q);
  Status s = read_.allocate(device_, 2 * read_floats(n), "two layers' queries, keys and values");
  if (s.ok()) s = read_host_.allocate(device_, room);
  s.ok() ? void(read_host_room_ = room) : void(read_ = {});
  return s;
}

void DeviceStage::give_last_rest(uint32_t layer, float* a, uint32_t wanted) {
  if (!weights_.has_output()) wanted = step_.n;
  if (wanted == 0) return;
  const uint32_t n = std::exchange(step_.n, wanted), first = n - wanted;
  work_.x += first * size_.width;
  check_and_give_rest(layer, a + first * size_.q);
  work_.x -= first * size_.width, step_.n = n;
}

}  // namespace kvasir
