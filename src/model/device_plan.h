// Which layers each GPU holds, and of which of them the routed experts: a plan from sizes alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvasir {

// Distributes layers of these sizes. Where all fit, every device fills at most the same share of
// its room, the smallest share with which they fit. Otherwise each device takes as many as it has
// room for. output: what the device with the last layer needs besides. All in bytes.
struct LayerSplit {
  std::vector<uint32_t> layers;  // [devices]
  bool output = false;           // there is room for it
};
LayerSplit split_layers(std::span<const uint64_t> sizes, uint64_t output,
                        std::span<const uint64_t> rooms);

// Bytes in device memory.
struct LayerSizes {
  uint64_t base = 0;       // all weights but routed experts
  uint64_t experts = 0;    // routed experts; 0: none
  uint64_t attention = 0;  // what experts leave free for attention of the layer
};

struct DevicePlan {
  struct Part {
    uint32_t layers = 0;
    uint32_t experts = 0;  // of its first so many layers, the device has the experts too
  };
  std::vector<Part> parts;  // [devices]
  bool output = false;      // the device with the last layer has room for the output
  bool complete = false;    // all layers, their experts and the output are on devices
  bool streams = false;     // devices have room for weights that come in prefill
};

// Plans layers of these sizes. Where all layers and experts fit, they are distributed as
// split_layers() does. Otherwise layers come before experts: attention, norms and shared experts of
// as many layers as fit, then experts, from each device's first layer on, in what is left.
// A layer's experts on the device save its share of a token's time whatever the other layers do,
// so the decision is one of each layer. rooms: [devices]; workspace: what a device with experts
// needs besides them.
DevicePlan plan_devices(std::span<const LayerSizes> layers, uint64_t output, uint64_t workspace,
                        std::span<const uint64_t> rooms);

}  // namespace kvasir
