#include "model/device_weights.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "model/device_sizes.h"
#include "model/model.h"

namespace kvasir {

// Of host memory that is kept for what goes to a device (Device::reserve_host): as a share of the
// weights, and from and up to so many bytes.
constexpr uint64_t staged_share = 128, min_staged = uint64_t{4} << 20,
                   max_staged = uint64_t{64} << 20;

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
    RETURN_IF_ERROR(memory->allocate(device_, size, what));
    std::byte* at = memory->get();
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
    const auto together =
        static_cast<uint32_t>(std::min<std::size_t>(w.rows, piece_ / w.row_bytes));
    for (uint32_t row = 0, n; row < w.rows; row += n) {
      if (is_cancelled(cancel_))
        return Status::error(Code::cancelled, "cancelled; the model was not opened");
      n = std::min(together, w.rows - row);
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
    RETURN_IF_ERROR(to->memory.allocate(device_, routed_room(ops_, from, count), what));
    std::byte* at = to->memory.get();
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
  Status failed(int error) const { return device_->status(error, what); }

  std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const Cancel* cancel_;
  std::size_t piece_ = 0;
  PinnedBuffer<std::byte> host_;
  DeviceBuffer<std::byte> staging_;
  DeviceStream* stream_ = nullptr;
};

// Where others have taken some of what was free, fewer layers: one of them makes room for the
// workspace.
Status DeviceWeights::load(const Weights& weights, const ModelConfig& config,
                           const Contents& contents, std::size_t piece, const Cancel* cancel) {
  Loader loader(device_, cancel);
  RETURN_IF_ERROR(loader.open(piece));
  uint32_t count = contents.count;
  bool output = contents.output;
  first_ = contents.first;
  layers_.resize(count);
  for (uint32_t l = 0; l < count; ++l) {
    Status s =
        loader.layer(weights.layers[first_ + l], config, config.layer(first_ + l), &layers_[l]);
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
  RETURN_IF_ERROR(load_experts(weights, count < contents.count ? 0 : contents.experts, &loader));
  bytes_ = device_->used() - Device::allocated_size(piece);
  return {};
}

// The experts of the first `count` layers. Where there is less memory than planned, those of fewer
// layers: the last ones make room for the workspace.
Status DeviceWeights::load_experts(const Weights& weights, uint32_t count, Loader* loader) {
  uint32_t last = first_;  // layer with experts
  for (experts_end_ = first_; experts_end_ < first_ + count; ++experts_end_) {
    const ExpertWeights& from = weights.layers[experts_end_].experts;
    if (!from.up.first.data) continue;
    Experts::Routed* const to = &layers_[experts_end_ - first_].experts.routed;
    Status s = loader->experts(from, from.router.w.rows, to);
    if (s.code() == Code::no_memory) {
      *to = {}, layers_[last - first_].experts.routed = {};
      experts_end_ = last;
      return {};
    }
    RETURN_IF_ERROR(std::move(s));
    last = experts_end_;
  }
  return {};
}

uint32_t DeviceWeights::expert_layers() const {
  const auto are_here = [](const Layer& layer) { return layer.experts.are_here(); };
  return static_cast<uint32_t>(std::count_if(layers_.begin(), layers_.end(), are_here));
}

// What GPUs compute of a model's features; Code::unsupported names another one.
static Status check_features(const ModelConfig& config) {
  const char* feature = nullptr;
  for (const LayerConfig& c : config.layer_configs) {
    if (c.is_latent()) feature = "latent attention";
    if (c.is_recurrent() && (c.norm_after() || c.is_parallel()))
      feature = "its norms of recurrent layers";
    if (c.qk_norm == QkNorm::projection && c.qk_norm_after_rope)
      feature = "its norm of queries and keys";
    if (c.sparsity > 0) feature = "sparse networks";
    const bool has_experts = c.has_experts(), has_both = has_experts && c.has_dense();
    if ((has_both && (c.experts.shared_width > 0 || !c.norm_after())) ||
        (has_experts && (!c.norm_before() || c.is_parallel())))
      feature = "its wiring of experts";
    if (has_experts && config.norm != NormKind::rms) feature = "layer norms of experts";
    if (c.norm_after() && config.norm != NormKind::rms) feature = "layer norms of outputs";
  }
  if (config.streams > 1) feature = "several streams of a token";
  if (config.recurrent.joint) feature = "a joint matrix of recurrent inputs";
  if (config.recurrent_layers > 0 && config.recurrent.key_dim > max_device_keys)
    feature = "states of more than 256 rows";
  if (!feature) return {};
  return Status::error(Code::unsupported,
                       "GPUs do not compute %s of %s models yet: use the device 'auto' or 'cpu'",
                       feature, config.architecture->name);
}

Status DeviceWeights::upload(const Weights& weights, const ModelConfig& config,
                             const DeviceOptions& options, const Cancel* cancel,
                             std::vector<DeviceWeights>* out) {
  std::vector<int> indexes;
  RETURN_IF_ERROR(Device::find(options.name, &indexes));
  RETURN_IF_ERROR(check_features(config));
  const DeviceSizes sizes(weights, config, *cuda_kernels());
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
    if (const uint64_t room = sizes.room(*largest); sizes.plan(0, {&room, 1}).complete)
      devices = {largest};
  }

  missing = Status::error(
      Code::no_memory,
      "%s has %" PRIu64 " bytes for the model: one layer's weights take %" PRIu64
      " and the workspace %" PRIu64,
      devices[0]->name().c_str(), devices[0]->left(), sizes.layers[0].base, sizes.margin);
  std::vector<DeviceWeights> result;
  uint32_t next = 0;
  for (std::size_t d = 0; d < devices.size() && next < config.depth(); ++d) {
    std::vector<uint64_t> rooms;
    // A layer that attends the keys and values of an earlier one is on the same device.
    const std::size_t end_device = config.shares_kv() ? d + 1 : devices.size();
    for (std::size_t other = d; other < end_device; ++other)
      rooms.push_back(sizes.room(*devices[other]));
    const DevicePlan plan = sizes.plan(next, rooms);
    Contents contents{
        .first = next, .count = plan.parts[0].layers, .experts = plan.parts[0].experts};
    if (contents.count == 0) continue;
    contents.output = plan.output && next + contents.count == config.depth();
    DeviceWeights part;
    part.device_ = devices[d];
    Status s = part.load(weights, config, contents, sizes.piece, cancel);
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
