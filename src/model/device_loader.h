// Copies weights to a device's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "base/cancel.h"
#include "model/device_sizes.h"
#include "model/device_weights.h"
#include "model/model.h"

namespace kvasir {

// Rows of a matrix, in the blocks of the file, and where they are laid out.
struct WeightPiece {
  const std::byte* from = nullptr;
  std::size_t bytes = 0;
  DeviceMatrix to;
  uint32_t row = 0, rows = 0;
};

// Copies weights to the device, piece by piece, through memory from which it reads at its full
// rate.
class DeviceLoader {
 public:
  using Matrix = DeviceWeights::Matrix;
  using Norm = DeviceWeights::Norm;
  using ExpertMatrices = DeviceWeights::ExpertMatrices;
  using Experts = DeviceWeights::Experts;
  using Recurrent = DeviceWeights::Recurrent;
  using Layer = DeviceWeights::Layer;

  DeviceLoader(const std::shared_ptr<Device>& device, const Cancel* cancel)
      : device_(device), ops_(device->kernels()), cancel_(cancel) {}
  ~DeviceLoader() {
    if (stream_) (void)ops_.close_stream(stream_);
  }
  DeviceLoader(const DeviceLoader&) = delete;
  DeviceLoader& operator=(const DeviceLoader&) = delete;

  // piece: bytes, at least those of any row.
  Status open(std::size_t piece) {
    piece_ = piece;
    RETURN_IF_ERROR(host_.allocate(device_, piece_));
    RETURN_IF_ERROR(staging_.allocate(device_, piece_, what));
    return failed(ops_.open_stream(device_->context(), &stream_));
  }

  // A place that several layers use in turn (WeightStream), instead of memory of their own. Rows
  // are noted and not copied. Without pieces the loader measures the place, and copies nothing.
  struct Place {
    std::byte* memory = nullptr;
    std::size_t used = 0, longest_row = 0;
    std::vector<WeightPiece>* pieces = nullptr;
  };
  void set_place(Place* place) { place_ = place; }

  // factor: of all numbers.
  Status vector(const Array<float>& from, DeviceBuffer<float>* to, float factor = 1) {
    if (from.empty() || (place_ && !place_->pieces)) return {};
    RETURN_IF_ERROR(to->allocate(device_, from.size(), what));
    const std::size_t most = piece_ / sizeof(float);
    for (std::size_t at = 0; at < from.size(); at += most) {
      const std::size_t n = std::min(most, from.size() - at);
      auto* staged = reinterpret_cast<float*>(host_.get());
      std::transform(from.data() + at, from.data() + at + n, staged,
                     [&](float x) { return x * factor; });
      if (const int error = ops_.upload(stream_, to->get() + at, staged, n * sizeof(float)))
        return failed(error);
      if (const int error = ops_.wait(stream_)) return failed(error);
    }
    return {};
  }

  Status norm(const kvasir::Norm& from, Norm* to, float factor = 1) {
    RETURN_IF_ERROR(vector(from.weight, &to->weight, factor));
    return vector(from.bias, &to->bias, factor);
  }

  struct MatrixCopy {
    const Linear* from;
    Matrix* to;
    float factor = 1;  // of the product and its bias
    RowRuns runs{};
    std::size_t room(const DeviceKernels& ops) const {
      WeightView w = from->w;
      w.rows = runs.rows(w.rows);
      return matrix_room(ops, w);
    }
  };
  // Side by side in one piece of memory.
  Status matrices(std::span<const MatrixCopy> all, DeviceBuffer<std::byte>* memory) {
    std::size_t size = 0;
    for (const MatrixCopy& each : all) size += each.room(ops_);
    std::byte* at = nullptr;
    RETURN_IF_ERROR(allocate(size, memory, &at));
    for (const MatrixCopy& each : all) {
      if (each.runs.count > 0) RETURN_IF_ERROR(runs(each, at));
      else RETURN_IF_ERROR(matrix(*each.from, at, each.to, each.factor));
      at += each.room(ops_);
    }
    return {};
  }

