// A GPU's search for the nearest keys of the queries of an index: the same keys in the same order
// as on the CPU.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "backend/device.h"
#include "backend/kernels.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"

namespace kvasir {

// The keys of one head.
struct KeyView {
  const int8_t* rows;   // [items][dim]
  const float* scales;  // [items]
  uint32_t items;
  bool as_stored;  // the scales of the pages, unchanged: none had to be replaced
};

// The search of one device while an index is built. Threads: heads that are built at the same time
// take turns of milliseconds, so that one head's arrays are in device memory.
class DeviceSearch {
 public:
  explicit DeviceSearch(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  ~DeviceSearch();
  DeviceSearch(const DeviceSearch&) = delete;
  DeviceSearch& operator=(const DeviceSearch&) = delete;

  // Writes the k nearest keys of each query, best first, to out: [rows][k], or all items if there
  // are fewer. False: the CPU must search, with the reason in fallback() from then on; or it was
  // cancelled; or the device failed, with the error in status(). Throws std::bad_alloc.
  bool find(const KeyView& keys, const QueryRows& queries, uint32_t k, const CancelLatch& cancel,
            Array<uint32_t>* out);

  const std::string& name() const { return device_->name(); }
  bool failed() const;
  Status status() const;
  // For use when no thread calls find() any more.
  const std::string& fallback() const { return fallback_; }  // the first reason
  uint32_t found() const { return found_; }                  // heads

 private:
  Status search(const KeyView& keys, const QueryRows& queries, uint32_t k,
                const CancelLatch& cancel, uint32_t* out);
  Status prepare(uint32_t rows, uint32_t items, uint32_t dim, uint32_t k);
  Status check(int error) const { return device_->status(error, "the nearest keys of an index"); }

  const std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  Status status_;
  std::string fallback_;
  uint32_t found_ = 0;
  DeviceStream* stream_ = nullptr;
  uint32_t batch_ = 0;  // queries per call
  DeviceBuffer<int8_t> queries_, keys_;
  DeviceBuffer<float> query_scales_, key_scales_, group_best_;
  DeviceBuffer<uint32_t> nearest_;
  PinnedBuffer<uint32_t> came_;  // [batch_][k]
};

}  // namespace kvasir
