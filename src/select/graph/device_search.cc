#include "select/graph/device_search.h"

#include <algorithm>
#include <cmath>

namespace kvasir {

namespace {

// Bytes of group_best: 1024 queries over 131,072 keys.
constexpr std::size_t batch_bytes = std::size_t{64} << 20;
constexpr std::size_t max_batch = 2048;   // queries, over fewer keys
constexpr float max_query_scale = 1e20f;  // of a query: every score stays finite

// The reason why the CPU must search; null: a device can.
const char* why_cpu(const KeyView& keys, const QueryRows& queries, uint32_t k) {
  if (std::find(std::begin(nearest_dims), std::end(nearest_dims), queries.dim) ==
      std::end(nearest_dims))
    return "unsupported head size";
  if (k > max_nearest) return "too many keys per query";
  const bool in_range = std::all_of(queries.scale, queries.scale + queries.rows, [](float scale) {
    return std::fabs(scale) <= max_query_scale;
  });
  return keys.as_stored && in_range ? nullptr : "a scale is out of range";
}

}  // namespace

DeviceSearch::~DeviceSearch() {
  // waits for work that uses the buffers
  if (stream_) (void)device_->kernels().close_stream(stream_);
}

bool DeviceSearch::failed() const {
  const std::lock_guard lock(mutex_);
  return !status_.ok();
}

Status DeviceSearch::status() const {
  const std::lock_guard lock(mutex_);
  return status_.copy();
}

bool DeviceSearch::find(const KeyView& keys, const QueryRows& queries, uint32_t k,
                        const CancelLatch& cancel, Array<uint32_t>* out) {
  const char* why = why_cpu(keys, queries, k);
  const std::lock_guard lock(mutex_);
  if (why && fallback_.empty()) fallback_ = name() + ": " + why;
  if (!fallback_.empty() || !status_.ok() || cancel.fired()) return false;
  out->resize(std::size_t{queries.rows} * std::min(k, keys.items));
  Status s = search(keys, queries, std::min(k, keys.items), cancel, out->data());
  if (s.code() == Code::no_memory) fallback_ = s.message();
  else if (!s.ok()) status_ = std::move(s);
  if (!fallback_.empty() || !status_.ok() || cancel.fired()) return false;
  return ++found_, true;
}

// All heads of an index have the same numbers of keys and queries.
Status DeviceSearch::prepare(uint32_t rows, uint32_t items, uint32_t dim, uint32_t k) {
  if (came_.get()) return {};
  const std::size_t groups = nearest_groups(items),
                    max_rows = std::max<std::size_t>(
                                   batch_bytes / sizeof(float) / groups / nearest_rows, 1) *
                               nearest_rows;
  batch_ = static_cast<uint32_t>(std::min({std::size_t{rows}, max_rows, max_batch}));
  const auto take = [&](auto& buffer, std::size_t size) {
    return buffer.allocate(device_, size, "the nearest keys of an index");
  };
  Status s = take(queries_, std::size_t{rows} * dim);
  if (s.ok()) s = take(query_scales_, rows);
  if (s.ok()) s = take(keys_, std::size_t{items} * dim);
  if (s.ok()) s = take(key_scales_, items);
  if (s.ok()) s = take(group_best_, batch_ * groups);
  if (s.ok()) s = take(nearest_, std::size_t{batch_} * k);
  if (s.ok()) s = check(device_->kernels().open_stream(device_->context(), &stream_));
  return s.ok() ? came_.allocate(device_, std::size_t{batch_} * k) : std::move(s);
}

Status DeviceSearch::search(const KeyView& keys, const QueryRows& queries, uint32_t k,
                            const CancelLatch& cancel, uint32_t* out) {
  const DeviceKernels& ops = device_->kernels();
  const uint32_t dim = queries.dim;
  RETURN_IF_ERROR(prepare(queries.rows, keys.items, dim, k));
  int error = ops.upload(stream_, keys_.get(), keys.rows, std::size_t{keys.items} * dim);
  if (!error)
    error = ops.upload(stream_, key_scales_.get(), keys.scales, keys.items * sizeof(float));
  if (!error)
    error = ops.upload(stream_, queries_.get(), queries.q, std::size_t{queries.rows} * dim);
  if (!error)
    error = ops.upload(stream_, query_scales_.get(), queries.scale, queries.rows * sizeof(float));
  for (uint32_t at = 0; !error && at < queries.rows && !cancel.fired(); at += batch_) {
    const uint32_t rows = std::min(batch_, queries.rows - at);
    error =
        ops.find_nearest(stream_, {rows, keys.items, dim, k, queries_.get() + std::size_t{at} * dim,
                                   query_scales_.get() + at, keys_.get(), key_scales_.get(),
                                   nearest_groups(keys.items), group_best_.get(), nearest_.get()});
    if (!error)
      error = ops.download(stream_, came_.get(), nearest_.get(),
                           std::size_t{rows} * k * sizeof(uint32_t));
    if (!error) error = ops.wait(stream_);
    if (!error) std::copy_n(came_.get(), std::size_t{rows} * k, out + std::size_t{at} * k);
  }
  return check(error);
}

}  // namespace kvasir
