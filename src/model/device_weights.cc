#include "model/device_weights.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "model/device_loader.h"
#include "model/device_sizes.h"
#include "model/gpu_workspace.h"
#include "model/model.h"
#include "model/mtp.h"

namespace kvasir {

// Of host memory that is kept for what goes to a device (Device::reserve_host): as a share of the
// weights, and from and up to so many bytes.
constexpr uint64_t staged_share = 128, min_staged = uint64_t{4} << 20,
                   max_staged = uint64_t{64} << 20;

// Of a session's prefill in large steps. Three layers' keys and values go to the host, with their
// probed queries (LayerProbe::gpu_tokens), in the place of a first step's inputs. Their pages come
// back. Where one GPU has the whole model, the inputs of the next two steps come ahead.
static uint64_t large_step_rows(const ModelConfig& config, uint32_t step, bool whole) {
  constexpr uint64_t layers = 3, probed = 512, most = uint64_t{256} << 20;
  if (step < large_step) return 0;
  const Widths w = widths_of(config);
  const uint64_t inputs = step * (w.width + 2 * w.angles),
                 rows = layers * (step * (2 * w.kv + config.heads) + probed * w.q),
                 floats = std::max(rows, inputs) + (whole ? 2 * inputs : 0);
  return std::min(floats * sizeof(float) + layers * step * 4 * w.kv, most);
}

// Where others have taken some of what was free, fewer layers: one of them makes room for the
// workspace.
Status DeviceWeights::load(const Weights& weights, const ModelConfig& config,
                           const Contents& contents, std::size_t piece, const Cancel* cancel) {
  DeviceLoader loader(device_, cancel);
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
    const DeviceLoader::MatrixCopy its[] = {{&weights.output, &output_}};
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
Status DeviceWeights::load_experts(const Weights& weights, uint32_t count, DeviceLoader* loader) {
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

bool DeviceWeights::some_come(std::span<const DeviceWeights> devices, uint32_t depth) {
  return devices.back().end_layer() < depth ||
         std::any_of(devices.begin(), devices.end(),
                     [](const DeviceWeights& d) { return d.experts_end() < d.end_layer(); });
}

// What a device keeps free for a part of a model that it gets later, besides the sessions' margin.
static uint64_t part_bytes(const DeviceSizes& part, const Linear& inputs, bool shares_output,
                           const Device& device, uint32_t step) {
  uint64_t bytes = part.margin_on(device) + part.experts_margin + (shares_output ? 0 : part.output);
  // The matrix, and a step's inputs of it.
  bytes += Device::allocated_size(matrix_room(*cuda_kernels(), inputs.w)) +
           Device::allocated_size(joined_bytes(inputs.w.cols, step));
  for (const LayerSizes& l : part.layers) bytes += l.base + l.experts + l.attention;
  return bytes;
}

// The same memory as that of the whole model, where it is the same matrix.
Status DeviceWeights::upload_part(const Model& whole, const Model& model, const Linear& inputs,
                                  const Cancel* cancel, std::vector<DeviceWeights>* out) {
  const Weights& weights = model.weights();
  const ModelConfig& config = model.config();
  const std::vector<DeviceWeights>& devices = whole.device_weights();
  if (devices.empty() || !devices.back().has_output())
    return Status::error(Code::unsupported, "no GPU has the output");
  const DeviceWeights& last = devices.back();
  const DeviceKernels& kernels = last.device_->kernels();
  const bool shares = weights.output.w.data == whole.weights().output.w.data;
  const DeviceSizes sizes(weights, config, kernels);
  DeviceSizes whole_sizes(whole.weights(), whole.config(), kernels);
  whole_sizes.add_stream_steps({&last.device_, 1});
  uint64_t needed = part_bytes(sizes, inputs, shares, *last.device_, last.usual_step_) +
                    whole_sizes.margin_on(*last.device_) + whole_sizes.experts_margin;
  if (some_come(devices, whole.config().depth())) needed += whole_sizes.stream_margin;
  if (needed > last.device_->left())
    return Status::error(Code::no_memory, "%s has too little memory for the MTP layer",
                         last.device_->name().c_str());
  DeviceWeights part;
  part.device_ = last.device_, part.usual_step_ = last.usual_step_;
  Contents contents{.count = config.depth(), .experts = config.depth(), .output = !shares};
  RETURN_IF_ERROR(part.load(weights, config, contents, sizes.piece, cancel));
  DeviceLoader loader(last.device_, cancel);
  RETURN_IF_ERROR(loader.open(std::max(sizes.piece, inputs.w.row_bytes)));
  const DeviceLoader::MatrixCopy its[] = {{&inputs, &part.inputs_}};
  RETURN_IF_ERROR(loader.matrices(its, &part.inputs_memory_));
  if (shares) {
    part.output_.w = last.output_.w;
    RETURN_IF_ERROR(loader.vector(weights.output.bias, &part.output_.bias));
    RETURN_IF_ERROR(loader.norm(weights.output_norm, &part.output_norm_));
  }
  const bool complete = part.layers_.size() == config.depth() && part.has_output() &&
                        part.experts_end_ == part.end_layer();
  if (!complete)
    return Status::error(Code::no_memory, "%s has too little memory for the MTP layer",
                         last.device_->name().c_str());
  out->push_back(std::move(part));
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

// Room for the MTP layer next to the output, unless the output would then have none.
static void plan_drafts(const Model& model, const std::vector<std::shared_ptr<Device>>& devices,
                        DeviceSizes* sizes) {
  MtpLayer mtp;
  if (!MtpLayer::bind(model, &mtp).ok()) return;  // a session that asks for it says why
  const Weights& weights = mtp.layer.weights();
  const DeviceSizes part(weights, mtp.layer.config(), *cuda_kernels());
  std::vector<uint64_t> rooms;
  for (const auto& device : devices) rooms.push_back(sizes->room(*device));
  DeviceSizes with = *sizes;
  with.output += part_bytes(part, mtp.inputs.projection,
                            weights.output.w.data == model.weights().output.w.data, *devices.back(),
                            streamed_step_of(*devices.back()));
  if (with.plan(0, rooms).output || !sizes->plan(0, rooms).output) sizes->output = with.output;
}

Status DeviceWeights::upload(const Model& model, const DeviceOptions& options, const Cancel* cancel,
                             std::vector<DeviceWeights>* out) {
  const Weights& weights = model.weights();
  const ModelConfig& config = model.config();
  std::vector<int> indexes;
  RETURN_IF_ERROR(Device::find(options.name, &indexes));
  RETURN_IF_ERROR(check_features(config));
  DeviceSizes sizes(weights, config, *cuda_kernels());
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
  sizes.add_stream_steps(devices);
  if (options.drafts) plan_drafts(model, devices, &sizes);
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

  missing =
      Status::error(Code::no_memory,
                    "%s has %" PRIu64 " bytes for the model: one layer's weights take %" PRIu64
                    " and the workspace %" PRIu64,
                    devices[0]->name().c_str(), devices[0]->left(), sizes.layers[0].base,
                    sizes.margin_on(*devices[0]));
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
    part.usual_step_ = plan.streams ? streamed_step_of(*devices[d]) : usual_step_of(*devices[d]);
    Status s = part.load(weights, config, contents, sizes.piece, cancel);
    if (s.code() == Code::no_memory) {  // not even the first ones: the others may have room
      missing = std::move(s);
      continue;
    }
    if (!s.ok()) return s;
    const uint64_t staged =
        std::clamp<uint64_t>(part.bytes_ / staged_share, min_staged, max_staged);
    const bool whole = next == 0 && part.end_layer() == config.depth() && contents.output;
    part.device_->reserve_host(
        staged, staged / 2 + large_step_rows(config, part.usual_step_, whole && !plan.streams));
    next = part.end_layer();
    result.push_back(std::move(part));
    if (config.shares_kv()) break;
  }
  if (result.empty()) return missing;
  *out = std::move(result);
  return {};
}

}  // namespace kvasir