  // Some rows of a matrix and of its bias.
  Status runs(const MatrixCopy& copy, std::byte* at) {
    const Linear& from = *copy.from;
    const RowRuns& r = copy.runs;
    WeightView w = from.w;
    w.rows = r.count;
    copy.to->w = {w.type, r.rows(from.w.rows), w.cols, at, w.scale * copy.factor};
    Array<float> bias;
    for (uint32_t row = r.first, to = 0; row < from.w.rows; row += r.stride, to += r.count) {
      w.data = from.w.data + row * w.row_bytes;
      RETURN_IF_ERROR(rows(w, copy.to->w, to));
      if (!from.bias.empty())
        bias.insert(bias.end(), from.bias.data() + row, from.bias.data() + row + r.count);
    }
    return vector(bias, &copy.to->bias, copy.factor);
  }

  Status matrix(const Linear& from, std::byte* at, Matrix* to, float factor = 1) {
    const WeightView& w = from.w;
    to->w = {w.type, w.rows, w.cols, at, w.scale * factor};
    RETURN_IF_ERROR(rows(w, to->w, 0));
    return vector(from.bias, &to->bias, factor);
  }

  // Copies w to the rows of `to` from `first` on.
  Status rows(const WeightView& w, const DeviceMatrix& to, uint32_t first) {
    if (place_) place_->longest_row = std::max(place_->longest_row, w.row_bytes);
    if (place_ && !place_->pieces) return {};
    const auto together =
        static_cast<uint32_t>(std::min<std::size_t>(w.rows, piece_ / w.row_bytes));
    for (uint32_t row = 0, n; row < w.rows; row += n) {
      if (is_cancelled(cancel_))
        return Status::error(Code::cancelled, "cancelled; the model was not opened");
      n = std::min(together, w.rows - row);
      if (place_) {
        place_->pieces->push_back(
            {w.data + row * w.row_bytes, n * w.row_bytes, to, first + row, n});
        continue;
      }
      std::memcpy(host_.get(), w.data + row * w.row_bytes, n * w.row_bytes);
      if (const int error = ops_.upload(stream_, staging_.get(), host_.get(), n * w.row_bytes))
        return failed(error);
      if (const int error = ops_.lay_out(stream_, to, staging_.get(), first + row, n))
        return failed(error);
      if (const int error = ops_.wait(stream_)) return failed(error);
    }
    return {};
  }

  Status experts(const ExpertWeights& from, uint32_t count, Experts::Routed* to) {
    std::byte* at = nullptr;
    RETURN_IF_ERROR(allocate(routed_room(ops_, from, count), &to->memory, &at));
    RETURN_IF_ERROR(matrix(from.router, at, &to->router));
    RETURN_IF_ERROR(vector(from.selection_bias, &to->selection_bias));
    at += matrix_room(ops_, from.router.w);
    const std::pair<const kvasir::ExpertMatrices*, ExpertMatrices*> its[] = {
        {&from.gate, &to->gate}, {&from.up, &to->up}, {&from.down, &to->down}};
    for (const auto& [host, device] : its) {
      if (!host->first.data) continue;
      RETURN_IF_ERROR(expert_matrices(*host, count, at, device));
      at += matrix_room(ops_, stacked(*host, count));
    }
    return {};
  }

  Status expert_matrices(const kvasir::ExpertMatrices& from, uint32_t count, std::byte* at,
                         ExpertMatrices* to) {
    const WeightView w = stacked(from, count);
    const uint32_t rows_of_one = from.first.rows;
    to->w = {w.type, w.rows, w.cols, at, w.scale};
    if (from.stride == rows_of_one * w.row_bytes) {
      RETURN_IF_ERROR(rows(w, to->w, 0));
    } else {  // gate and up of an expert follow one another
      for (uint32_t e = 0; e < count; ++e)
        RETURN_IF_ERROR(rows(from.of(e), to->w, e * rows_of_one));
    }
    RETURN_IF_ERROR(vector(from.biases, &to->biases));
    return vector(from.scales, &to->scales);
  }

  Status recurrent(const RecurrentWeights& from, Recurrent* to) {
    RETURN_IF_ERROR(vector(from.convolution, &to->convolution));
    RETURN_IF_ERROR(vector(from.bias, &to->bias));
    RETURN_IF_ERROR(vector(from.decay, &to->decay));
    RETURN_IF_ERROR(vector(from.decay_bias, &to->decay_bias));
    RETURN_IF_ERROR(vector(from.skip, &to->skip));
    return vector(from.norm, &to->norm);
  }

