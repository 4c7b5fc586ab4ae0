// Parsing of GGUF. The file is:
//
//   header    magic "GGUF", u32 version, u64 tensor count, u64 key count
//   keys      each: string name, u32 type, value          string = u64 length, bytes
//   tensors   each: string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset from the data
//   padding   to general.alignment (32 when not given)
//   data      each tensor at a multiple of the alignment
//
// Numbers are little-endian and unaligned. v2 and v3 share this layout (v3 only added big-endian
// files).
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "base/checked.h"
#include "base/quoted.h"
#include "gguf/gguf.h"
#include "gguf/limits.h"
#include "gguf/wire.h"

namespace kvasir {
namespace {

using ull = unsigned long long;  // the type of %llu

constexpr uint64_t kMaxKeyBytes = 65535;      // the format's own limit
constexpr uint64_t kMaxTensorNameBytes = 64;  // the format's own limit
// A name of one byte, a value of one byte.
constexpr uint64_t kMinKeyBytes = 8 + 1 + 4 + 1;
constexpr uint64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;  // a name of one byte, one dimension
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMinAlignment = 8;
constexpr uint64_t kMaxAlignment = 65536;

// Indices of `items` sorted by name, equal names in file order.
template <class T>
std::vector<uint32_t> order_by_name(const std::vector<T>& items) {
  std::vector<uint32_t> order(items.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const int c = name_of(items[a]).compare(name_of(items[b]));
    return c != 0 ? c < 0 : a < b;
  });
  return order;
}

// The second of two items of the same name, or null when all names differ.
template <class T>
const T* find_duplicate(const std::vector<T>& items, const std::vector<uint32_t>& order) {
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (name_of(items[order[i - 1]]) == name_of(items[order[i]])) return &items[order[i]];
  }
  return nullptr;
}

Status refuse_tensor_type(std::string_view tensor, uint32_t type, uint64_t at) {
  char known[256] = "";
  std::size_t length = 0;
  for (uint32_t id = 0; tensor_type_name(id); ++id) {
    const TensorTypeInfo* info = tensor_type_info(static_cast<TensorType>(id));
    if (!info || length + std::strlen(info->name) + 2 > sizeof known) continue;
    known[length++] = ' ';
    std::memcpy(known + length, info->name, std::strlen(info->name) + 1);
    length += std::strlen(info->name);
  }
  char number[16];
  const char* name = tensor_type_name(type);
  if (!name) {
    std::snprintf(number, sizeof number, "type %u", type);
    name = number;
  }
  return Status::error(Code::unsupported,
                       "tensor '%s' is %s, which Kvasir cannot compute with: use one of%s",
                       Quoted(tensor).text(), name, known)
      .with_offset(at);
}

}  // namespace

// One pass over the file that fills a new Gguf. Every read goes through take(), which checks the
// end of the file.
class GgufParser {
 public:
  explicit GgufParser(std::span<const std::byte> file) : file_(file) {}

  Status parse(Gguf* out) {
    for (auto step : {&GgufParser::read_header, &GgufParser::read_keys, &GgufParser::read_alignment,
                      &GgufParser::read_tensors, &GgufParser::place_tensors}) {
      Status status = (this->*step)();
      if (!status.ok()) return status;
    }
    *out = std::move(result_);
    return {};
  }

 private:
  uint64_t remaining() const { return file_.size() - at_; }

  // The next `size` bytes, or null when the file ends before.
  const std::byte* take(uint64_t size) {
    if (size > remaining()) return nullptr;
    const std::byte* p = file_.data() + at_;
    at_ += size;
    return p;
  }

  template <class T>
  [[nodiscard]] bool read(T* out) {
    const std::byte* p = take(sizeof(T));
    if (p) *out = load<T>(p);
    return p != nullptr;
  }

  [[nodiscard]] bool read_text(std::string_view* out) {
    uint64_t size;
    if (!read(&size)) return false;
    const std::byte* p = take(size);
    if (p) *out = as_text(p, size);
    return p != nullptr;
  }

  Status read_header();
  Status read_keys();
  Status read_key();
  Status read_value(std::string_view key, GgufType type, GgufValue* out);
  Status read_array(std::string_view key, GgufValue* out);
  Status read_alignment();
  Status read_tensors();
  Status read_tensor();
  Status measure_tensor(uint64_t at, GgufTensor* tensor) const;
  Status place_tensors();
  Status refuse_overlap() const;
  Status check_metadata_size() const;

