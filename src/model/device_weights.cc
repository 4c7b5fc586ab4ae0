#include "model/device_weights.h"

#include <algorithm>
#include <cstring>

#include "model/model.h"
#include "model/stage.h"

namespace kvasir {

constexpr std::size_t piece_bytes = std::size_t{32} << 20;  // of a matrix that is on its way; a row that is longer goes alone
constexpr uint32_t usual_step = 512;                        // tokens that a session's workspace is kept free for

// Copies weights to the device, piece by piece, through memory from which it reads at its full rate.
class DeviceWeights::Loader {
 public:
  Loader(const std::shared_ptr<Device>& device, std::size_t largest_row)
      : device_(device), ops_(device->kernels()), piece_(std::max(piece_bytes, largest_row)), host_(ops_, piece_) {}
  ~Loader() {
    if (stream_) (void)ops_.close_stream(stream_);
  }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  Status open() {
    if (!staging_.allocate(device_, piece_)) return full();
    return device_->status(ops_.open_stream(device_->index(), &stream_), "opening it");
  }

  Status vector(const Array<float>& from, DeviceBuffer<float>* to) {
    if (from.empty()) return {};
    if (!to->allocate(device_, from.size())) return full();
    std::memcpy(host_.get(), from.data(), from.size() * sizeof(float));
    if (const int error = ops_.upload(stream_, to->get(), host_.get(), from.size() * sizeof(float))) return failed(error);
    return failed(ops_.wait(stream_));
  }

  Status matrix(const Linear& from, Matrix* to) {
    const WeightView& w = from.w;
    if (!to->data.allocate(device_, ops_.matrix_bytes(w.type, w.rows, w.cols))) return full();
    to->w = {w.type, w.rows, w.cols, to->data.get()};
    const auto rows = static_cast<uint32_t>(std::min<std::size_t>(w.rows, piece_ / w.row_bytes));
    for (uint32_t row = 0; row < w.rows; row += rows) {
      const uint32_t n = std::min(rows, w.rows - row);
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
  Status full() const { return Status::error(Code::no_memory, "%s: no memory for weights", device_->name().c_str()); }
  Status failed(int error) const { return device_->status(error, "copying weights to it"); }

  std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  std::size_t piece_;
  PinnedBuffer<std::byte> host_;
  DeviceBuffer<std::byte> staging_;
  DeviceStream* stream_ = nullptr;
};

Status DeviceWeights::upload(const Weights& weights, const ModelConfig& config, uint32_t rope_dim, const DeviceOptions& options,
                             std::shared_ptr<const DeviceWeights>* out) {
  auto result = std::make_shared<DeviceWeights>();
  if (Status s = Device::open(options.name.c_str(), options.budget, &result->device_); !s.ok()) return s;
  Device& device = *result->device_;
  const auto bytes_of = [&](const Linear& linear) {
    return device.kernels().matrix_bytes(linear.w.type, linear.w.rows, linear.w.cols) + linear.bias.size() * sizeof(float);
  };
  const auto layer_bytes = [&](const LayerWeights& w) {
    uint64_t bytes = (w.attention_norm.size() + w.q_norm.size() + w.k_norm.size() + w.ffn_norm.size()) * sizeof(float);
    for (const Linear* linear : {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down}) bytes += bytes_of(*linear);
    return bytes;
  };
  std::size_t largest_row = weights.output.w.row_bytes;
  for (const LayerWeights& w : weights.layers)
    for (const Linear* linear : {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down})
      largest_row = std::max({largest_row, linear->w.row_bytes, linear->bias.size() * sizeof(float), std::size_t{config.width} * sizeof(float)});
  const uint64_t beside = device_workspace_bytes(config, rope_dim, usual_step) + std::max(piece_bytes, largest_row);

  uint64_t room = device.left(), count = 0;
  room -= std::min(room, beside);
  for (; count < config.layers && layer_bytes(weights.layers[count]) <= room; ++count) room -= layer_bytes(weights.layers[count]);
  if (count == 0)
    return Status::error(Code::no_memory, "%s has %llu bytes for Kvasir: one layer's weights take %llu and the workspace %llu", device.name().c_str(),
                         static_cast<unsigned long long>(device.left()), static_cast<unsigned long long>(layer_bytes(weights.layers[0])),
                         static_cast<unsigned long long>(beside));

  Loader loader(result->device_, largest_row);
  if (Status s = loader.open(); !s.ok()) return s;
  result->layers_.resize(count);
  for (uint64_t l = 0; l < count; ++l)
    if (Status s = loader.layer(weights.layers[l], &result->layers_[l]); !s.ok()) return s;
  if (count == config.layers && bytes_of(weights.output) + weights.output_norm.size() * sizeof(float) <= room) {
    if (Status s = loader.matrix(weights.output, &result->output_); !s.ok()) return s;
    if (Status s = loader.vector(weights.output_norm, &result->output_norm_); !s.ok()) return s;
  }
  result->bytes_ = device.used() - std::max(piece_bytes, largest_row);
  *out = std::move(result);
  return {};
}

}  // namespace kvasir
