#include "model/device_weights.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "model/gpu_workspace.h"
#include "model/model.h"

namespace kvasir {

// of a matrix that is on its way; a row that is longer goes alone
constexpr std::size_t piece_bytes = std::size_t{32} << 20;

// Of host memory that is kept for what goes to a device (Device::reserve_host): as a share of the
// weights, and from and up to so many bytes.
constexpr uint64_t staged_share = 128, min_staged = uint64_t{4} << 20,
                   max_staged = uint64_t{64} << 20;

// Bytes of a matrix among others: the next one begins where every kernel can read it.
static std::size_t matrix_room(const DeviceKernels& kernels, const Linear& linear) {
  return round_up(kernels.matrix_bytes(linear.w.type, linear.w.rows, linear.w.cols), 256);
}

// Copies weights to the device, piece by piece, through memory from which it reads at its full
// rate.
class DeviceWeights::Loader {
 public:
  Loader(const std::shared_ptr<Device>& device, const Cancel* cancel)
      : device_(device), ops_(device->kernels()), cancel_(cancel) {}
  ~Loader() {
    if (stream_) (void)ops_.close_stream(stream_);
  }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // piece: bytes, at least those of any row.
  Status open(std::size_t piece) {
    piece_ = piece;
    RETURN_IF_ERROR(host_.allocate(device_, piece_));
    RETURN_IF_ERROR(staging_.allocate(device_, piece_, what));
    return failed(ops_.open_stream(device_->context(), &stream_));
  }

  // factor: of all numbers.
  Status vector(const Array<float>& from, DeviceBuffer<float>* to, float factor = 1) {
    if (from.empty()) return {};
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
  };
  // Side by side in one piece of memory.
  Status matrices(std::span<const MatrixCopy> all, DeviceBuffer<std::byte>* memory) {
    std::size_t size = 0;
    for (const MatrixCopy& each : all) size += matrix_room(ops_, *each.from);
    RETURN_IF_ERROR(memory->allocate(device_, size, what));
    std::byte* at = memory->get();
    for (const MatrixCopy& each : all) {
      RETURN_IF_ERROR(matrix(*each.from, at, each.to, each.factor));
      at += matrix_room(ops_, *each.from);
    }
    return {};
  }

  Status matrix(const Linear& from, std::byte* at, Matrix* to, float factor) {
    const WeightView& w = from.w;
    to->w = {w.type, w.rows, w.cols, at, w.scale * factor};
    const auto rows = static_cast<uint32_t>(std::min<std::size_t>(w.rows, piece_ / w.row_bytes));
    for (uint32_t row = 0, n; row < w.rows; row += n) {
      if (is_cancelled(cancel_))
        return Status::error(Code::cancelled, "cancelled; the model was not opened");
      n = std::min(rows, w.rows - row);
      std::memcpy(host_.get(), w.data + row * w.row_bytes, n * w.row_bytes);
      if (const int error = ops_.upload(stream_, staging_.get(), host_.get(), n * w.row_bytes))
        return failed(error);
      if (const int error = ops_.lay_out(stream_, to->w, staging_.get(), row, n))
        return failed(error);
      if (const int error = ops_.wait(stream_)) return failed(error);
    }
    return vector(from.bias, &to->bias, factor);
  }

  Status layer(const LayerWeights& from, float residual_scale, Layer* to) {
    RETURN_IF_ERROR(norm(from.mixer_norm, &to->mixer_norm));
    RETURN_IF_ERROR(norm(from.ffn_norm, &to->ffn_norm));
    RETURN_IF_ERROR(norm(from.mixer_post_norm, &to->mixer_post_norm, residual_scale));
    RETURN_IF_ERROR(norm(from.ffn_post_norm, &to->ffn_post_norm, residual_scale));
    RETURN_IF_ERROR(norm(from.input_norm, &to->input_norm, residual_scale));
    if (!from.output_scale.empty()) to->output_scale = from.output_scale[0];
    RETURN_IF_ERROR(vector(from.q_norm, &to->q_norm));
    RETURN_IF_ERROR(vector(from.k_norm, &to->k_norm));
    RETURN_IF_ERROR(vector(from.sinks, &to->sinks));
    const MatrixCopy its[] = {
        {&from.q, &to->q},
        {&from.k, &to->k},
        {&from.v, &to->v},
        {&from.o, &to->o, from.mixer_post_norm.empty() ? residual_scale : 1},
        {&from.gate, &to->gate},
        {&from.up, &to->up},
        {&from.down, &to->down, from.ffn_post_norm.empty() ? residual_scale : 1},
        {&from.input_gate, &to->input_gate},
        {&from.input_out, &to->input_out}};
    std::vector<MatrixCopy> all;
    for (const MatrixCopy& each : its)
      if (each.from->w.data) all.push_back(each);  // experts are the CPU's
    return matrices(all, &to->memory);
  }

