// Any bytes as a GGUF file: parse() answers, and what it accepts keeps every promise of gguf.h.
#include <algorithm>
#include <span>
#include <vector>

#include "gguf/gguf.h"
#include "replay.h"

using namespace kvasir;
using kvasir::test::require;

namespace {

unsigned sum(std::span<const std::byte> bytes) {
  unsigned total = 0;
  for (std::byte b : bytes) total += static_cast<unsigned>(b);
  return total;
}

void check_tensors(const Gguf& gguf, std::span<const std::byte> file) {
  std::vector<GgufTensor> tensors(gguf.tensors().begin(), gguf.tensors().end());
  for (const GgufTensor& tensor : tensors) {
    const TensorTypeInfo* info = tensor_type_info(tensor.type);
    require(info != nullptr, "only known types");
    require(gguf.find_tensor(tensor.name)->offset == tensor.offset, "names are unique");
    require(tensor.offset >= gguf.data_offset() && tensor.offset <= file.size() &&
                tensor.bytes <= file.size() - tensor.offset,
            "tensors lie within the file");
    uint64_t rows = 1;
    for (uint32_t d = 1; d < 4; ++d) rows *= tensor.dims[d];
    require(tensor.bytes == tensor.dims[0] / info->block_elements * info->block_bytes * rows &&
                tensor.bytes > 0,
            "bytes follow from the dimensions");
  }
  std::sort(tensors.begin(), tensors.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    require(tensors[i].offset - tensors[i - 1].offset >= tensors[i - 1].bytes,
            "tensors share no byte");
  }
}

unsigned read_value(const Gguf& gguf, std::string_view key, const GgufValue& value) {
  require(gguf.find(key) == &value, "keys are unique");
  unsigned touched = sum(value.bytes);
  if (const auto text = gguf.get_string(key)) touched += sum(std::as_bytes(std::span(*text)));
  if (const auto strings = gguf.get_strings(key)) {
    require(strings->size() == value.count, "all strings of an array");
    for (std::string_view text : *strings) touched += sum(std::as_bytes(std::span(text)));
  }
  if (const auto floats = gguf.get_floats(key))
    require(floats->size() == value.count, "all floats of an array");
  if (const auto ints = gguf.get_ints(key))
    require(ints->size() == value.count, "all integers of an array");
  return touched + gguf.get_uint(key).has_value() + gguf.get_float(key).has_value() +
         gguf.get_bool(key).has_value();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  Gguf gguf;
  const Status status = Gguf::parse(file, &gguf);
  if (!status.ok()) {
    require(status.message()[0] != 0, "a refusal says why");
    require(gguf.entries().empty() && gguf.tensors().empty(),
            "a refused file leaves nothing behind");
    return 0;
  }
  volatile unsigned touched = 0;
  for (const auto& [key, value] : gguf.entries()) touched = touched + read_value(gguf, key, value);
  check_tensors(gguf, file);
  return 0;
}
