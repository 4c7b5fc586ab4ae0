#include "model/device_weights.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "model/model.h"
#include "model/stage.h"

namespace kvasir {

constexpr std::size_t piece_bytes = std::size_t{32} << 20;  // of a matrix that is on its way; a row that is longer goes alone

// Copies weights to the device, piece by piece, through memory from which it reads at its full rate.
class DeviceWeights::Loader {
 public:
  explicit Loader(const std::shared_ptr<Device>& device) : device_(device), ops_(device->kernels()) {}
  ~Loader() {
    if (stream_) (void)ops_.close_stream(stream_);
  }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // piece: bytes, at least those of any row.
  Status open(std::size_t piece) {
    piece_ = piece;
    if (Status s = host_.allocate(device_, piece_); !s.ok()) return s;
    if (Status s = staging_.allocate(device_, piece_, what); !s.ok()) return s;
    return failed(ops_.open_stream(device_->context(), &stream_));
  }

  Status vector(const Array<float>& from, DeviceBuffer<float>* to) {
    if (from.empty()) return {};
    if (Status s = to->allocate(device_, from.size(), what); !s.ok()) return s;
    const std::size_t most = piece_ / sizeof(float);
    for (std::size_t at = 0; at < from.size(); at += most) {
      const std::size_t bytes = std::min(most, from.size() - at) * sizeof(float);
      std::memcpy(host_.get(), from.data() + at, bytes);
      if (const int error = ops_.upload(stream_, to->get() + at, host_.get(), bytes)) return failed(error);
      if (const int error = ops_.wait(stream_)) return failed(error);
    }
    return {};
  }

  Status matrix(const Linear& from, Matrix* to) {
    const WeightView& w = from.w;
    if (Status s = to->data.allocate(device_, ops_.matrix_bytes(w.type, w.rows, w.cols), what); !s.ok()) return s;
    to->w = {w.type, w.rows, w.cols, to->data.get()};
    const auto rows = static_cast<uint32_t>(std::min<std::size_t>(w.rows, piece_ / w.row_bytes));
    for (uint32_t row = 0, n; row < w.rows; row += n) {
      n = std::min(rows, w.rows - row);
      std::memcpy(host_.get(), w.data + row * w.row_bytes, n * w.row_bytes);
      if (const int error = ops_.upload(stream_, staging_.get(), host_.get(), n * w.row_bytes)) return failed(error);
      if (const int error = ops_.lay_out(stream_, to->w, staging_.get(), row, n)) return failed(error);
      if (const int error = ops_.wait(stream_)) return failed(error);
    }
    return vector(from.bias, &to->bias);
  }

  Status layer(const LayerWeights& from, Layer* to) {
    const std::pair<const Array<float>*, DeviceBuffer<float>*> vectors[] = {
        {&from.attention_norm, &to->attention_norm}, {&from.q_norm, &to->q_norm}, {&from.k_norm, &to->k_norm}, {&from.ffn_norm, &to->ffn_norm}};
    for (const auto& [host, device] : vectors)
      if (Status s = vector(*host, device); !s.ok()) return s;
    const std::pair<const Linear*, Matrix*> matrices[] = {{&from.q, &to->q},       {&from.k, &to->k},   {&from.v, &to->v},      {&from.o, &to->o},
                                                          {&from.gate, &to->gate}, {&from.up, &to->up}, {&from.down, &to->down}};
    for (const auto& [host, device] : matrices)
      if (Status s = matrix(*host, device); !s.ok()) return s;
    return {};
  }

 private:
  static constexpr const char* what = "weights";
  Status failed(int error) const { return device_->status(error, what); }

  std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  std::size_t piece_ = 0;
  PinnedBuffer<std::byte> host_;
  DeviceBuffer<std::byte> staging_;
  DeviceStream* stream_ = nullptr;
};

Status DeviceWeights::upload(const Weights& weights, const ModelConfig& config, uint32_t rope_dim, const DeviceOptions& options,
                             std::shared_ptr<const DeviceWeights>* out) {
  auto result = std::make_shared<DeviceWeights>();
  if (Status s = Device::open(options.name.c_str(), options.budget, &result->device_); !s.ok()) return s;
  Device& device = *result->device_;
  const auto floats = [](const Array<float>& x) { return Device::taken_by(x.size() * sizeof(float)); };
  const auto bytes_of = [&](const Linear& linear) {
    return Device::taken_by(device.kernels().matrix_bytes(linear.w.type, linear.w.rows, linear.w.cols)) + floats(linear.bias);
  };
  std::size_t piece = std::max(piece_bytes, weights.output.w.row_bytes);
  const auto layer_bytes = [&](const LayerWeights& w) {
    uint64_t bytes = floats(w.attention_norm) + floats(w.q_norm) + floats(w.k_norm) + floats(w.ffn_norm);
    for (const Linear* linear : {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down}) {
      bytes += bytes_of(*linear);
      piece = std::max(piece, linear->w.row_bytes);
    }
    return bytes;
  };
  std::vector<uint64_t> sizes;
  for (const LayerWeights& w : weights.layers) sizes.push_back(layer_bytes(w));
  const uint64_t beside = device_workspace_bytes(config, rope_dim, usual_step) + Device::taken_by(piece);

  uint64_t room = device.left() - std::min(device.left(), beside);
  uint32_t count = 0;
  for (; count < config.layers && sizes[count] <= room; ++count) room -= sizes[count];
  if (count == 0)
    return Status::error(Code::no_memory, "%s has %" PRIu64 " bytes for the model: one layer's weights take %" PRIu64 " and the workspace %" PRIu64,
                         device.name().c_str(), device.left(), sizes[0], beside);

  Loader loader(result->device_);
  if (Status s = loader.open(piece); !s.ok()) return s;
  result->layers_.resize(count);
  for (uint32_t l = 0; l < count; ++l) {
    Status s = loader.layer(weights.layers[l], &result->layers_[l]);
    if (s.code() == Code::no_memory && l > 1) {  // others have taken some of what was free: one layer makes room for the workspace
      result->layers_.resize(count = l - 1);
    } else if (!s.ok()) {
      return s;
    }
  }
  if (count == config.layers && bytes_of(weights.output) + floats(weights.output_norm) <= room) {
    Status s = loader.matrix(weights.output, &result->output_);
    if (s.ok()) s = loader.vector(weights.output_norm, &result->output_norm_);
    if (s.code() == Code::no_memory) {
      result->output_ = {};
    } else if (!s.ok()) {
      return s;
    }
  }
  result->bytes_ = device.used() - Device::taken_by(piece);
  *out = std::move(result);
  return {};
}

}  // namespace kvasir