  std::span<const std::byte> file_;
  uint64_t at_ = 0;
  uint64_t key_count_ = 0;
  uint64_t tensor_count_ = 0;
  uint64_t alignment_ = kDefaultAlignment;
  uint64_t key_bytes_ = 0;           // of the names read so far
  std::vector<uint64_t> tensor_at_;  // offset of each tensor's entry, for messages
  Gguf result_;
};

Status GgufParser::read_header() {
  if (file_.size() < 4 || std::memcmp(file_.data(), "GGUF", 4) != 0) {
    return Status::error(Code::unsupported, "not a GGUF file: it does not begin with 'GGUF'")
        .with_offset(0);
  }
  at_ = 4;
  if (!read(&result_.version_) || !read(&tensor_count_) || !read(&key_count_)) {
    return Status::error(Code::corrupt, "the file ends within the GGUF header").with_offset(at_);
  }
  const uint32_t version = result_.version_;
  if (version != 0 && (version & 0xffff) == 0) {
    return Status::error(Code::unsupported,
                         "the file is big-endian GGUF: only little-endian files can be read")
        .with_offset(4);
  }
  if (version != 2 && version != 3) {
    return Status::error(Code::unsupported,
                         "the file is GGUF version %u: only versions 2 and 3 can be read", version)
        .with_offset(4);
  }
  if (key_count_ > remaining() / kMinKeyBytes || tensor_count_ > remaining() / kMinTensorBytes) {
    return Status::error(
               Code::corrupt,
               "the header counts %llu keys and %llu tensors, more than the file can hold",
               ull(key_count_), ull(tensor_count_))
        .with_offset(8);
  }
  if (key_count_ > gguf_limits::keys || tensor_count_ > gguf_limits::tensors) {
    return Status::error(
               Code::limit,
               "the header counts %llu keys and %llu tensors: at most %llu and %llu can be read",
               ull(key_count_), ull(tensor_count_), ull(gguf_limits::keys),
               ull(gguf_limits::tensors))
        .with_offset(8);
  }
  return {};
}

// Limits the part of the file that is read, and hashed for the fingerprint.
Status GgufParser::check_metadata_size() const {
  if (at_ <= gguf_limits::metadata_bytes) return {};
  return Status::error(Code::limit, "the metadata take more than %llu bytes",
                       ull(gguf_limits::metadata_bytes))
      .with_offset(at_);
}

Status GgufParser::read_keys() {
  result_.entries_.reserve(key_count_);
  for (uint64_t i = 0; i < key_count_; ++i) {
    Status status = read_key();
    if (!status.ok()) return status;
  }
  result_.key_order_ = order_by_name(result_.entries_);
  if (const Gguf::Entry* twice = find_duplicate(result_.entries_, result_.key_order_)) {
    return Status::error(Code::corrupt, "key '%s' occurs twice", Quoted(twice->first).text())
        .with_offset(static_cast<uint64_t>(twice->second.bytes.data() - file_.data()));
  }
  return {};
}

Status GgufParser::read_key() {
  const uint64_t start = at_;
  std::string_view key;
  uint32_t type;
  if (!read_text(&key) || !read(&type)) {
    return Status::error(Code::corrupt, "the file ends within key %zu of %llu",
                         result_.entries_.size(), ull(key_count_))
        .with_offset(start);
  }
  if (key.empty() || key.size() > kMaxKeyBytes) {
    return Status::error(Code::corrupt,
                         "the name of key %zu is %zu bytes long: 1 to %llu are allowed",
                         result_.entries_.size(), key.size(), ull(kMaxKeyBytes))
        .with_offset(start);
  }
  GgufValue value{};
  key_bytes_ += key.size();
  if (key_bytes_ > gguf_limits::key_bytes) {
    return Status::error(Code::limit, "the names of the keys take more than %llu bytes",
                         ull(gguf_limits::key_bytes))
        .with_offset(start);
  }
  Status status = read_value(key, static_cast<GgufType>(type), &value);
  if (status.ok()) status = check_metadata_size();
  if (status.ok()) result_.entries_.emplace_back(key, value);
  return status;
}