  Status layer(const LayerWeights& from, const ModelConfig& config, const LayerConfig& c,
               Layer* to) {
    const float residual_scale = config.residual_scale;
    RETURN_IF_ERROR(norm(from.mixer_norm, &to->mixer_norm));
    RETURN_IF_ERROR(norm(from.ffn_norm, &to->ffn_norm));
    RETURN_IF_ERROR(norm(from.mixer_post_norm, &to->mixer_post_norm, residual_scale));
    RETURN_IF_ERROR(norm(from.ffn_post_norm, &to->ffn_post_norm, residual_scale));
    RETURN_IF_ERROR(norm(from.input_norm, &to->input_norm, residual_scale));
    if (!from.output_scale.empty()) to->output_scale = from.output_scale[0];
    RETURN_IF_ERROR(vector(from.q_norm, &to->q_norm));
    RETURN_IF_ERROR(vector(from.k_norm, &to->k_norm));
    RETURN_IF_ERROR(vector(from.sinks, &to->sinks));
    const ExpertWeights& e = from.experts;
    RETURN_IF_ERROR(vector(e.router_norm.weight, &to->experts.router_norm));
    RETURN_IF_ERROR(vector(e.input_norm.weight, &to->experts.input_norm));
    RETURN_IF_ERROR(vector(e.output_norm.weight, &to->experts.output_norm));
    RETURN_IF_ERROR(vector(e.dense_norm.weight, &to->experts.dense_norm));
    RETURN_IF_ERROR(vector(e.shared_router, &to->experts.shared_router));
    RETURN_IF_ERROR(recurrent(from.recurrent, &to->recurrent));
    const RecurrentWeights& r = from.recurrent;
    const bool both_rates =
        r.beta.w.data && !r.alpha.w.data && config.recurrent.kind == RecurrentKind::delta_net;
    const RowRuns betas = both_rates ? rate_rows(config.recurrent, false) : RowRuns(),
                  alphas = both_rates ? rate_rows(config.recurrent, true) : RowRuns();
    const Linear none;
    const MatrixCopy its[] = {
        {&from.q, &to->q, 1, query_rows(c, false)},
        {c.gates_output ? &from.q : &none, &to->query_gate, 1, query_rows(c, true)},
        {&r.in, &to->recurrent.in},
        {&r.gate, &to->recurrent.gate},
        {&r.beta, &to->recurrent.beta, 1, betas},
        {both_rates ? &r.beta : &r.alpha, &to->recurrent.alpha, 1, alphas},
        {&r.out, &to->recurrent.out, from.mixer_post_norm.empty() ? residual_scale : 1},
        {&from.k, &to->k},
        {&from.v, &to->v},
        {&from.o, &to->o, from.mixer_post_norm.empty() ? residual_scale : 1},
        {&from.gate, &to->gate},
        {&from.up, &to->up},
        {&from.down, &to->down, from.ffn_post_norm.empty() ? residual_scale : 1},
        {&from.input_gate, &to->input_gate},
        {&from.input_out, &to->input_out},
        {&e.shared_gate, &to->experts.shared_gate},
        {&e.shared_up, &to->experts.shared_up},
        {&e.shared_down, &to->experts.shared_down}};
    std::vector<MatrixCopy> all;
    for (const MatrixCopy& each : its)
      if (each.from->w.data) all.push_back(each);
    return matrices(all, &to->memory);
  }

 private:
  static constexpr const char* what = "weights";
  Status allocate(std::size_t size, DeviceBuffer<std::byte>* memory, std::byte** at) {
    if (place_) {
      std::byte* const begin = place_->memory;
      *at = (begin ? begin : reinterpret_cast<std::byte*>(uintptr_t{256})) + place_->used;
      place_->used += size;
      return {};
    }
    RETURN_IF_ERROR(memory->allocate(device_, size, what));
    *at = memory->get();
    return {};
  }
  Status failed(int error) const { return device_->status(error, what); }

  std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const Cancel* cancel_;
  std::size_t piece_ = 0;
  PinnedBuffer<std::byte> host_;
  DeviceBuffer<std::byte> staging_;
  DeviceStream* stream_ = nullptr;
  Place* place_ = nullptr;
};

}  // namespace kvasir
