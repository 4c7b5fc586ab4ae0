#include "model/mtp.h"

#include <algorithm>
#include <utility>

namespace kvasir {

// The layer is as the model's last one with full attention.
static Status mtp_config(const Model& whole, ModelConfig* out) {
  ModelConfig c = whole.config();
  const auto unsupported = [&](const char* why) {
    return Status::error(Code::unsupported, "%s: %s; open the session with draft_tokens 0",
                         whole.path().c_str(), why);
  };
  if (c.skipped_layers == 0) return unsupported("the model has no MTP layer");
  const auto like =
      std::find_if(c.layer_configs.rbegin(), c.layer_configs.rend(), [](const LayerConfig& l) {
        return l.mixer == MixerKind::attention && !l.is_windowed() && l.writes_kv &&
               l.has_feed_forward();
      });
  if (like == c.layer_configs.rend() || c.streams > 1 || c.layer_input > 0)
    return unsupported("its MTP layer is of a kind that Kvasir does not support");
  LayerConfig layer = *like;
  layer.kv = 0;
  c.layer_configs.assign(1, layer);
  c.layers = 1;
  c.windows = {};
  c.window = 0;
  c.recurrent = {};
  c.recurrent_layers = 0;
  c.feed_forward = layer.has_dense() ? layer.feed_forward : 0;
  *out = std::move(c);
  return {};
}

Status MtpLayer::bind(const Model& whole, MtpLayer* out) {
  ModelConfig config;
  RETURN_IF_ERROR(mtp_config(whole, &config));
  return out->layer.read_mtp(whole, std::move(config), &out->inputs);
}

Status MtpLayer::open(std::shared_ptr<const Model> whole, const Cancel* cancel,
                      std::shared_ptr<const MtpLayer>* out) {
  Model::SharedMtp& shared = whole->shared_mtp();
  const std::scoped_lock lock(shared.mutex);
  if ((*out = shared.layer.lock())) return {};
  auto mtp = std::make_shared<MtpLayer>();
  RETURN_IF_ERROR(bind(*whole, mtp.get()));
  if (!whole->device_weights().empty()) {
    Status s = mtp->layer.upload_mtp(*whole, mtp->inputs.projection, cancel);
    if (!s.ok() && s.code() != Code::no_memory && s.code() != Code::unsupported) return s;
    mtp->why_cpu = s.message();
  }
  shared.layer = mtp;
  mtp->whole = std::move(whole);
  *out = std::move(mtp);
  return {};
}

}  // namespace kvasir
