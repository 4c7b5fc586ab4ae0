#include "model/model.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/quoted.h"

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

Status Model::read(const std::string& chat_format, ModelUse use) {
  const std::span<const std::byte> bytes(mapping_.data(), mapping_.size());
  if (Status s = Gguf::parse(bytes, &gguf_); !s.ok()) return s;
  if (Status s = ModelConfig::read(gguf_, &config_); !s.ok()) return s;
  if (Status s = Tokenizer::load(gguf_, &tokenizer_); !s.ok()) return s;
  const GgufTensor* embedding = gguf_.find_tensor("token_embd.weight");
  if (!embedding) return Status::error(Code::corrupt, "the model has no tensor 'token_embd.weight': it holds no weights");
  config_.vocabulary = tokenizer_->size();
  Array<float> divisors;
  if (Status s = bind_weights(gguf_, mapping_.data(), config_, use, &weights_, &divisors); !s.ok())
    return s;
  rope_ = Rope(config_.rope, divisors);
  if (chat_format.empty()) {
    chat_ = recognise_chat_format(gguf_, *tokenizer_);
  } else if (const auto chosen = chat_format_by_name(chat_format)) {
    chat_ = *chosen;
  } else {
    return Status::error(Code::bad_argument, "chat format '%s' is not known",
                         Quoted(chat_format).text());
  }
  fingerprint_ = fingerprint_of(gguf_, mapping_.data(), mapping_.size());
  return {};
}

Status Model::map(const std::string& path, const std::string& chat_format, ModelUse use) {
  path_ = path;
  os::File file;
  if (Status s = os::File::open_read(path, &file); !s.ok()) return s;
  if (Status s = os::Mapping::map(file, &mapping_); !s.ok()) return s;
  if (Status s = read(chat_format, use); !s.ok()) return with_path(path, s);
  return {};
}

Status Model::inspect(const std::string& path, std::shared_ptr<const Model>* out) {
  auto model = std::make_shared<Model>();
  if (Status s = model->map(path, "", ModelUse::inspect); !s.ok()) return s;
  *out = std::move(model);
  return {};
}

Status Model::open(const std::string& path, const std::string& chat_format,
                   std::shared_ptr<const Model>* out, const DeviceOptions& device) {
  auto model = std::make_shared<Model>();
  if (Status s = model->map(path, chat_format, ModelUse::run); !s.ok()) return s;
  if (device.name != "cpu") {
    const Status s = DeviceWeights::upload(model->weights_, model->config_, model->rope_.dim(), device, &model->device_weights_);
    if (!s.ok() && device.name != "auto") return with_path(path, s);
    model->why_no_device_ = s.message();
  }
  *out = std::move(model);
  return {};
}

}  // namespace kvasir
