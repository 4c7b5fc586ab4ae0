#include "model/weight_stream.h"

#include <algorithm>
#include <cstring>

#include "backend/parallel_chunks.h"

namespace kvasir {

constexpr const char* streamed_weights = "streamed weights";

WeightStream::WeightStream(const DeviceWeights& here, uint32_t end)
    : here_(here), device_(here.device()), ops_(device_->kernels()), first_(here.first_layer()),
      end_(end), layers_(end - first_), plans_(end - first_) {}

WeightStream::~WeightStream() {
  for (DeviceStream* stream : streams_)
    if (stream) (void)ops_.wait(stream), (void)ops_.close_stream(stream);
}

Status WeightStream::open(const Weights& weights, const ModelConfig& config,
                          const DeviceWeights& here, uint32_t end,
                          std::unique_ptr<WeightStream>* out) {
  std::unique_ptr<WeightStream> stream(new WeightStream(here, end));
  RETURN_IF_ERROR(stream->make(weights, config));
  *out = std::move(stream);
  return {};
}

// What of a layer is not here.
Status WeightStream::load(const Weights& weights, const ModelConfig& config, uint32_t layer,
                          DeviceLoader* loader, DeviceLoader::Place* place) {
  const LayerWeights& from = weights.layers[layer];
  DeviceWeights::Layer* const to = &layers_[layer - first_];
  loader->set_place(place);
  if (!has_base(layer)) RETURN_IF_ERROR(loader->layer(from, config, config.layer(layer), to));
  const bool experts = has_base(layer) && here_.layers()[layer - first_].experts.are_here();
  if (config.layer(layer).has_experts() && !experts)
    RETURN_IF_ERROR(loader->experts(from.experts, from.experts.router.w.rows, &to->experts.routed));
  loader->set_place(nullptr);
  return {};
}

Status WeightStream::make(const Weights& weights, const ModelConfig& config) {
  DeviceLoader loader(device_, nullptr);
  DeviceLoader::Place largest;
  for (uint32_t l = first_; l < end_; ++l) {
    DeviceLoader::Place place;
    RETURN_IF_ERROR(load(weights, config, l, &loader, &place));
    largest.used = std::max(largest.used, place.used);
    largest.longest_row = std::max(largest.longest_row, place.longest_row);
  }
  const std::size_t piece =
      std::max(std::min(DeviceSizes::streamed_piece, largest.used), largest.longest_row);
  for (int i = 0; i < 2; ++i) {
    RETURN_IF_ERROR(places_[i].allocate(device_, largest.used, streamed_weights));
    RETURN_IF_ERROR(staging_[i].allocate(device_, piece, streamed_weights));
    RETURN_IF_ERROR(host_[i].allocate(device_, piece));
    RETURN_IF_ERROR(
        device_->status(ops_.open_stream(device_->context(), &streams_[i]), streamed_weights));
  }
  RETURN_IF_ERROR(loader.open(piece));
  for (uint32_t l = first_; l < end_; ++l) {
    Plan& plan = plans_[l - first_];
    plan.place = streamed_ % 2;
    DeviceLoader::Place place{.memory = places_[plan.place].get(), .pieces = &plan.pieces};
    RETURN_IF_ERROR(load(weights, config, l, &loader, &place));
    for (const WeightPiece& each : plan.pieces) plan.bytes += each.bytes;
    streamed_ += !plan.pieces.empty();
  }
  return {};
}

const DeviceWeights::Layer& WeightStream::layer(uint32_t layer) const {
  return has_base(layer) ? here_.layers()[layer - first_] : layers_[layer - first_];
}

const DeviceWeights::Experts::Routed& WeightStream::routed(uint32_t layer) const {
  const DeviceWeights::Experts& e = WeightStream::layer(layer).experts;
  return e.are_here() ? e.routed : layers_[layer - first_].experts.routed;
}

uint32_t WeightStream::next_after(uint32_t layer) const {
  for (uint32_t l = layer + 1; l < end_; ++l)
    if (streams(l)) return l;
  return no_layer;
}

Status WeightStream::wait() {
  Status s;
  for (DeviceStream* stream : streams_) {
    const int error = ops_.wait(stream);
    if (s.ok()) s = device_->status(error, streamed_weights);
  }
  return s;
}

Status WeightStream::start(uint32_t layer) {
  if (layer == no_layer || layer == coming_ || in_place_[plan_of(layer).place] == layer) return {};
  RETURN_IF_ERROR(wait());  // for what a span that failed left on its way
  in_place_[plan_of(layer).place] = no_layer;
  coming_ = layer, piece_ = 0;
  return {};
}

// At least so many bytes of the coming layer, or all.
Status WeightStream::copy(std::size_t bytes, ThreadPool* pool, const CancelLatch& cancel) {
  const std::vector<WeightPiece>& pieces = plan_of(coming_).pieces;
  for (std::size_t copied = 0; piece_ < pieces.size() && copied < bytes; ++piece_) {
    if (cancel.fired())
      return Status::error(Code::cancelled, "cancelled; the sequence is as it was");
    const WeightPiece& p = pieces[piece_];
    const uint32_t i = turn_++ % 2;
    int error = ops_.wait(streams_[i]);
    if (error) return device_->status(error, streamed_weights);
    parallel_chunks(p.bytes, pool, [&](std::size_t at, std::size_t n) {
      std::memcpy(host_[i].get() + at, p.from + at, n);
    });
    error = ops_.upload(streams_[i], staging_[i].get(), host_[i].get(), p.bytes);
    if (!error) error = ops_.lay_out(streams_[i], p.to, staging_[i].get(), p.row, p.rows);
    if (error) return device_->status(error, streamed_weights);
    copied += p.bytes, bytes_ += p.bytes;
  }
  return {};
}

Status WeightStream::bring(uint32_t layer, ThreadPool* pool, const CancelLatch& cancel) {
  if (streams(layer)) {
    RETURN_IF_ERROR(start(layer));
    const uint32_t place = plan_of(layer).place;
    if (in_place_[place] != layer) {
      RETURN_IF_ERROR(copy(SIZE_MAX, pool, cancel));
      RETURN_IF_ERROR(wait());
      in_place_[place] = layer;
    }
  }
  return start(next_after(layer));
}

Status WeightStream::advance(uint32_t parts, ThreadPool* pool, const CancelLatch& cancel) {
  if (coming_ == no_layer || in_place_[plan_of(coming_).place] == coming_) return {};
  return copy(plan_of(coming_).bytes / parts + 1, pool, cancel);
}

}  // namespace kvasir
