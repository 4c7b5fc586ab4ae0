// One hand-built file for each rule of the parser: what is refused, with which code, and that the
// message names it.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

#include "gguf/gguf.h"
#include "gguf/gguf_builder.h"

namespace kvasir {
namespace {

using test::GgufBuilder;
using test::patch;
using Bytes = std::vector<std::byte>;

constexpr uint32_t kF32 = 0;
constexpr uint32_t kQ4_0 = 2;

Gguf parse_good(const Bytes& bytes) {
  Gguf gguf;
  const Status status = Gguf::parse(bytes, &gguf);
  REQUIRE_MESSAGE(status.ok(), status.message());
  return gguf;
}

// Parses a wrong file; `words` must stand in the message, and the output must stay as it was.
void check_refused(const Bytes& bytes, Code code, const std::string& words) {
  const Bytes before_bytes = GgufBuilder().key("before", 7).build();
  Gguf gguf = parse_good(before_bytes);
  const Status status = Gguf::parse(bytes, &gguf);
  CHECK(status.code() == code);
  CHECK_MESSAGE(std::string(status.message()).find(words) != std::string::npos, status.message(),
                " lacks: ", words);
  CHECK(status.offset() <= bytes.size());
  CHECK(gguf.get_uint("before") == 7);
  CHECK(gguf.entries().size() == 1);
}

TEST_CASE("values come back as they were written") {
  const Bytes bytes = GgufBuilder()
                          .key("u8", uint8_t{200})
                          .key("i8", int8_t{-3})
                          .key("u16", uint16_t{60000})
                          .key("i16", int16_t{-30000})
                          .key("u32", uint32_t{4000000000})
                          .key("i32", int32_t{-7})
                          .key("u64", uint64_t{1} << 63)
                          .key("i64", int64_t{1} << 40)
                          .key("f32", 0.25f)
                          .key("f64", 1e300)
                          .key("bool", true)
                          .key("text", "h\xc3\xa9llo")
                          .key("empty", "")
                          .key("floats", std::vector<float>{1, 2.5f})
                          .key("ints", std::vector<int32_t>{-1, 1})
                          .key("uints", std::vector<uint16_t>{65535})
                          .key("wide", std::vector<uint32_t>{1u << 31})
                          .key("bools", std::vector<bool>{true, false})
                          .key("strings", std::vector<std::string>{"", "b"})
                          .key("none", std::vector<std::string>{})
                          .build();
  const Gguf gguf = parse_good(bytes);
  CHECK(gguf.version() == 3);
  CHECK(gguf.entries().size() == 20);
  CHECK(gguf.entries()[0].first == "u8");
  CHECK(gguf.get_uint("u8") == 200);
  CHECK(gguf.get_uint("u16") == 60000);
  CHECK(gguf.get_uint("u32") == 4000000000);
  CHECK(gguf.get_uint("u64") == uint64_t{1} << 63);
  CHECK(gguf.get_uint("i64") == uint64_t{1} << 40);
  CHECK(gguf.get_float("f32") == 0.25);
  CHECK(gguf.get_float("f64") == 1e300);
  CHECK(gguf.get_bool("bool") == true);
  CHECK(gguf.get_string("text") == "h\xc3\xa9llo");
  CHECK(gguf.get_string("empty") == "");
  CHECK(gguf.get_floats("floats") == std::vector<float>{1, 2.5f});
  CHECK(gguf.get_ints("ints") == std::vector<int32_t>{-1, 1});
  CHECK(gguf.get_ints("uints") == std::vector<int32_t>{65535});
  const auto strings = gguf.get_strings("strings");
  REQUIRE(strings);
  CHECK(std::vector<std::string_view>(strings->begin(), strings->end()) ==
        std::vector<std::string_view>{"", "b"});
  CHECK(gguf.get_strings("none")->empty());
  CHECK(gguf.find("bools")->count == 2);
  CHECK(gguf.find("bools")->element_type == GgufType::boolean);
  CHECK(gguf.find("absent") == nullptr);
}

TEST_CASE("a value is never given as another type") {
  const Bytes bytes = GgufBuilder()
                          .key("minus", int32_t{-7})
                          .key("f32", 2.0f)
                          .key("bool", true)
                          .key("text", "1")
                          .key("wide", std::vector<uint32_t>{1u << 31})
                          .key("floats", std::vector<float>{})
                          .key("strings", std::vector<std::string>{})
                          .key("bools", std::vector<bool>{true})
                          .build();
  const Gguf gguf = parse_good(bytes);
  for (const char* key : {"minus", "f32", "bool", "text", "wide", "strings", "absent"})
    CHECK(!gguf.get_uint(key));
  for (const char* key : {"minus", "bool", "text", "floats", "absent"}) CHECK(!gguf.get_float(key));
  for (const char* key : {"minus", "f32", "text", "bools", "absent"}) CHECK(!gguf.get_bool(key));
  for (const char* key : {"minus", "f32", "strings", "absent"}) CHECK(!gguf.get_string(key));
  for (const char* key : {"text", "floats", "absent"}) CHECK(!gguf.get_strings(key));
  for (const char* key : {"f32", "wide", "strings", "absent"}) CHECK(!gguf.get_floats(key));
  for (const char* key : {"minus", "wide", "floats", "strings", "absent"})
    CHECK(!gguf.get_ints(key));
  CHECK(gguf.get_ints("bools") == std::vector<int32_t>{1});
}

TEST_CASE("tensors come back in file order with their places") {
  GgufBuilder b;
  b.version = 2;
  b.key("general.alignment", uint32_t{64}).alignment = 64;
  b.tensor("z", {3}, TensorType::f32)
      .tensor("a", {32, 5}, TensorType::q4_0)
      .tensor("m", {256, 2, 3, 4}, TensorType::q6_k);
  const Bytes bytes = b.build();
  const Gguf gguf = parse_good(bytes);
  CHECK(gguf.version() == 2);
  REQUIRE(gguf.tensors().size() == 3);
  CHECK(gguf.data_offset() == b.data_offset());
  CHECK(gguf.tensors()[0].name == "z");
  CHECK(gguf.tensors()[0].offset == gguf.data_offset());
  CHECK(gguf.tensors()[0].bytes == 12);
  CHECK(gguf.find_tensor("a")->offset == gguf.data_offset() + 64);
  CHECK(gguf.find_tensor("a")->bytes == 5 * 18);
  CHECK(gguf.find_tensor("a")->dims[1] == 5);
  CHECK(gguf.find_tensor("a")->dims[2] == 1);
  CHECK(gguf.find_tensor("m")->n_dims == 4);
  CHECK(gguf.find_tensor("m")->bytes == 2 * 3 * 4 * 210);
  CHECK(gguf.find_tensor("zz") == nullptr);
}

TEST_CASE("a file that is not GGUF v2 or v3 is refused by name") {
  const Bytes good = GgufBuilder().key("k", 1).build();
  check_refused({}, Code::unsupported, "not a GGUF file");
  check_refused(Bytes(100), Code::unsupported, "not a GGUF file");
  for (uint32_t version : {0u, 1u, 4u, 0x00010003u}) {
    Bytes bytes = good;
    patch(&bytes, 4, version);
    check_refused(bytes, Code::unsupported, "GGUF version " + std::to_string(version));
  }
  for (uint32_t version : {0x01000000u, 0x02000000u, 0x03000000u}) {
    Bytes bytes = good;
    patch(&bytes, 4, version);
    check_refused(bytes, Code::unsupported, "big-endian");
  }
}

TEST_CASE("counts beyond the file are refused before anything is allocated") {
  const Bytes good = GgufBuilder().key("k", 1).tensor("t", {4}, TensorType::f32).build();
  for (uint64_t count : {uint64_t{10}, uint64_t{1} << 32, uint64_t{1} << 63, UINT64_MAX}) {
    for (std::size_t at : {std::size_t{8}, std::size_t{16}}) {
      Bytes bytes = good;
      patch(&bytes, at, count);
      check_refused(bytes, Code::corrupt, "more than the file can hold");
    }
  }
  Bytes many(4 << 20);
  std::copy(good.begin(), good.begin() + 24, many.begin());
  patch(&many, 16, uint64_t{65537});
  check_refused(many, Code::limit, "at most 65536");
  // What the keys have used is no longer there for the tensors.
  Bytes eaten = GgufBuilder().key("text", std::string(100, 'x')).build();
  patch(&eaten, 8, uint64_t{2});
  check_refused(eaten, Code::corrupt, "more than the file can hold");
}

TEST_CASE("wrong keys are refused") {
  check_refused(GgufBuilder().key("twice", 1).key("other", 1).key("twice", 2.0f).build(),
                Code::corrupt, "'twice' occurs twice");
  check_refused(GgufBuilder().key("", 1).build(), Code::corrupt, "0 bytes long");
  check_refused(GgufBuilder().key(std::string(65536, 'k'), 1).build(), Code::corrupt,
                "65536 bytes long");
  check_refused(GgufBuilder().raw_key("k", 13, Bytes(8)).build(), Code::corrupt, "unknown type 13");
  check_refused(GgufBuilder().raw_key("k", UINT32_MAX, Bytes(8)).build(), Code::corrupt,
                "unknown type 4294967295");
  check_refused(GgufBuilder().raw_key("k", 7, {std::byte{2}}).build(), Code::corrupt,
                "boolean of value 2");
  // A name's bytes never reach a terminal as they are.
  check_refused(GgufBuilder().key("\x1b[2J\nk", 1).key("\x1b[2J\nk", 1).build(), Code::corrupt,
                "'\\x1B[2J\\x0Ak' occurs twice");
}

TEST_CASE("a length beyond the file is refused") {
  for (uint64_t length : {uint64_t{8}, uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 63,
                          UINT64_MAX - 7, UINT64_MAX}) {
    CAPTURE(length);
    Bytes key = GgufBuilder().key("k", 1).build();
    patch(&key, 24, length + 8);  // also wraps around
    if (length + 8 > key.size()) check_refused(key, Code::corrupt, "ends within key 0");
    Bytes text = GgufBuilder().key("k", "abc").build();
    patch(&text, 24 + 8 + 1 + 4, length);
    check_refused(text, Code::corrupt, "value of key 'k'");
    Bytes array = GgufBuilder().key("k", std::vector<int32_t>{1, 2}).build();
    patch(&array, 24 + 8 + 1 + 4 + 4, length);
    check_refused(array, Code::corrupt, "'k': the array is longer than the file");
    Bytes strings = GgufBuilder().key("k", std::vector<std::string>{"ab"}).build();
    patch(&strings, 24 + 8 + 1 + 4 + 4 + 8, length);
    check_refused(strings, Code::corrupt, "'k': a string of the array");
  }
}

TEST_CASE("arrays of arrays and of unknown types are refused") {
  Bytes bytes = GgufBuilder().key("k", std::vector<uint32_t>(8)).build();
  const std::size_t element = 24 + 8 + 1 + 4;
  patch(&bytes, element, uint32_t{9});
  check_refused(bytes, Code::corrupt, "array of arrays");
  patch(&bytes, element, uint32_t{13});
  check_refused(bytes, Code::corrupt, "unknown element type");
  Bytes bools = GgufBuilder().key("k", std::vector<bool>{true, false}).build();
  patch(&bools, bools.size() - 1, uint8_t{3});
  check_refused(bools, Code::corrupt, "neither 0 nor 1");
}

TEST_CASE("an alignment that is not a power of two in range is refused") {
  for (uint32_t alignment : {0u, 1u, 2u, 4u, 24u, 33u, 131072u, UINT32_MAX}) {
    check_refused(GgufBuilder().key("general.alignment", alignment).build(), Code::corrupt,
                  "general.alignment");
  }
  check_refused(GgufBuilder().key("general.alignment", 32.0f).build(), Code::corrupt,
                "general.alignment");
  check_refused(GgufBuilder().key("general.alignment", "32").build(), Code::corrupt,
                "general.alignment");
  for (uint32_t alignment : {8u, 32u, 65536u}) {
    GgufBuilder b;
    b.alignment = alignment;
    b.key("general.alignment", alignment)
        .tensor("a", {3}, TensorType::f32)
        .tensor("b", {3}, TensorType::f32);
    const Bytes bytes = b.build();
    CHECK(parse_good(bytes).data_offset() % alignment == 0);
  }
}

TEST_CASE("wrong tensor names and dimensions are refused") {
  const auto file = [](std::string_view name, uint32_t n_dims, const std::vector<uint64_t>& dims,
                       uint32_t type) {
    return GgufBuilder().raw_tensor(name, n_dims, dims, type, 0).data(1024).build();
  };
  check_refused(file("", 1, {4}, kF32), Code::corrupt, "0 bytes long");
  check_refused(file(std::string(65, 't'), 1, {4}, kF32), Code::corrupt, "65 bytes long");
  check_refused(file("t", 0, {}, kF32), Code::corrupt, "'t' has 0 dimensions");
  check_refused(file("t", 5, {1, 1, 1, 1, 1}, kF32), Code::corrupt, "'t' has 5 dimensions");
  check_refused(file("t", UINT32_MAX, {4}, kF32), Code::corrupt, "dimensions");
  check_refused(file("t", 2, {4, 0}, kF32), Code::corrupt, "'t' has a dimension of 0");
  check_refused(file("t", 3, {0, UINT64_MAX, UINT64_MAX}, kF32), Code::corrupt,
                "'t' has a dimension of 0");
  check_refused(file("t", 1, {33}, kQ4_0), Code::corrupt, "not whole Q4_0 blocks of 32");
  check_refused(file("t", 2, {16, 2}, kQ4_0), Code::corrupt, "not whole Q4_0 blocks of 32");
  check_refused(file("t", 1, {UINT64_MAX}, kF32), Code::corrupt, "larger than any file");
  // bytes wrap to 0
  check_refused(file("t", 1, {uint64_t{1} << 62}, kF32), Code::corrupt, "larger than any file");
  check_refused(file("t", 2, {uint64_t{1} << 32, uint64_t{1} << 32}, kF32), Code::corrupt,
                "larger than any file");
  check_refused(file("t", 4, {65536, 65536, 65536, 65536}, kQ4_0), Code::corrupt,
                "larger than any file");
  check_refused(file("t", 1, {uint64_t{1} << 61}, kF32), Code::corrupt, "past the end");
  check_refused(file("t", 1, {257}, kF32), Code::corrupt, "'t' reaches past the end");
  parse_good(file(std::string(64, 't'), 1, {256}, kF32));
}

TEST_CASE("a tensor of a type that cannot be computed with is refused by name") {
  const auto file = [](uint32_t type) {
    return GgufBuilder().raw_tensor("blk.0.attn_q.weight", 1, {256}, type, 0).data(1024).build();
  };
  check_refused(file(41), Code::unsupported,
                "tensor 'blk.0.attn_q.weight' is Q1_0, which Kvasir cannot compute with: "
                "use one of F32 F16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS "
                "IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS IQ1_M BF16 TQ1_0 TQ2_0 MXFP4 "
                "NVFP4");
  check_refused(file(99), Code::unsupported, "is type 99");
  check_refused(file(UINT32_MAX), Code::unsupported, "is type 4294967295");
}

TEST_CASE("misplaced, overlapping and repeated tensors are refused") {
  const auto two = [](std::string_view name, uint64_t offset) {
    return GgufBuilder()
        .raw_tensor("first", 1, {16}, kF32, 64)
        .raw_tensor(name, 1, {16}, kF32, offset)
        .data(192)
        .build();
  };
  parse_good(two("second", 0));
  parse_good(two("second", 128));
  for (uint64_t offset : {uint64_t{32}, uint64_t{64}, uint64_t{96}}) {
    check_refused(two("second", offset), Code::corrupt, "overlap");
  }
  check_refused(two("first", 128), Code::corrupt, "'first' occurs twice");
  for (uint64_t offset : {uint64_t{4}, uint64_t{129}})
    check_refused(two("second", offset), Code::corrupt, "not aligned");
  for (uint64_t offset : {uint64_t{160}, uint64_t{192}, uint64_t{1} << 63, UINT64_MAX - 31}) {
    check_refused(two("second", offset), Code::corrupt, "'second' reaches past the end");
  }
  // Without a byte of data the padding before it may be missing too.
  check_refused(GgufBuilder().raw_tensor("t", 1, {1}, kF32, 0).build(), Code::corrupt,
                "'t' reaches past the end");
}

}  // namespace
}  // namespace kvasir
