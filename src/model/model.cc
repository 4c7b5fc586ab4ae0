#include "model/model.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/quoted.h"

namespace kvasir {
namespace {

// Calls f(offset in the file, bytes) for the blocks of a tensor that are looked at when it is
// opened.
template <class F>
void for_samples(const GgufTensor& t, F f) {
  const uint64_t n = std::min<uint64_t>(4096, t.bytes);
  for (uint64_t at : {uint64_t{0}, (t.bytes - n) / 2, t.bytes - n}) f(t.offset + at, n);
}

// Four 64-bit hashes chained over the metadata, the tensor table, the size and three 4 KiB blocks
// of every tensor: other weights of the same shapes differ in almost every block, so a few of each
// tell them apart without reading gigabytes.
Fingerprint fingerprint_of(const Gguf& gguf, const std::byte* file, uint64_t size) {
  Fingerprint out;
  for (uint64_t part = 0; part < 4; ++part) {
    uint64_t hash = checksum(file, gguf.data_offset(), part);
    hash = checksum(&size, sizeof size, hash);
    for (const GgufTensor& t : gguf.tensors())
      for_samples(t, [&](uint64_t at, uint64_t n) { hash = checksum(file + at, n, hash); });
    std::memcpy(out.data() + part * 8, &hash, 8);
  }
  return out;
}

Status open_cancelled() {
  return Status::error(Code::cancelled, "cancelled; the model was not opened");
}

Status with_path(const std::string& path, const Status& s) {
  return Status::error(s.code(), "%s: %s", path.c_str(), s.message())
      .with_errno(s.sys_errno())
      .with_offset(s.offset());
}

}  // namespace

StoreShape Model::store_shape() const {
  const bool latent = config_.layer(0).is_latent();
  return {config_.layers, config_.kv_heads, PageShape::of(config_.head_dim, latent)};
}

StoreShape Model::windows_shape() const {
  const HeadShape& windows = config_.windows;
  if (windows.layers == 0) return {};
  return {windows.layers, windows.kv_heads, PageShape::of(windows.head_dim), config_.window};
}

std::string Model::device_names() const {
  std::string names;
  for (const DeviceWeights& weights : device_weights_)
    names += (names.empty() ? "" : ",") + weights.device()->name();
  return names.empty() ? "cpu" : names;
}

void Model::identify(format::Identity* out) const {
  out->model = fingerprint_;
  if (!full_hash_ || !full_hash_->get(&out->model_hash)) out->model_hash = {};
}

bool Model::is_of(const format::Identity& identity) const {
  HashBytes whole;
  const bool both = identity.model_hash != HashBytes{} && full_hash_ && full_hash_->get(&whole);
  return identity.model == fingerprint_ && (!both || identity.model_hash == whole);
}

// Writers of files put a layer's tensors one after the other.
void Model::place_layers() {
  std::vector<uint64_t> ends(config_.depth()), sums(config_.depth());
  layer_places_.assign(config_.depth(), {UINT64_MAX, 0});
  for (const GgufTensor& t : gguf_.tensors()) {
    const std::optional<uint32_t> layer = t.layer();
    if (!layer || *layer >= config_.depth()) continue;
    Place& place = layer_places_[*layer];
    place.begin = std::min(place.begin, t.offset);
    ends[*layer] = std::max(ends[*layer], t.offset + t.bytes), sums[*layer] += t.bytes;
  }
  for (uint32_t l = 0; l < config_.depth(); ++l) {
    const uint64_t bytes = sums[l] > 0 ? ends[l] - layer_places_[l].begin : 0;
    if (bytes < sums[l] + sums[l] / 8) layer_places_[l].bytes = bytes;
  }
}

void Model::read_ahead(uint32_t layer, uint32_t part, uint32_t parts) const {
  if (layer_bytes(layer) == 0) return;
  const Place& place = layer_places_[layer];
  const uint64_t size = place.bytes / parts + 1, at = std::min(place.bytes, part * size);
  const uint64_t bytes = std::min(size, place.bytes - at);
  if (bytes > 0) mapping_.advise(place.begin + at, bytes, os::Mapping::Advice::will_need);
}

// A download that reserved its file's size leaves zeros where nothing has come. No trained matrix
// of this size is zeros wherever it is sampled.
Status Model::refuse_holes() const {
  constexpr uint64_t large =
      uint64_t{1} << 18;  // smaller ones tell little of a download, and may be zeros by intent
  for (const GgufTensor& t : gguf_.tensors()) {
    if (t.bytes < large || t.n_dims < 2) continue;
    bool zero = true;
    for_samples(t, [&](uint64_t at, uint64_t size) {
      const std::byte* const begin = mapping_.data() + at;
      zero =
          zero && std::all_of(begin, begin + size, [](std::byte b) { return b == std::byte{0}; });
    });
    if (zero)
      return Status::error(Code::corrupt,
                           "tensor '%s' is all zeros where it was sampled: the file may not be "
                           "downloaded to its end",
                           Quoted(t.name).text())
          .with_offset(t.offset);
  }
  return {};
}

void Model::make_ropes(const RopeDivisors& divisors) {
  for (const RopeConfig& rope : config_.ropes) {
    const bool is_long = rope.scaling == RopeScaling::longrope;
    const std::span<const float> freqs =
        rope.divisors ? std::span<const float>(divisors.freqs) : std::span<const float>();
    ropes_.emplace_back(rope, is_long ? std::span<const float>(divisors.shorts) : freqs);
    if (!config_.has_longrope()) continue;
    long_context_ = rope.original_context;
    long_ropes_.emplace_back(rope, is_long ? std::span<const float>(divisors.longs) : freqs);
  }
}

Status Model::read_mtp(const Model& whole, ModelConfig config, MtpInputs* inputs) {
  config_ = std::move(config);
  weights_.embedding = whole.weights_.embedding;
  weights_.output.w = whole.weights_.output.w;
  weights_.output.bias = whole.weights_.output.bias;
  ropes_ = whole.ropes_;
  long_ropes_ = whole.long_ropes_;
  long_context_ = whole.long_context_;
  const Status s = bind_mtp(whole.gguf_, whole.mapping_.data(), config_, whole.config_.depth(),
                            &weights_, inputs);
  return s.ok() ? Status() : with_path(whole.path_, s);
}

std::string_view Model::architecture() const {
  return gguf_.get_string("general.architecture").value_or("");
}

Status Model::read_weights() {
  const GgufTensor* embedding = gguf_.find_tensor("token_embd.weight");
  if (!embedding)
    return Status::error(Code::corrupt,
                         "the model has no tensor 'token_embd.weight': it holds no weights");
  config_.vocabulary = tokenizer_->size();
  RopeDivisors divisors;
  RETURN_IF_ERROR(bind_weights(gguf_, mapping_.data(), config_, use_, &weights_, &divisors));
  make_ropes(divisors);
  place_layers();
  return refuse_holes();
}

Status Model::read_vocabulary() {
  config_.vocabulary = tokenizer_->size();
  constexpr std::size_t max_name = 255;  // bytes, as ModelConfig::read keeps
  config_.name = gguf_.get_string("general.name").value_or("").substr(0, max_name);
  return {};
}

Status Model::read(const std::string& chat_format, const Cancel* cancel) {
  const std::span<const std::byte> bytes(mapping_.data(), mapping_.size());
  RETURN_IF_ERROR(Gguf::parse(bytes, &gguf_));
  // Samples of tensors are a few KiB each: the system would read megabytes around them.
  mapping_.advise(gguf_.data_offset(), mapping_.size(), os::Mapping::Advice::random);
  if (use_ == ModelUse::inspect && gguf_.tensors().empty()) use_ = ModelUse::vocabulary;
  const bool only_vocabulary = use_ == ModelUse::vocabulary;
  if (!only_vocabulary) RETURN_IF_ERROR(ModelConfig::read(gguf_, &config_));
  if (is_cancelled(cancel)) return open_cancelled();
  RETURN_IF_ERROR(Tokenizer::load(gguf_, &tokenizer_));
  if (is_cancelled(cancel)) return open_cancelled();
  RETURN_IF_ERROR(only_vocabulary ? read_vocabulary() : read_weights());
  if (chat_format.empty()) {
    chat_ = Chat(recognise_chat_format(gguf_, *tokenizer_));
  } else {
    RETURN_IF_ERROR(Chat::parse(chat_format, &chat_));
    chat_is_chosen_ = true;
  }
  fingerprint_ = fingerprint_of(gguf_, mapping_.data(), mapping_.size());
  mapping_.advise(gguf_.data_offset(), mapping_.size(), os::Mapping::Advice::normal);
  return {};
}

Status Model::map(const std::string& path, const std::string& chat_format,
                  const std::string& hash_folder, const Cancel* cancel) {
  path_ = path;
  os::File file;
  RETURN_IF_ERROR(os::File::open_read(path, &file));
  RETURN_IF_ERROR(os::Mapping::map(file, &mapping_));
  if (Status s = read(chat_format, cancel); !s.ok()) return with_path(path, s);
  return use_ == ModelUse::run ? FullHash::open(std::move(file), hash_folder, &full_hash_)
                               : Status();
}

Status Model::inspect(const std::string& path, std::shared_ptr<const Model>* out) {
  auto model = std::make_shared<Model>();
  model->use_ = ModelUse::inspect;
  RETURN_IF_ERROR(model->map(path, "", "", nullptr));
  *out = std::move(model);
  return {};
}

Status Model::open_vocabulary(const std::string& path, const std::string& chat_format,
                              std::shared_ptr<const Model>* out) {
  auto model = std::make_shared<Model>();
  model->use_ = ModelUse::vocabulary;
  RETURN_IF_ERROR(model->map(path, chat_format, "", nullptr));
  *out = std::move(model);
  return {};
}

Status Model::open(const std::string& path, const std::string& chat_format,
                   std::shared_ptr<const Model>* out, const DeviceOptions& device,
                   const std::string& hash_folder, const Cancel* cancel) {
  auto model = std::make_shared<Model>();
  RETURN_IF_ERROR(model->map(path, chat_format, hash_folder, cancel));
  if (device.name != "cpu") {
    const Status s = DeviceWeights::upload(*model, device, cancel, &model->device_weights_);
    if (!s.ok() && (device.name != "auto" || s.code() == Code::cancelled))
      return with_path(path, s);
    model->why_no_device_ = s.message();
  }
  if (!hash_folder.empty()) model->full_hash_->begin();
  *out = std::move(model);
  return {};
}

}  // namespace kvasir
