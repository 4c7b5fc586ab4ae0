// Co-execution: a GPU and the CPU attend one layer together (RetrievalAttention, arXiv 2409.10516,
// section 3.3). The GPU attends sinks, window and a part of the attended pages. The CPU chooses
// pages and attends the others. Its partial state of a few kilobytes goes to the GPU, which merges
// all partials. Measured rates set the split of the pages (backend/page_rates.h). With filter
// layers (OmniKV, ICLR 2025, section 4) the GPU reads the selected tokens of all layers up to the
// next filter layer in one copy. The copy overlaps with the attention of the layer after the filter
// layer.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "select/selector.h"

namespace kvasir {

// The GPU's part of the current layer. Used by one thread.
class HybridGpu {
 public:
  virtual ~HybridGpu() = default;

  // Waits for the attention of sinks and window. *sums: [2][kv_heads][n][group] the largest score,
  // and the sum of exponentials relative to it. Code::device.
  virtual Status near(const float** sums) = 0;

  // Sixteenths of the pages that the GPU reads; 0: none.
  virtual uint32_t sixteenths() const = 0;
  // In a step of one token: the quads of each KV head that the GPU attends, as in DeviceAttention.
  // The caller fills the arrays before enqueue_lists(): [kv_heads][capacity], counts
  // [kv_heads][2]. It must list verified pages only.
  struct Lists {
    uint32_t capacity = 0;
    uint32_t* quads = nullptr;
    uint8_t* present = nullptr;
    float* biases = nullptr;
    uint32_t* counts = nullptr;
  };
  virtual Lists lists() = 0;
  virtual Status enqueue_lists() = 0;
  // Instead of lists: the GPU attends all pages of every KV head from `first` on.
  virtual Status enqueue_pages(uint32_t first) = 0;

  // The CPU's partials, [kv_heads][n][group][dim + state_sums]. Each is o, m, l, and the part of l
  // of tokens that were not sampled. The caller writes all of them.
  virtual float* states() = 0;

  // In a filter layer, after the caller has written states(): waits for the lse of all partials.
  // *lse: [n][heads] as in Attention::run(). Code::device.
  virtual Status lse(const float** lse) = 0;
  // After lse(), in a step of one token: enqueues the copy of the tokens that the following layers
  // attend. The selection needs no addresses of pages. Code::corrupt, Code::device; throws
  // std::bad_alloc.
  virtual bool packs() const = 0;
  virtual Status pack(uint32_t filter_layer, const Selection& choice) = 0;
};

}  // namespace kvasir
