// One layer's attention of new tokens by a device and the CPU side by side, as RetrievalAttention
// has it (arXiv 2409.10516, section 3.3): the device attends sinks and window and reads a part of
// the pages that are attended; the CPU chooses, and attends the others. Its result, a partial state
// of a few kilobytes, goes to the device, which merges all of them. How much of the pages moves,
// and how much of what they come to, follows from how fast each reads (backend/page_rates.h). With
// filter layers (OmniKV, ICLR 2025, section 4) the device reads what all layers up to the next one
// attend in one go, while the layer after the filter layer is attended.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "select/selector.h"

namespace kvasir {

// The device's side, of the layer that is under way. By one thread.
class HybridGpu {
 public:
  virtual ~HybridGpu() = default;

  // Attention to sinks and window: [2][kv_heads][n][group] the largest score, and the sum of
  // exponentials relative to it. Waits. Code::device.
  virtual Status near(const float** sums) = 0;

  // Of the pages how many sixteenths the device reads; 0: it reads none.
  virtual uint32_t sixteenths() const = 0;
  // Of a step of one token, where it reads some: its quads of each KV head, as DeviceAttention has
  // them, to be filled before give_lists(): [kv_heads][most], counts [kv_heads][2]. Pages that it
  // is given are intact.
  struct Lists {
    uint32_t most = 0;
    uint32_t* quads = nullptr;
    uint8_t* present = nullptr;
    float* biases = nullptr;
    uint32_t* counts = nullptr;
  };
  virtual Lists lists() = 0;
  virtual Status give_lists() = 0;
  // Or all pages of every KV head, from this one on.
  virtual Status give_pages(uint32_t first) = 0;

  // Where what the CPU attends goes: [kv_heads][n][group][dim + state_sums], each o, m, l, and what
  // of l stands for itself. All of it is to be written.
  virtual float* states() = 0;

  // When those are written, in a layer that chooses for others: [n][heads] as Attention::run() has
  // them. Waits. Code::device.
  virtual Status totals(const float** totals) = 0;
  // Then, of a step of one token: what the layers after it attend, which the device may read now,
  // for as many of them as it takes. Its pages' places are left open. Code::corrupt, Code::device;
  // throws std::bad_alloc.
  virtual bool packs() const = 0;
  virtual Status pack(uint32_t filter_layer, const Selection& choice) = 0;
};

}  // namespace kvasir