Status GgufParser::read_value(std::string_view key, GgufType type, GgufValue* out) {
  const uint64_t start = at_;
  const auto cut = [&] {
    return Status::error(Code::corrupt, "the file ends within the value of key '%s'",
                         Quoted(key).text())
        .with_offset(start);
  };
  out->type = out->element_type = type;
  out->count = 1;
  if (type == GgufType::array) return read_array(key, out);
  if (type == GgufType::string) {
    std::string_view text;
    if (!read_text(&text)) return cut();
    out->bytes = std::as_bytes(std::span<const char>(text));
    return {};
  }
  const uint64_t size = scalar_bytes(type);
  if (size == 0) {
    return Status::error(Code::corrupt, "key '%s' has the unknown type %u", Quoted(key).text(),
                         static_cast<unsigned>(type))
        .with_offset(start);
  }
  const std::byte* p = take(size);
  if (!p) return cut();
  if (type == GgufType::boolean && load<uint8_t>(p) > 1) {
    return Status::error(Code::corrupt, "key '%s' is a boolean of value %u", Quoted(key).text(),
                         static_cast<unsigned>(load<uint8_t>(p)))
        .with_offset(start);
  }
  out->bytes = {p, static_cast<std::size_t>(size)};
  return {};
}

Status GgufParser::read_array(std::string_view key, GgufValue* out) {
  const uint64_t start = at_;
  const auto refuse = [&](const char* why) {
    return Status::error(Code::corrupt, "key '%s': %s", Quoted(key).text(), why).with_offset(start);
  };
  uint32_t element;
  if (!read(&element) || !read(&out->count))
    return refuse("the file ends within the head of an array");
  out->element_type = static_cast<GgufType>(element);
  if (out->element_type == GgufType::array) return refuse("an array of arrays is not allowed");
  const bool strings = out->element_type == GgufType::string;
  // The minimum size of an element: a string has at least its length.
  const uint64_t size = strings ? 8 : scalar_bytes(out->element_type);
  if (size == 0) return refuse("an array of an unknown element type");
  if (out->count > remaining() / size) return refuse("the array is longer than the file");
  if (out->count > gguf_limits::array_elements) {
    return Status::error(Code::limit, "key '%s' is an array of %llu: at most %llu can be read",
                         Quoted(key).text(), ull(out->count), ull(gguf_limits::array_elements))
        .with_offset(start);
  }

  const uint64_t begin = at_;
  if (strings) {
    std::string_view text;
    for (uint64_t i = 0; i < out->count; ++i) {
      if (!read_text(&text)) return refuse("a string of the array is longer than the file");
      if (Status status = check_metadata_size(); !status.ok()) return status;
    }
  } else {
    at_ += size * out->count;  // fits: checked against the remaining bytes above
  }
  out->bytes = file_.subspan(begin, at_ - begin);
  if (out->element_type == GgufType::boolean &&
      std::any_of(out->bytes.begin(), out->bytes.end(),
                  [](std::byte b) { return b > std::byte{1}; })) {
    return refuse("a boolean of the array is neither 0 nor 1");
  }
  return {};
}

Status GgufParser::read_alignment() {
  const GgufValue* value = result_.find("general.alignment");
  if (!value) return {};
  const std::optional<uint64_t> alignment = result_.get_uint("general.alignment");
  if (!alignment || *alignment < kMinAlignment || *alignment > kMaxAlignment ||
      !std::has_single_bit(*alignment)) {
    return Status::error(Code::corrupt,
                         "general.alignment must be a power of two between %llu and %llu",
                         ull(kMinAlignment), ull(kMaxAlignment))
        .with_offset(static_cast<uint64_t>(value->bytes.data() - file_.data()));
  }
  alignment_ = *alignment;
  return {};
}

Status GgufParser::read_tensors() {
  // The header's count was checked against the whole file; the keys have used part of it since.
  if (tensor_count_ > remaining() / kMinTensorBytes) {
    return Status::error(Code::corrupt,
                         "the header counts %llu tensors, more than the file can hold",
                         ull(tensor_count_))
        .with_offset(8);
  }
  result_.tensors_.reserve(tensor_count_);
  tensor_at_.reserve(tensor_count_);
  for (uint64_t i = 0; i < tensor_count_; ++i) {
    Status status = read_tensor();
    if (!status.ok()) return status;
  }
  result_.tensor_order_ = order_by_name(result_.tensors_);
  if (const GgufTensor* twice = find_duplicate(result_.tensors_, result_.tensor_order_)) {
    return Status::error(Code::corrupt, "tensor '%s' occurs twice", Quoted(twice->name).text())
        .with_offset(tensor_at_[static_cast<std::size_t>(twice - result_.tensors_.data())]);
  }
  return {};
}

