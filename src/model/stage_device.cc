#include "model/stage_device.h"

namespace kvasir {

const char Stage::sharing[] = "the pages are being shared with the GPU, some with each step: until then the processor hands it those that it chose";

Status make_device_stage(const Model& model, const DeviceWeights& weights, std::unique_ptr<Stage>* out) {
  auto stage = std::make_unique<DeviceStage>(model, weights);
  if (Status s = stage->open(); !s.ok()) return s;
  *out = std::move(stage);
  return {};
}

}  // namespace kvasir