 private:
  static constexpr const char* what = "weights";
  Status failed(int error) const { return device_->status(error, what); }

  std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const Cancel* cancel_;
  std::size_t piece_ = 0;
  PinnedBuffer<std::byte> host_;
  DeviceBuffer<std::byte> staging_;
  DeviceStream* stream_ = nullptr;
};

namespace {

// What the parts of a model take of a device.
struct Sizes {
  Sizes(const Weights& weights, const ModelConfig& config, const DeviceKernels& kernels) {
    const auto floats = [](const Array<float>& x) {
      return Device::allocated_size(x.size() * sizeof(float));
    };
    const auto add = [&](const Linear& linear, std::size_t* matrices, uint64_t* biases) {
      piece = std::max(piece, linear.w.row_bytes);
      *matrices += matrix_room(kernels, linear), *biases += floats(linear.bias);
    };
    for (const LayerWeights& w : weights.layers) {
      std::size_t matrices = 0;
      layers.push_back(0);
      for (const Norm* norm :
           {&w.mixer_norm, &w.mixer_post_norm, &w.ffn_norm, &w.ffn_post_norm, &w.input_norm})
        layers.back() += floats(norm->weight) + floats(norm->bias);
      for (const Array<float>* vector : {&w.q_norm, &w.k_norm, &w.sinks})
        layers.back() += floats(*vector);
      for (const Linear* linear :
           {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down, &w.input_gate, &w.input_out})
        if (linear->w.data) add(*linear, &matrices, &layers.back());
      layers.back() += Device::allocated_size(matrices);
      // a session's keys and values of the window
      if (config.layer(static_cast<uint32_t>(layers.size() - 1)).is_windowed())
        layers.back() += window_layer_bytes(config);
    }
    std::size_t matrix = 0;
    output = floats(weights.output_norm.weight) + floats(weights.output_norm.bias);
    add(weights.output, &matrix, &output);
    output += Device::allocated_size(matrix);
    margin = device_workspace_bytes(config, usual_step) + Device::allocated_size(piece);
    margin += window_step_bytes(config, usual_step);
  }
  uint64_t room(const Device& device) const {
    return device.left() - std::min(device.left(), margin);
  }