Status GgufParser::read_tensor() {
  const uint64_t start = at_;
  const auto cut = [&] {
    return Status::error(Code::corrupt, "the file ends within tensor %zu of %llu",
                         result_.tensors_.size(), ull(tensor_count_))
        .with_offset(start);
  };
  GgufTensor tensor{};
  if (!read_text(&tensor.name) || !read(&tensor.n_dims)) return cut();
  if (tensor.name.empty() || tensor.name.size() > kMaxTensorNameBytes) {
    return Status::error(Code::corrupt,
                         "the name of tensor %zu is %zu bytes long: 1 to %llu are allowed",
                         result_.tensors_.size(), tensor.name.size(), ull(kMaxTensorNameBytes))
        .with_offset(start);
  }
  if (tensor.n_dims < 1 || tensor.n_dims > 4) {
    return Status::error(Code::corrupt, "tensor '%s' has %u dimensions: 1 to 4 are allowed",
                         Quoted(tensor.name).text(), tensor.n_dims)
        .with_offset(start);
  }
  for (uint32_t d = 0; d < 4; ++d) {
    tensor.dims[d] = 1;
    if (d < tensor.n_dims && !read(&tensor.dims[d])) return cut();
  }
  uint32_t type;
  if (!read(&type) || !read(&tensor.offset)) return cut();
  tensor.type = static_cast<TensorType>(type);
  Status status = measure_tensor(start, &tensor);
  if (status.ok()) status = check_metadata_size();
  if (!status.ok()) return status;
  result_.tensors_.push_back(tensor);
  tensor_at_.push_back(start);
  return {};
}

// Checks dimensions and type and computes the tensor's bytes.
Status GgufParser::measure_tensor(uint64_t at, GgufTensor* tensor) const {
  const TensorTypeInfo* info = tensor_type_info(tensor->type);
  if (!info) return refuse_tensor_type(tensor->name, static_cast<uint32_t>(tensor->type), at);
  uint64_t elements = 1;
  bool fits = true;
  for (uint64_t dim : tensor->dims) {
    if (dim == 0) {
      return Status::error(Code::corrupt, "tensor '%s' has a dimension of 0",
                           Quoted(tensor->name).text())
          .with_offset(at);
    }
    fits = fits && checked_mul(elements, dim, &elements);
  }
  if (tensor->dims[0] % info->block_elements != 0) {
    return Status::error(
               Code::corrupt, "tensor '%s' has rows of %llu elements, not whole %s blocks of %u",
               Quoted(tensor->name).text(), ull(tensor->dims[0]), info->name, info->block_elements)
        .with_offset(at);
  }
  if (!fits || !checked_mul(elements / info->block_elements, info->block_bytes, &tensor->bytes)) {
    return Status::error(Code::corrupt, "tensor '%s' is larger than any file",
                         Quoted(tensor->name).text())
        .with_offset(at);
  }
  return {};
}

// Turns offsets from the data into offsets from the beginning of the file, and checks that each
// tensor is inside the file.
Status GgufParser::place_tensors() {
  result_.data_offset_ = file_.size();
  if (result_.tensors_.empty()) return {};
  // No overflow: at_ is at most the size of a span.
  const uint64_t data = round_up(at_, alignment_);
  result_.data_offset_ = data;
  for (std::size_t i = 0; i < result_.tensors_.size(); ++i) {
    GgufTensor& tensor = result_.tensors_[i];
    if (tensor.offset % alignment_ != 0) {
      return Status::error(Code::corrupt, "tensor '%s' is not aligned to %llu bytes",
                           Quoted(tensor.name).text(), ull(alignment_))
          .with_offset(tensor_at_[i]);
    }
    uint64_t offset;
    if (!checked_add(tensor.offset, data, &offset) ||
        !range_fits(offset, tensor.bytes, file_.size())) {
      return Status::error(Code::corrupt,
                           "tensor '%s' reaches past the end of the file: check its size",
                           Quoted(tensor.name).text())
          .with_offset(tensor_at_[i]);
    }
    tensor.offset = offset;
  }
  return refuse_overlap();
}

Status GgufParser::refuse_overlap() const {
  const std::vector<GgufTensor>& tensors = result_.tensors_;
  std::vector<uint32_t> order(tensors.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return tensors[a].offset < tensors[b].offset; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const GgufTensor& before = tensors[order[i - 1]];
    const GgufTensor& after = tensors[order[i]];
    if (after.offset - before.offset < before.bytes) {
      return Status::error(Code::corrupt, "tensors '%s' and '%s' overlap",
                           Quoted(before.name).text(), Quoted(after.name).text())
          .with_offset(tensor_at_[order[i]]);
    }
  }
  return {};
}

Status Gguf::parse(std::span<const std::byte> file, Gguf* out) {
  return GgufParser(file).parse(out);
}

}  // namespace kvasir
