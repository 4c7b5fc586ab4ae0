// Status, checked arithmetic, checksums, the allocator, progress.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "base/cancel.h"
#include "base/checked.h"
#include "base/checksum.h"
#include "base/magnitude.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/quoted.h"
#include "base/status.h"
#include "failing_allocations.h"

using namespace kvasir;

TEST_CASE("a status carries its code, message, errno and offset") {
  const Status good;
  CHECK(good.ok());
  CHECK(std::string(good.message()).empty());
  CHECK(good.sys_errno() == 0);
  CHECK(good.offset() == UINT64_MAX);
  const Status bad =
      Status::error(Code::corrupt, "%s at %d", "a.kv", 7).with_errno(5).with_offset(4096);
  CHECK_FALSE(bad.ok());
  CHECK(bad.code() == Code::corrupt);
  CHECK(std::string(bad.message()) == "a.kv at 7");
  CHECK(bad.sys_errno() == 5);
  CHECK(bad.offset() == 4096);
  static_assert(sizeof(Status) <= 2 * sizeof(void*));
  static_assert(!std::is_copy_constructible_v<Status>);
}

TEST_CASE("a long message is cut and ended") {
  const Status s = Status::error(Code::io, "%s", std::string(1000, 'x').c_str());
  CHECK(std::string(s.message()) == std::string(190, 'x') + "..." + std::string(190, 'x'));
}

TEST_CASE("a long path leaves no room for the reason after it") {
  const std::string path(4096, 'p');
  CHECK(std::string(Status::error(Code::io, "cannot open %s: no such file", path.c_str()).message())
            .ends_with("pp: no such file"));
}

TEST_CASE(
    "a message breaks its line, or holds what a terminal or a reader would take for something "
    "else") {
  const struct {
    const char *hostile, *shown;
  } texts[] = {
      {"a\nb", "a\\x0Ab"},
      {"\x1b[31mred", "\\x1B[31mred"},
      {"\x7f", "\\x7F"},
      {"cut \xe2\x82", "cut \\xE2\\x82"},
      {"\xff\xc0\x80", "\\xFF\\xC0\\x80"},
      {"\xed\xa0\x80", "\\xED\\xA0\\x80"},  // a surrogate
      {"\xc2\x85", "\\u{85}"},              // a line break of C1
      {"\xe2\x80\xa8", "\\u{2028}"},        // a line separator
      {"gpj.\xe2\x80\xae"
       "exe",
       "gpj.\\u{202E}exe"},                // from right to left
      {"\xe2\x81\xa6", "\\u{2066}"},       // an isolate
      {"\xf3\xa0\x80\x81", "\\u{E0001}"},  // a tag
      {"gr\xc3\xb6\xc3\x9f"
       "e \xf0\x9f\x98\x80 C:\\x",
       "gr\xc3\xb6\xc3\x9f"
       "e \xf0\x9f\x98\x80 C:\\x"},
  };
  for (const auto& text : texts) {
    const Status s = Status::error(Code::io, "%s", text.hostile);
    CHECK(std::string(s.message()) == text.shown);
    CHECK(std::string(Status::error(Code::io, "%s", s.message()).message()) ==
          text.shown);  // as a part of another message
    CHECK(std::string(Quoted(text.hostile).text()) == text.shown);
  }
  CHECK(json_string("a\"\\\n\xff") == R"("a\"\\\\x0A\\xFF")");
}

TEST_CASE("a text is cut within a character or within the spelling of one") {
  std::string text;
  while (text.size() < 1000) text += "\xe2\x82\xac\n";
  for (std::size_t capacity = 32; capacity < 64; ++capacity) {
    std::vector<char> out(capacity, 'x');
    quote(text, out.data(), capacity);
    std::string_view rest = out.data();
    CHECK(rest.size() < capacity);
    CHECK(rest.size() + 20 > capacity);
    while (!rest.empty()) {
      const std::size_t before = rest.size();
      for (const std::string_view unit : {"\xe2\x82\xac", "\\x0A", "..."})
        if (rest.starts_with(unit)) rest.remove_prefix(unit.size());
      REQUIRE(rest.size() < before);
    }
  }
  CHECK(std::string(Quoted(text).text()).size() < 100);
  CHECK(std::string(Quoted(text).text()).ends_with("..."));
}

