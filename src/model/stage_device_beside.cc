// Attention of new tokens by a stage on a device and the processor side by side, layer by layer (model/beside.h).
#include "model/stage_device.h"

namespace kvasir {

Status DeviceStage::can_attend_beside(const Attending& of, uint32_t n, const char** why_not) {
  const uint32_t size = of.store.pages().extents() + 1;
  if (refused_beside_ == size && n >= refused_beside_n_) return *why_not = no_room, Status();
  if (attention_.holds_memory()) release_attention();
  const uint32_t least = std::max(n, DeviceTimeline::most_tokens);
  Status s = resize(least);
  const auto prepare = [&] {
    const uint64_t workspace = device_workspace_bytes(config_, static_cast<uint32_t>(2 * size_.half), usual_step);
    const uint64_t reserve = (capacity_ < usual_step ? 2 : 1) * workspace + attended_.taken();
    Status p = beside_.prepare(of.store, of.plan, of.exact, n, of.devices, reserve, of.pool, {stream_, copies_}, of.cancel);
    return p.ok() ? resize_attended(n) : std::move(p);
  };
  if (s.ok()) s = prepare();
  s = or_with_less(std::move(s), least, prepare);
  if (s.ok()) return refused_beside_ = 0, attends_beside_ = true, Status();
  if (s.code() == Code::cancelled) return s;  // what has come stays
  release_beside();
  if (s.code() != Code::no_memory) return s;
  refused_beside_ = size, refused_beside_n_ = n;  // as refused_size_
  return *why_not = no_room, Status();
}

// What a layer does of itself: its projection, and what begins with that, are given in one go, as are all of a layer's whose pages were read ahead.
Status DeviceStage::attend_beside(const Attending& of, const Pages& pages, ReadCounts* counts) {
  if (Status s = prepare_output(of); !s.ok()) return s;
  const StreamWait under_way{ops_, stream_}, beside{ops_, copies_};  // however it ends: what is on its way goes to memory that others get
  beside_.begin(of.store, of.pool, stream_, copies_, counts);
  const auto give_projected = [&](uint32_t l) {
    if (l > first_layer()) give_rest(l - 1, output_of(l - 1, work_.a));
    float* qkv = attended_.get() + local(l) * attended_floats();
    give_projection(l, qkv);
    const float *k = qkv + step_.n * size_.q, *v = k + step_.n * size_.kv;
    do_(beside_.give_projected(stream_, local(l), qkv, k, v));
  };
  const uint32_t part_of_beside = layers() + 3, part_of_packed = part_of_beside + layers();  // of graphs_
  for (uint32_t l = first_layer(); l < end_layer(); ++l) {
    if (step_.cancel->fired()) return {};
    const DeviceActivations out = output_of(l, work_.a);
    if (beside_.is_packed(local(l))) {
      do_(beside_.wait_for_packed(stream_));
      together(part_of_packed + local(l), [&] {
        give_projected(l);
        do_(beside_.give_packed(stream_, local(l)));
        do_(beside_.give_finish(stream_, local(l), true, out, check(l)));
      });
      continue;
    }
    float* const q = attended_host_.get() + local(l) * attended_floats();
    together(part_of_beside + local(l), [&] {
      give_projected(l);
      do_(ops_.download(stream_, q, attended_.get() + local(l) * attended_floats(), step_.n * size_.q * sizeof(float)));
      do_(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
    });
    do_(beside_.give_near(local(l)));
    if (Status s = wait("a layer"); !s.ok()) return s;
    beside_.set_layer({local(l), out, check(l)});
    if (Status s = pages(l, q, &beside_); !s.ok()) return s;
    if (step_.cancel->fired()) return {};
    if (!beside_.is_finished()) do_(beside_.give_finish(stream_, local(l), false, out, check(l)));
  }
  do_(beside_.give_end(stream_));
  give_rest_and_output();
  if (Status s = wait("a step"); !s.ok()) return s;
  beside_.collect(of.plan, of.exact, counts);
  return {};
}

}  // namespace kvasir
