// Lookup and typed access to a parsed GGUF file. Relies on the checks of parse(), in parse.cc.
#include "gguf/gguf.h"

#include <algorithm>
#include <charconv>

#include "gguf/wire.h"

namespace kvasir {

std::optional<uint32_t> GgufTensor::layer() const {
  constexpr std::string_view prefix = "blk.";
  if (!name.starts_with(prefix)) return {};
  uint32_t number = 0;
  const char* const begin = name.data() + prefix.size();
  if (std::from_chars(begin, name.data() + name.size(), number).ec != std::errc()) return {};
  return number;
}
namespace {

template <class T>
const T* find_by_name(const std::vector<T>& items, const std::vector<uint32_t>& order,
                      std::string_view name) {
  const auto it =
      std::lower_bound(order.begin(), order.end(), name,
                       [&](uint32_t i, std::string_view n) { return name_of(items[i]) < n; });
  if (it == order.end() || name_of(items[*it]) != name) return nullptr;
  return &items[*it];
}

}  // namespace

const GgufValue* Gguf::find(std::string_view key) const {
  const Entry* entry = find_by_name(entries_, key_order_, key);
  return entry ? &entry->second : nullptr;
}

const GgufTensor* Gguf::find_tensor(std::string_view name) const {
  return find_by_name(tensors_, tensor_order_, name);
}

std::optional<uint64_t> Gguf::get_uint(std::string_view key) const {
  const GgufValue* value = find(key);
  return value ? load_integer<uint64_t>(value->type, value->bytes.data()) : std::nullopt;
}

std::optional<double> Gguf::get_float(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value && value->type == GgufType::f32) return load<float>(value->bytes.data());
  if (value && value->type == GgufType::f64) return load<double>(value->bytes.data());
  return std::nullopt;
}

std::optional<bool> Gguf::get_bool(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value || value->type != GgufType::boolean) return std::nullopt;
  return value->bytes[0] != std::byte{0};
}

std::optional<std::string_view> Gguf::get_string(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value || value->type != GgufType::string) return std::nullopt;
  return as_text(value->bytes.data(), value->bytes.size());
}

// parse() has checked these lengths: they stay within the value's bytes.
std::string_view GgufStrings::Iterator::operator*() const {
  return as_text(at_ + 8, load<uint64_t>(at_));
}

GgufStrings::Iterator& GgufStrings::Iterator::operator++() {
  at_ += 8 + load<uint64_t>(at_);
  return *this;
}

std::optional<GgufStrings> Gguf::get_strings(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value || value->type != GgufType::array || value->element_type != GgufType::string)
    return std::nullopt;
  return GgufStrings(value->bytes, value->count);
}

std::optional<std::vector<float>> Gguf::get_floats(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value || value->type != GgufType::array || value->element_type != GgufType::f32)
    return std::nullopt;
  std::vector<float> floats(value->count);
  for (std::size_t i = 0; i < floats.size(); ++i)
    floats[i] = load<float>(value->bytes.data() + 4 * i);
  return floats;
}

std::optional<std::vector<int32_t>> Gguf::get_ints(std::string_view key) const {
  const GgufValue* value = find(key);
  const bool boolean = value && value->element_type == GgufType::boolean;
  if (!value || value->type != GgufType::array || !(boolean || is_integer(value->element_type)))
    return std::nullopt;
  const uint64_t size = scalar_bytes(value->element_type);
  std::vector<int32_t> ints(value->count);
  for (std::size_t i = 0; i < ints.size(); ++i) {
    const auto v = load_integer<int32_t>(boolean ? GgufType::u8 : value->element_type,
                                         value->bytes.data() + size * i);
    if (!v) return std::nullopt;
    ints[i] = *v;
  }
  return ints;
}

}  // namespace kvasir
