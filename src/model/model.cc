#include "model/model.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"

namespace kvasir {
namespace {

// Four 64-bit hashes chained over the metadata, the tensor table, the size and three 4 KiB blocks of every tensor: other
// weights of the same shapes differ in almost every block, so a few of each tell them apart without reading gigabytes.
Fingerprint fingerprint_of(const Gguf& gguf, const std::byte* file, uint64_t size) {
  constexpr uint64_t sample = 4096;
  Fingerprint out;
  for (uint64_t part = 0; part < 4; ++part) {
    uint64_t hash = checksum(file, gguf.data_offset(), part);
    hash = checksum(&size, sizeof size, hash);
    for (const GgufTensor& t : gguf.tensors()) {
      const uint64_t n = std::min(sample, t.bytes);
      for (uint64_t at : {uint64_t{0}, (t.bytes - n) / 2, t.bytes - n}) hash = checksum(file + t.offset + at, n, hash);
    }
    std::memcpy(out.data() + part * 8, &hash, 8);
  }
  return out;
}

Status open_cancelled() { return Status::error(Code::cancelled, "cancelled; the model was not opened"); }

Status with_path(const std::string& path, const Status& s) {
  return Status::error(s.code(), "%s: %s", path.c_str(), s.message()).with_errno(s.sys_errno()).with_offset(s.offset());
}

}  // namespace

StoreShape Model::store_shape() const {
  return {config_.layers, config_.kv_heads, PageShape::of(config_.head_dim)};
}

std::string Model::device_names() const {
  std::string names;
  for (const DeviceWeights& weights : device_weights_) names += (names.empty() ? "" : ",") + weights.device()->name();
  return names.empty() ? "cpu" : names;
}

Status Model::read(const std::string& chat_format, const Cancel* cancel) {
  const std::span<const std::byte> bytes(mapping_.data(), mapping_.size());
  if (Status s = Gguf::parse(bytes, &gguf_); !s.ok()) return s;
  if (Status s = ModelConfig::read(gguf_, &config_); !s.ok()) return s;
  if (is_cancelled(cancel)) return open_cancelled();
  if (Status s = Tokenizer::load(gguf_, &tokenizer_); !s.ok()) return s;
  if (is_cancelled(cancel)) return open_cancelled();
  const GgufTensor* embedding = gguf_.find_tensor("token_embd.weight");
  if (!embedding) return Status::error(Code::corrupt, "the model has no tensor 'token_embd.weight': it holds no weights");
  config_.vocabulary = tokenizer_->size();
  Array<float> divisors;
  if (Status s = bind_weights(gguf_, mapping_.data(), config_, &weights_, &divisors); !s.ok()) return s;
  rope_ = Rope(config_.rope, divisors);
  if (chat_format.empty()) {
    chat_ = recognise_chat_format(gguf_, *tokenizer_);
  } else if (const auto chosen = chat_format_by_name(chat_format)) {
    chat_ = *chosen;
    chat_is_chosen_ = true;
  } else {
    return Status::error(Code::bad_argument, "chat format '%.40s' is not known", chat_format.c_str());
  }
  fingerprint_ = fingerprint_of(gguf_, mapping_.data(), mapping_.size());
  return {};
}

Status Model::open(const std::string& path, const std::string& chat_format, std::shared_ptr<const Model>* out,
                   const DeviceOptions& device, const Cancel* cancel) {
  auto model = std::make_shared<Model>();
  model->path_ = path;
  os::File file;
  if (Status s = os::File::open_read(path, &file); !s.ok()) return s;
  if (Status s = os::Mapping::map(file, &model->mapping_); !s.ok()) return s;
  if (Status s = model->read(chat_format, cancel); !s.ok()) return with_path(path, s);
  if (device.name != "cpu") {
    const Status s = DeviceWeights::upload(model->weights_, model->config_, model->rope_.dim(), device, cancel,
                                           &model->device_weights_);
    if (!s.ok() && (device.name != "auto" || s.code() == Code::cancelled)) return with_path(path, s);
    model->why_no_device_ = s.message();
  }
  *out = std::move(model);
  return {};
}

}  // namespace kvasir