  std::vector<uint64_t> layers;
  uint64_t output, margin;          // a session's workspace and what weights come through
  std::size_t piece = piece_bytes;  // bytes that weights come in, at least those of any row
};

}  // namespace

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

// Where others have taken some of what was free, fewer layers: one of them makes room for the
// workspace.
Status DeviceWeights::load(const Weights& weights, float residual_scale, uint32_t first,
                           uint32_t count, bool output, std::size_t piece, const Cancel* cancel) {
  Loader loader(device_, cancel);
  RETURN_IF_ERROR(loader.open(piece));
  first_ = first;
  layers_.resize(count);
  for (uint32_t l = 0; l < count; ++l) {
    Status s = loader.layer(weights.layers[first + l], residual_scale, &layers_[l]);
    if (s.code() == Code::no_memory && l > 1) {
      layers_.resize(count = l - 1);
      output = false;
    } else if (!s.ok()) {
      return s;
    }
  }
  if (output) {
    const Loader::MatrixCopy its[] = {{&weights.output, &output_}};
    Status s = loader.matrices(its, &output_memory_);
    if (s.ok()) s = loader.norm(weights.output_norm, &output_norm_);
    if (s.code() == Code::no_memory) {
      output_ = {}, output_memory_ = {};
    } else if (!s.ok()) {
      return s;
    }
  }
  bytes_ = device_->used() - Device::allocated_size(piece);
  return {};
}

// What GPUs compute of a model's features; Code::unsupported names another one.
static Status check_features(const ModelConfig& config) {
  const char* feature = nullptr;
  for (const LayerConfig& c : config.layer_configs) {
    if (c.mixer != MixerKind::attention) feature = "a mixer that is not attention";
    if (c.qk_norm == QkNorm::projection && c.qk_norm_after_rope)
      feature = "its norm of queries and keys";
    if (c.sparsity > 0) feature = "sparse networks";
    // The CPU computes experts, and nothing else of a layer.
    if (c.has_experts() && (c.has_dense() || c.norms != NormPlacement::before))
      feature = "its wiring of experts";
    if (c.has_experts() && (config.norm != NormKind::rms || config.residual_scale != 1))
      feature = "its norms or scales of experts";
    if (c.norm_after() && config.norm != NormKind::rms) feature = "layer norms of outputs";
  }
  if (config.streams > 1) feature = "several streams of a token";
  if (config.recurrent_layers > 0) feature = "recurrent layers";
  if (!feature) return {};
  return Status::error(Code::unsupported, "GPUs do not compute %s of %s models yet", feature,
                       config.architecture->name);
}

Status DeviceWeights::upload(const Weights& weights, const ModelConfig& config,
                             const DeviceOptions& options, const Cancel* cancel,
                             std::vector<DeviceWeights>* out) {
  std::vector<int> indexes;
  RETURN_IF_ERROR(Device::find(options.name, &indexes));
  RETURN_IF_ERROR(check_features(config));
  const Sizes sizes(weights, config, *cuda_kernels());
  std::vector<std::shared_ptr<Device>> devices;
  const bool choose = options.name == "auto", optional = choose || options.name == "cuda:all";
  Status missing;
  for (const int index : indexes) {
    std::shared_ptr<Device> device;
    Status s = Device::open(
        index, options.budget,
        static_cast<uint32_t>(std::count(indexes.begin(), indexes.end(), index)), &device);
    if (!s.ok() && !optional) return s;
    if (!s.ok()) {
      missing = std::move(s);
      continue;
    }
    devices.push_back(std::move(device));
  }
  if (devices.empty()) return missing;
  // the one with the most room, where that is enough: attention of sessions needs memory too
  if (choose) {
    const auto by_room = [&](const auto& a, const auto& b) {
      return sizes.room(*a) < sizes.room(*b);
    };
    const std::shared_ptr<Device> largest =
        *std::max_element(devices.begin(), devices.end(), by_room);
    if (const uint64_t room = sizes.room(*largest);
        split_layers(sizes.layers, sizes.output, {&room, 1}).output)
      devices = {largest};
  }

  missing =
      Status::error(Code::no_memory,
                    "%s has %" PRIu64 " bytes for the model: one layer's weights take %" PRIu64
                    " and the workspace %" PRIu64,
                    devices[0]->name().c_str(), devices[0]->left(), sizes.layers[0], sizes.margin);
  std::vector<DeviceWeights> result;
  uint32_t next = 0;
  for (std::size_t d = 0; d < devices.size() && next < config.depth(); ++d) {
    std::vector<uint64_t> rooms;
    // A layer that attends the keys and values of an earlier one is on the same device.
    const std::size_t end_device = config.shares_kv() ? d + 1 : devices.size();
    for (std::size_t other = d; other < end_device; ++other)
      rooms.push_back(sizes.room(*devices[other]));
    const LayerSplit split =
        split_layers(std::span(sizes.layers).subspan(next), sizes.output, rooms);
    if (split.layers[0] == 0) continue;
    DeviceWeights part;
    part.device_ = devices[d];
    Status s =
        part.load(weights, config.residual_scale, next, split.layers[0],
                  split.output && next + split.layers[0] == config.depth(), sizes.piece, cancel);
    if (s.code() == Code::no_memory) {  // not even the first ones: the others may have room
      missing = std::move(s);
      continue;
    }
    if (!s.ok()) return s;
    part.device_->reserve_host(
        std::clamp<uint64_t>(part.bytes_ / staged_share, min_staged, max_staged));
    next = part.end_layer();
    result.push_back(std::move(part));
    if (config.shares_kv()) break;
  }
  if (result.empty()) return missing;
  *out = std::move(result);
  return {};
}

}  // namespace kvasir
