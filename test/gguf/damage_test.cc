// Damaged files: cut anywhere, any bit flipped, many bytes changed. Whatever comes, parse()
// answers, and what it accepts can be read to its last byte (sanitizer builds see a read beyond).
#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <string>

#include "fault_count.h"
#include "gguf/gguf.h"
#include "gguf/gguf_builder.h"

namespace kvasir {
namespace {

using Bytes = std::vector<std::byte>;

Bytes small_file() {
  return test::GgufBuilder()
      .key("general.architecture", "llama")
      .key("general.alignment", uint32_t{32})
      .key("llama.block_count", uint32_t{1})
      .key("llama.rope.freq_base", 10000.0f)
      .key("tokenizer.ggml.add_bos_token", true)
      .key("tokenizer.ggml.tokens", std::vector<std::string>{"<s>", "a", "", "bc"})
      .key("tokenizer.ggml.scores", std::vector<float>{0, -1, -2, -3})
      .key("tokenizer.ggml.token_type", std::vector<int32_t>{3, 1, 1, 1})
      .key("flags", std::vector<bool>{true, false})
      .tensor("token_embd.weight", {32, 4}, TensorType::q8_0)
      .tensor("output_norm.weight", {32}, TensorType::f32)
      .build();
}

unsigned sum(std::span<const std::byte> bytes) {
  unsigned total = 0;
  for (std::byte b : bytes) total += static_cast<unsigned>(b);
  return total;
}

// Parses a copy of exactly these bytes and touches everything that was accepted. True when it was.
bool survives(const Bytes& bytes) {
  Gguf gguf;
  const Status status = Gguf::parse(bytes, &gguf);
  if (!status.ok()) {
    CHECK(status.message()[0] != 0);
    return false;
  }
  unsigned touched = 0;
  for (const auto& [key, value] : gguf.entries()) {
    CHECK(gguf.find(key) == &value);
    touched += sum(value.bytes);
    if (const auto strings = gguf.get_strings(key)) {
      CHECK(strings->size() == value.count);
      for (std::string_view s : *strings) touched += sum(std::as_bytes(std::span(s)));
    }
    touched += static_cast<unsigned>(gguf.get_uint(key).has_value());
    touched += static_cast<unsigned>(gguf.get_floats(key).has_value());
    touched += static_cast<unsigned>(gguf.get_ints(key).has_value());
  }
  for (const GgufTensor& tensor : gguf.tensors()) {
    CHECK(gguf.find_tensor(tensor.name) == &tensor);
    touched += sum(std::span(bytes).subspan(tensor.offset, tensor.bytes));
  }
  [[maybe_unused]] static volatile unsigned sink;
  sink = touched;
  return true;
}

TEST_CASE("the undamaged file parses") { CHECK(survives(small_file())); }

TEST_CASE("no file that is cut short parses") {
  const Bytes whole = small_file();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    CHECK(!survives(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size))));
    count_faults("model file cut");
  }
}

TEST_CASE("no flipped bit crashes the parser") {
  const Bytes whole = small_file();
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    Bytes bytes = whole;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    count_faults("model file with a bit flipped");
    survives(bytes);
  }
}

TEST_CASE("no random damage crashes the parser") {
  const Bytes whole = small_file();
  std::mt19937 random(1);
  const auto below = [&](std::size_t n) { return random() % n; };
  // Values that sizes and counts go wrong at.
  const uint64_t edges[] = {0,
                            1,
                            7,
                            8,
                            255,
                            65536,
                            INT32_MAX,
                            UINT32_MAX,
                            uint64_t{1} << 32,
                            INT64_MAX,
                            UINT64_MAX - 7,
                            UINT64_MAX};
  int accepted = 0;
  for (int round = 0; round < 50000; ++round) {
    Bytes bytes = whole;
    for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
      const std::size_t at = below(bytes.size() - 8);
      switch (below(4)) {
        case 0:
          test::patch(&bytes, at, edges[below(std::size(edges))]);
          break;
        case 1:
          test::patch(&bytes, at, static_cast<uint8_t>(random()));
          break;
        case 2:
          test::patch(&bytes, at, static_cast<uint32_t>(below(32)));
          break;
        default:  // one part over another
          std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(below(whole.size() - 8)), 8,
                      bytes.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    count_faults("model file with random damage");
    accepted += survives(bytes);
  }
  CHECK(accepted > 1000);  // the damage is not so heavy that nothing beyond the header is tried
}

}  // namespace
}  // namespace kvasir