TEST_CASE("a status that finds no memory for its message keeps its code") {
  Status s;
  {
    FailingAllocations failing(0, false);
    s = Status::error(Code::no_space, "lost").with_errno(28).with_offset(1);
  }
  CHECK(s.code() == Code::no_space);
  CHECK(std::string(s.message()).find("memory") != std::string::npos);
  CHECK(s.sys_errno() == 0);
}

TEST_CASE("a moved-from status is still one of the two") {
  Status a = Status::error(Code::io, "x");
  const Status b = std::move(a);
  CHECK(b.code() == Code::io);
  CHECK(std::string(a.message()) != "x");  // NOLINT: what is left is still safe to ask
}

TEST_CASE("sizes at the edge of 64 bits are reported, not wrapped") {
  uint64_t out = 0;
  CHECK(checked_add(UINT64_MAX, 0, &out));
  CHECK_FALSE(checked_add(UINT64_MAX, 1, &out));
  CHECK(checked_mul(uint64_t{1} << 32, (uint64_t{1} << 32) - 1, &out));
  CHECK_FALSE(checked_mul(uint64_t{1} << 32, uint64_t{1} << 32, &out));
  CHECK(checked_mul(0, UINT64_MAX, &out));
  CHECK(checked_align(UINT64_MAX - 4095, 4096, &out));
  CHECK(out == UINT64_MAX - 4095);
  CHECK_FALSE(checked_align(UINT64_MAX - 4094, 4096, &out));
  CHECK(checked_align(0, 64, &out));
  CHECK(out == 0);
}

TEST_CASE("a range fits or does not, also when its end would wrap") {
  CHECK(range_fits(0, 0, 0));
  CHECK(range_fits(10, 0, 10));
  CHECK(range_fits(3, 7, 10));
  CHECK_FALSE(range_fits(3, 8, 10));
  CHECK_FALSE(range_fits(11, 0, 10));
  CHECK_FALSE(range_fits(2, UINT64_MAX, 10));
  CHECK_FALSE(range_fits(UINT64_MAX, 2, 10));
}

TEST_CASE("narrowing succeeds exactly when the value fits") {
  uint32_t small = 7;
  CHECK(checked_cast(UINT32_MAX, &small));
  CHECK(small == UINT32_MAX);
  small = 7;
  CHECK_FALSE(checked_cast(uint64_t{UINT32_MAX} + 1, &small));
  CHECK(small == 7);
  CHECK(ceil_div(0, 4096) == 0);
  CHECK(ceil_div(1, 4096) == 1);
  CHECK(ceil_div(UINT64_MAX, 1) == UINT64_MAX);
  CHECK(round_up(4097, 4096) == 8192);
}

TEST_CASE("a number that is none, or too large, is met wherever it is") {
  constexpr float largest = std::numeric_limits<float>::max(),
                  infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {0.0f,     -0.0f,   1.0f,
                               -largest, largest, std::numeric_limits<float>::denorm_min()};
  values.resize(70, 2.0f);
  CHECK(all_finite({}));
  CHECK(all_finite(values));
  for (std::size_t at = 0; at < values.size(); ++at)
    for (const float wrong :
         {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(),
          std::bit_cast<float>(0xffffffffu), std::bit_cast<float>(0x7f800001u)}) {
      std::vector<float> others = values;
      others[at] = wrong;
      CHECK_FALSE(all_finite(others));
    }
  const float near[] = {3.0f, std::nextafter(-4.0f, 0.0f)}, at_limit[] = {3.0f, -4.0f};
  CHECK(all_below(near, 4));
  CHECK_FALSE(all_below(at_limit, 4));
}

