// Attention of new tokens by a stage on a device.
#include "model/stage_device.h"

namespace kvasir {

Status DeviceStage::can_attend(const Attending& of, uint32_t n, const char** why_not) {
  release_reading();
  attends_beside_ = false;
  pool_threads_ = of.pool->threads();
  if ((*why_not = attention_.refuses(of.store, of.plan, of.exact, n))) {
    if (!beside_.refuses(of.store, of.plan, of.exact, n)) return can_attend_beside(of, n, why_not);
    if (!of.exact && !of.plan.strategy->has(StrategyInfo::on_device) && attention_.holds_memory()) release_attention();
    trim();
    return {};
  }
  if (beside_.holds_memory()) release_beside();
  const uint32_t size = of.store.pages().extents() + 1;
  if (refused_size_ == size && n >= refused_n_) return *why_not = no_room, Status();
  const uint32_t least = std::max(n, DeviceTimeline::most_tokens);
  Status s = resize(least);
  const auto prepare = [&] {
    Status p = attention_.prepare(of.store, of.plan, n, of.devices, of.pool, {stream_, copies_}, of.cancel);
    return p.ok() ? resize_attended(n) : std::move(p);
  };
  if (s.ok()) s = prepare();
  if (s.code() == Code::no_memory && attention_.drop_hot_quads()) s = prepare();
  s = or_with_less(std::move(s), least, prepare);
  // A text that is read later wants more room, and attention would give way to it each time: where little is left it is made now.
  const uint64_t workspace = device_workspace_bytes(config_, static_cast<uint32_t>(2 * size_.half), usual_step);
  const auto lacks_room = [&] { return s.ok() && !gave_way_ && capacity_ < usual_step && device_->left() < workspace; };
  if (lacks_room()) (void)attention_.drop_hot_quads();
  if (lacks_room()) {
    release_attention();
    if (s = resize(usual_step); s.ok()) s = prepare();
  }
  if (s.ok()) s = attention_.keep_hot_quads(of.store, of.plan, (capacity_ < usual_step ? 2 : 1) * workspace + attended_.taken(), stream_);  // a fork's, and its own
  if (s.ok()) return refused_size_ = 0, Status();
  if (s.code() == Code::cancelled) return s;  // what has come stays
  release_attention();
  if (s.code() == Code::no_memory) {  // it is tried again when the text has grown, or with fewer tokens
    refused_size_ = size, refused_n_ = n;
    return *why_not = no_room, Status();
  }
  return s;
}

// The output is computed along with the rest.
Status DeviceStage::prepare_output(const Attending& of) {
  has_logits_ = of.output && weights_.has_output();
  if (has_logits_ && !host_logits_.get())
    if (Status s = host_logits_.allocate(device_, size_.vocabulary); !s.ok()) return s;
  if (const uint64_t now = attention_.generation() + beside_.generation(); std::exchange(graph_generation_, now) != now) forget_graphs();  // it has their memory in it
  has_attended_ = true;
  return {};
}

// After the last layer's attention.
void DeviceStage::give_rest_and_output() {
  give_rest(end_layer() - 1, output_of(end_layer() - 1, work_.a));
  do_(ops_.download(stream_, attended_host_.get(), attended_.get(), layers() * attended_floats() * sizeof(float)));
  do_(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  if (!has_logits_) return;
  give_logits(step_.n - 1, 1);
  do_(ops_.download(stream_, host_logits_.get(), work_.logits, size_.vocabulary * sizeof(float)));
}

Status DeviceStage::attend(const Attending& of, const Pages& pages, ReadCounts* counts) {
  if (attends_beside_) return attend_beside(of, pages, counts);
  const auto give_layer = [&](uint32_t l, auto&& hand_over) {
    if (step_.n > 1 && step_.cancel->fired()) return;
    if (l > first_layer()) give_rest(l - 1, output_of(l - 1, work_.a));
    float* qkv = attended_.get() + local(l) * attended_floats();
    give_projection(l, qkv);
    const float *k = qkv + step_.n * size_.q, *v = k + step_.n * size_.kv;
    do_(attention_.give_choice(stream_, local(l), qkv, k, v));
    if (error_ || !hand_over()) return;
    do_(attention_.give_chosen(stream_, local(l), output_of(l, work_.a), check(l)));
  };
  const auto give_end = [&] {
    do_(attention_.give_results(stream_));
    give_rest_and_output();
  };
  if (Status s = prepare_output(of); !s.ok()) return s;
  attention_.begin();
  if (attention_.hands()) {
    Status s;
    const StreamWait under_way{ops_, stream_};  // also where memory is wanting: what is on its way goes to memory that others get
    for (uint32_t l = first_layer(); l < end_layer() && s.ok() && !error_ && !step_.cancel->fired(); ++l)
      give_layer(l, [&] { return (s = attention_.hand_over(of.store, of.plan, local(l), *step_.cancel, of.pool, stream_)).ok() && !step_.cancel->fired(); });
    if (!s.ok() || step_.cancel->fired()) return s;
    if (!error_) give_end();
  } else {
    together(layers() + (has_logits_ ? 2 : 1), [&] {
      for (uint32_t l = first_layer(); l < end_layer(); ++l) give_layer(l, [] { return true; });
      give_end();
    });
  }
  if (Status s = wait("a step"); !s.ok()) {
    // Numbers that are none may come from a page that is damaged.
    if (ReadCounts unused; s.code() == Code::corrupt && !step_.cancel->fired())
      if (Status damaged = attention_.collect(of.store, of.pool, &unused); !damaged.ok()) return damaged;
    return s;
  }
  return step_.cancel->fired() ? Status() : attention_.collect(of.store, of.pool, counts);
}

}  // namespace kvasir
