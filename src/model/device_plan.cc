#include "model/device_plan.h"

#include <algorithm>

namespace kvasir {

LayerSplit split_layers(std::span<const uint64_t> sizes, uint64_t output,
                        std::span<const uint64_t> rooms) {
  LayerSplit split;
  // Each device takes what fits into this share of its room; whether that is everything.
  const auto fill = [&](double share, bool with_output) {
    split.layers.assign(rooms.size(), 0);
    std::size_t next = 0;
    for (std::size_t d = 0; d < rooms.size(); ++d) {
      uint64_t left =
          share < 1 ? static_cast<uint64_t>(share * static_cast<double>(rooms[d])) : rooms[d];
      for (; next < sizes.size(); ++next, ++split.layers[d]) {
        const uint64_t size = sizes[next] + (with_output && next + 1 == sizes.size() ? output : 0);
        if (size > left) break;
        left -= size;
      }
    }
    return next == sizes.size();
  };
  split.output = fill(1, true);
  if (!split.output && !fill(1, false)) return split;
  double least = 0, enough = 1;
  for (int i = 0; i < 50; ++i)
    (fill((least + enough) / 2, split.output) ? enough : least) = (least + enough) / 2;
  fill(enough, split.output);
  return split;
}

static uint64_t less(uint64_t a, uint64_t b) { return a - std::min(a, b); }

// Everything on devices, or a plan that is not complete.
static DevicePlan plan_all(std::span<const LayerSizes> layers, uint64_t output, uint64_t workspace,
                           std::span<const uint64_t> rooms) {
  bool has_experts = false;
  for (const LayerSizes& layer : layers) has_experts |= layer.experts > 0;
  std::vector<uint64_t> sizes, left;
  for (const LayerSizes& layer : layers)
    sizes.push_back(layer.base + (has_experts ? layer.experts + layer.attention : 0));
  for (const uint64_t room : rooms) left.push_back(less(room, has_experts ? workspace : 0));
  const LayerSplit split = split_layers(sizes, output, left);
  DevicePlan plan;
  plan.output = plan.complete = split.output;
  for (const uint32_t n : split.layers) plan.parts.push_back({n, n});
  return plan;
}

DevicePlan plan_devices(std::span<const LayerSizes> layers, uint64_t output, uint64_t workspace,
                        std::span<const uint64_t> rooms) {
  DevicePlan plan = plan_all(layers, output, workspace, rooms);
  if (plan.complete) return plan;
  std::vector<uint64_t> sizes;
  for (const LayerSizes& layer : layers) sizes.push_back(layer.base);
  const LayerSplit split = split_layers(sizes, output, rooms);
  plan.output = split.output;
  std::size_t next = 0;
  for (std::size_t d = 0; d < rooms.size(); ++d) {
    DevicePlan::Part& part = plan.parts[d];
    part = {split.layers[d], 0};
    const auto its = layers.subspan(next, part.layers);
    next += part.layers;
    uint64_t taken = workspace + (split.output && next == layers.size() ? output : 0);
    for (const LayerSizes& layer : its) taken += layer.base + layer.attention;
    uint64_t left = less(rooms[d], taken);
    for (; part.experts < part.layers && its[part.experts].experts <= left; ++part.experts)
      left -= its[part.experts].experts;
    if (taken > rooms[d]) part.experts = 0;  // no workspace
  }
  return plan;
}

}  // namespace kvasir