TEST_CASE("checksums are XXH3 with a seed, whatever the machine") {
  // Values of the reference implementation, version 0.8.1.
  CHECK(checksum("", 0, 0) == 0x2D06800538D394C2);
  CHECK(checksum("a", 1, 0) == 0xE6C632B61E964E1F);
  const std::string text(4096, 'k');
  CHECK(checksum(text.data(), text.size(), 1) != checksum(text.data(), text.size(), 2));
  CHECK(checksum(text.data(), text.size(), 1) != checksum(text.data(), text.size() - 1, 1));
}

TEST_CASE("a checksum of pieces is that of the whole") {
  std::string bytes(5000, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * i >> 3);
  for (uint64_t seed : {uint64_t{0}, uint64_t{65536}, UINT64_MAX})
    for (std::size_t size : {0u, 1u, 16u, 128u, 240u, 241u, 1024u, 5000u})
      for (std::size_t piece : {1u, 7u, 256u, 5000u}) {
        RunningChecksum running(seed);
        for (std::size_t at = 0; at < size; at += piece)
          running.add(bytes.data() + at, std::min(piece, size - at));
        CHECK(running.value() == checksum(bytes.data(), size, seed));
      }
}

TEST_CASE("large memory is aligned to a cache line and zeroed when asked") {
  for (std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{100}, std::size_t{5} << 20}) {
    void* p = allocate(size);
    REQUIRE(p);
    CHECK(reinterpret_cast<uintptr_t>(p) % 64 == 0);
    std::memset(p, 0xAA, size);
    deallocate(p);
    auto* zeroed = static_cast<unsigned char*>(allocate_zeroed(size));
    REQUIRE(zeroed);
    CHECK(reinterpret_cast<uintptr_t>(zeroed) % 64 == 0);
    bool all_zero = true;
    for (std::size_t i = 0; i < size; ++i) all_zero &= zeroed[i] == 0;
    CHECK(all_zero);
    deallocate(zeroed);
  }
  deallocate(nullptr);
}

TEST_CASE("an allocation that fails throws for arrays and is null for memory") {
  CHECK_THROWS_AS(Allocator<uint64_t>().allocate(SIZE_MAX / 4), std::bad_alloc);
  FailingAllocations failing(0, false);
  void* memory = allocate(10);
  void* zeroed = allocate_zeroed(10);
  bool thrown = false;
  try {
    const auto buffer = make_buffer<float>(10);
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK((memory == nullptr && zeroed == nullptr && thrown));
}

TEST_CASE("an array that grows by one again and again is seldom moved") {
  Array<int> numbers;
  int moves = 0;
  for (int i = 0; i < 100'000; ++i) {
    const int* before = numbers.data();
    make_room_for(&numbers, 1);
    moves += numbers.data() != before;
    numbers.push_back(i);
  }
  CHECK(moves < 40);
  Array<int> exact;
  make_room_for(&exact, 1000);
  CHECK(exact.capacity() == 1000);
  CHECK(numbers[99'999] == 99'999);
}

TEST_CASE("progress reports the first, the last, and few between") {
  int reports = 0;
  uint64_t last = 0;
  Progress progress([&](uint64_t done, uint64_t) {
    ++reports;
    last = done;
    return 0;
  });
  for (uint64_t i = 0; i <= 10'000; ++i) CHECK(progress.update(i, 10'000));
  CHECK(last == 10'000);
  CHECK(reports >= 2);
  CHECK(reports < 100);
  Progress stop([](uint64_t, uint64_t) { return 1; });
  CHECK_FALSE(stop.update(0, 10));
  CHECK(Progress().update(1, 2));
}

TEST_CASE("cancel fires once and can be reset") {
  Cancel cancel;
  CHECK_FALSE(is_cancelled(nullptr));
  CHECK_FALSE(is_cancelled(&cancel));
  cancel.fire();
  CHECK(is_cancelled(&cancel));
  cancel.reset();
  CHECK_FALSE(is_cancelled(&cancel));
}
