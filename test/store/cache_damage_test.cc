// Damaged cache files: every kind of damage is found, at the latest when the damaged part is used.
// It is distinguished from a file of another version.
#include <doctest/doctest.h>

#include <functional>

#include "cachefile/cache_file.h"
#include "fault_count.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace kvasir;
using samples::get;
using samples::Part;
using samples::put;
using samples::SectionKind;

namespace {

// One sound file, its bytes, and damaged copies of it under one path.
struct Specimen {
  TempFolder folder;
  std::string path = folder.file("a.kv");
  std::vector<uint8_t> sound;

  explicit Specimen(const std::vector<Part>& parts = samples::parts(9)) {
    REQUIRE(samples::save(path, parts, 1).ok());
    sound = read_file(path);
  }

  std::shared_ptr<const CacheFile> open(const std::vector<uint8_t>& bytes, Status* status) {
    write_file(path, bytes);
    std::shared_ptr<const CacheFile> file;
    *status = CacheFile::open(path, &file);
    return file;
  }
  Status opened(const std::vector<uint8_t>& bytes) {
    Status s;
    open(bytes, &s);
    return s;
  }
};

uint64_t entry_of(const std::vector<uint8_t>& file, SectionKind kind) {
  for (uint64_t i = 0; i < get(file, format::header_at("section count"), 4); ++i) {
    const uint64_t entry = format::header_at("sections") + i * format::entry_bytes;
    if (get(file, entry, 4) == static_cast<uint64_t>(kind)) return entry;
  }
  return 0;
}

uint64_t offset_of(const std::vector<uint8_t>& file, SectionKind kind) {
  return get(file, entry_of(file, kind) + format::entry_at("offset"), 8);
}

void swap_ranges(std::vector<uint8_t>& file, uint64_t a, uint64_t b, uint64_t size) {
  const auto at = [&](uint64_t i) { return file.begin() + static_cast<std::ptrdiff_t>(i); };
  std::swap_ranges(at(a), at(a + size), at(b));
}

void touch_everything(const CacheFile& file) {
  for (const auto& section : file.sections()) (void)file.check_section(section);
  (void)file.verify_all(nullptr, nullptr);
}

}  // namespace

TEST_CASE("a flipped bit of the header is found") {
  Specimen specimen;
  for (uint64_t bit = 0; bit < format::header_bytes * 8; ++bit) {
    const uint8_t damaged = static_cast<uint8_t>(specimen.sound[bit / 8] ^ 1u << bit % 8);
    REQUIRE(overwrite(specimen.path, bit / 8, &damaged, 1));
    std::shared_ptr<const CacheFile> file;
    const Status s = CacheFile::open(specimen.path, &file);
    count_faults("bits flipped");
    const bool other_magic = bit / 8 < 4 && s.code() == Code::not_a_cache;
    if (s.code() != Code::corrupt && !other_magic) FAIL_CHECK("bit ", bit, ": ", s.message());
    REQUIRE(overwrite(specimen.path, bit / 8, &specimen.sound[bit / 8], 1));
  }
  CHECK(samples::holds(specimen.path, samples::parts(9), 1));
}

TEST_CASE(
    "a flipped bit behind a repaired header checksum is refused, or only says something else") {
  Specimen specimen;
  // Bits that carry facts, which the container cannot know to be wrong: identity, kinds and
  // versions of sections, a newer version of the format that this reader may read, an older reader
  // that may read it too.
  const auto is_fact = [&](uint64_t byte) {
    if (byte >= format::header_at("version") && byte < format::header_at("byte order")) return true;
    if (byte >= format::header_at("model") && byte < format::header_at("model hash") + 16)
      return true;
    const uint64_t table_end = format::header_at("sections") + 5 * format::entry_bytes;
    return byte >= format::header_at("sections") && byte < table_end &&
           (byte - format::header_at("sections")) % format::entry_bytes <
               format::entry_at("offset");
  };
  for (uint64_t bit = 0; bit < format::header_at("checksum") * 8; ++bit) {
    std::vector<uint8_t> header(specimen.sound.begin(),
                                specimen.sound.begin() + format::header_bytes);
    header[bit / 8] = static_cast<uint8_t>(header[bit / 8] ^ 1u << bit % 8);
    samples::repair_header(header);
    REQUIRE(overwrite(specimen.path, 0, header.data(), header.size()));
    std::shared_ptr<const CacheFile> file;
    const Status s = CacheFile::open(specimen.path, &file);
    count_faults("bits flipped, checksums repaired");
    // A section's size may change within its last block: the block's checksum then differs.
    if (s.ok() && file->verify_all(nullptr, nullptr).ok() != is_fact(bit / 8))
      FAIL_CHECK("bit ", bit, " was missed");
  }
}

TEST_CASE("a file cut off anywhere is refused") {
  Specimen specimen;
  const auto cut = [&](uint64_t size, Code code) {
    std::filesystem::resize_file(specimen.path, size);
    std::shared_ptr<const CacheFile> file;
    const Status s = CacheFile::open(specimen.path, &file);
    count_faults("file cut, or with something at its end");
    if (s.code() != code) FAIL_CHECK("cut at ", size, ": ", s.message());
  };
  for (uint64_t step = 1; step <= 64; ++step) cut(specimen.sound.size() - step, Code::corrupt);
  for (uint64_t size = (specimen.sound.size() - 65) / 4096 * 4096; size > 4096; size -= 4096)
    cut(size, Code::corrupt);
  for (uint64_t size = 4096; size > 0; --size) cut(size, Code::corrupt);
  cut(0, Code::not_a_cache);
}

TEST_CASE("bytes after the end are refused") {
  Specimen specimen;
  for (std::size_t tail : {1u, 8u, 4096u, 65536u}) {
    std::vector<uint8_t> bytes = specimen.sound;
    bytes.resize(bytes.size() + tail);
    count_faults("file cut, or with something at its end");
    const Status s = specimen.opened(bytes);
    CHECK(s.code() == Code::corrupt);
    CHECK(s.offset() == specimen.sound.size());
  }
}

TEST_CASE("blocks that are swapped, doubled, zeroed or changed are found where they are used") {
  Specimen specimen;
  const uint64_t pages = offset_of(specimen.sound, SectionKind::pages),
                 bounds = offset_of(specimen.sound, SectionKind::bounds);
  struct Damage {
    const char* name;
    SectionKind kind;
    std::vector<uint64_t> blocks;  // that are wrong afterwards
    std::function<void(std::vector<uint8_t>&)> apply;
  };
  const std::vector<Damage> damages = {
      {"swapped",
       SectionKind::pages,
       {2, 5},
       [&](auto& f) { swap_ranges(f, pages + 2 * 4096, pages + 5 * 4096, 4096); }},
      {"doubled",
       SectionKind::pages,
       {7},
       [&](auto& f) {
         std::copy_n(f.begin() + static_cast<long>(pages), 4096,
                     f.begin() + static_cast<long>(pages + 7 * 4096));
       }},
      {"zeroed",
       SectionKind::pages,
       {19},
       [&](auto& f) {
         std::fill_n(f.begin() + static_cast<long>(pages + 19 * 4096), 4096, uint8_t{0});
       }},
      {"first bit", SectionKind::bounds, {0}, [&](auto& f) { f[bounds] ^= 1; }},
      {"last bit", SectionKind::bounds, {15}, [&](auto& f) { f[bounds + 65535] ^= 0x80; }},
      {"last byte of a part of a block",
       SectionKind::state,
       {0},
       [&](auto& f) { f[offset_of(f, SectionKind::state) + 99] ^= 2; }},
      {"swapped between sections",
       SectionKind::bounds,
       {3},
       [&](auto& f) { swap_ranges(f, pages, bounds + 3 * 4096, 4096); }},
  };
  for (const Damage& damage : damages) {
    CAPTURE(damage.name);
    std::vector<uint8_t> bytes = specimen.sound;
    damage.apply(bytes);
    count_faults("parts swapped, doubled or zeroed");
    Status s;
    const auto file = specimen.open(bytes, &s);
    REQUIRE_MESSAGE(s.ok(), s.message());
    const auto& section = *file->find(damage.kind);
    for (int pass = 0; pass < 2; ++pass) {  // what failed once fails again
      for (uint64_t b = 0; b < section.blocks(); ++b) {
        const bool wrong =
            std::find(damage.blocks.begin(), damage.blocks.end(), b) != damage.blocks.end();
        const uint64_t size = std::min<uint64_t>(4096, section.bytes - b * 4096);
        CHECK(file->check(section, b * 4096, size) == !wrong);
        CHECK(file->check(section, b * 4096 + size - 1, 1) == !wrong);
      }
      CHECK_FALSE(file->check(section, 0, section.bytes));
    }
    const Status found = file->check_section(section);
    CHECK(found.code() == Code::corrupt);
    CHECK(found.offset() == section.offset + damage.blocks[0] * 4096);
    CHECK(std::string(found.message()).find(format::name_of(damage.kind)) != std::string::npos);
    CHECK(file->verify_all(nullptr, nullptr).code() == Code::corrupt);
  }
}

TEST_CASE("blocks swapped together with their checksums are found by their position") {
  Specimen specimen;
  std::vector<uint8_t> bytes = specimen.sound;
  const uint64_t entry = entry_of(bytes, SectionKind::pages),
                 pages = offset_of(bytes, SectionKind::pages);
  const uint64_t table = get(bytes, entry + format::entry_at("table offset"), 8);
  swap_ranges(bytes, pages + 2 * 4096, pages + 5 * 4096, 4096);
  swap_ranges(bytes, table + 2 * 8, table + 5 * 8, 8);
  count_faults("parts swapped, doubled or zeroed");
  put(bytes, entry + format::entry_at("table checksum"), 8,
      checksum(bytes.data() + table, 20 * 8, table));
  samples::repair_header(bytes);
  Status s;
  const auto file = specimen.open(bytes, &s);
  REQUIRE(s.ok());
  const auto& section = *file->find(SectionKind::pages);
  CHECK_FALSE(file->check(section, 2 * 4096, 4096));
  CHECK_FALSE(file->check(section, 5 * 4096, 4096));
  CHECK(file->check(section, 3 * 4096, 2 * 4096));
  CHECK(file->verify_all(nullptr, nullptr).offset() == section.offset + 2 * 4096);
}

TEST_CASE("every byte of the checksum tables matters") {
  Specimen specimen;
  const uint64_t begin =
      get(specimen.sound, format::header_at("sections") + format::entry_at("table offset"), 8);
  for (uint64_t i = begin; i < specimen.sound.size(); ++i) {
    const uint8_t damaged = specimen.sound[i] ^ 0x10;
    REQUIRE(overwrite(specimen.path, i, &damaged, 1));
    std::shared_ptr<const CacheFile> file;
    CHECK(CacheFile::open(specimen.path, &file).code() == Code::corrupt);
    count_faults("bits flipped");
    REQUIRE(overwrite(specimen.path, i, &specimen.sound[i], 1));
  }
}

TEST_CASE("bytes between the sections are zero, and verify_all looks") {
  Specimen specimen;
  const uint64_t tables =
      get(specimen.sound, format::header_at("sections") + format::entry_at("table offset"), 8);
  const uint64_t state = offset_of(specimen.sound, SectionKind::state);
  for (uint64_t place : {uint64_t{4096}, state - 1, state + 100, tables - 1}) {
    std::vector<uint8_t> bytes = specimen.sound;
    REQUIRE(bytes[place] == 0);
    bytes[place] = 1;
    count_faults("bits flipped");
    Status s;
    const auto file = specimen.open(bytes, &s);
    REQUIRE(s.ok());
    const Status found = file->verify_all(nullptr, nullptr);
    CHECK(found.code() == Code::corrupt);
    CHECK(found.offset() == place);
  }
}

TEST_CASE("a transfer in text mode is named as the cause") {
  Specimen specimen;
  const std::vector<uint8_t>& sound = specimen.sound;
  const auto replaced = [&](auto&& change) {
    std::vector<uint8_t> out;
    for (std::size_t i = 0; i < sound.size(); ++i)
      change(out, sound[i], i + 1 < sound.size() ? sound[i + 1] : uint8_t{0});
    return out;
  };
  const auto lf_to_crlf = replaced([](auto& out, uint8_t c, uint8_t) {
    if (c == '\n') out.push_back('\r');
    out.push_back(c);
  });
  const auto crlf_to_lf = replaced([](auto& out, uint8_t c, uint8_t next) {
    if (c != '\r' || next != '\n') out.push_back(c);
  });
  const auto seven_bits = replaced([](auto& out, uint8_t c, uint8_t) { out.push_back(c & 0x7F); });
  const auto latin1_to_utf8 = replaced([](auto& out, uint8_t c, uint8_t) {
    if (c & 0x80) out.push_back(static_cast<uint8_t>(0xC0 | c >> 6));
    out.push_back(c & 0x80 ? static_cast<uint8_t>(0x80 | (c & 0x3F)) : c);
  });
  const auto invalid_replaced = replaced([](auto& out, uint8_t c, uint8_t) {
    if (c & 0x80) {
      out.insert(out.end(), {0xEF, 0xBF, 0xBD});
    } else {
      out.push_back(c);
    }
  });
  for (const auto& bytes : {lf_to_crlf, crlf_to_lf, seven_bits, latin1_to_utf8, invalid_replaced}) {
    const Status s = specimen.opened(bytes);
    CHECK(s.code() == Code::corrupt);
    CHECK(std::string(s.message()).find("text") != std::string::npos);
  }
}

TEST_CASE("a newer format is stale, not damaged, and one that old readers may read is read") {
  Specimen specimen;
  std::vector<uint8_t> bytes = specimen.sound;
  put(bytes, format::header_at("version"), 4, format::version + 1);
  put(bytes, format::header_at("minimum reader"), 4, format::version + 1);
  CHECK(specimen.opened(bytes).code() == Code::corrupt);  // without its checksum it is not believed
  samples::repair_header(bytes);
  CHECK(specimen.opened(bytes).code() == Code::version);
  put(bytes, format::header_at("minimum reader"), 4, format::version);
  bytes[200] = 77;  // reserved in today's version
  bytes[format::header_at("sections") + format::entry_bytes - 1] = 5;  // so is this
  samples::repair_header(bytes);
  CHECK(specimen.opened(bytes).ok());
  put(bytes, format::header_at("version"), 4, format::version);
  samples::repair_header(bytes);
  CHECK(specimen.opened(bytes).code() == Code::corrupt);
}

TEST_CASE("only a file of version 5 may have values in its keys, and says so by 1") {
  Specimen specimen;
  for (const auto& [version, value] : {std::pair(3u, 1u), std::pair(4u, 1u), std::pair(5u, 2u)}) {
    std::vector<uint8_t> bytes = specimen.sound;
    put(bytes, format::header_at("version"), 4, version);
    put(bytes, format::header_at("minimum reader"), 4, version);
    put(bytes, format::header_at("values in keys"), 4, value);
    samples::repair_header(bytes);
    const Status s = specimen.opened(bytes);
    CHECK(s.code() == Code::corrupt);
    CHECK(s.offset() == format::header_at("values in keys"));
  }
}

TEST_CASE(
    "a file of a version from before the first release is stale, and says to prefill the "
    "document again") {
  Specimen specimen;
  CHECK(get(specimen.sound, format::header_at("version"), 4) == 3);
  CHECK(get(specimen.sound, format::header_at("minimum reader"), 4) == 3);
  for (uint32_t old : {1u, 2u}) {
    std::vector<uint8_t> bytes = specimen.sound;
    put(bytes, format::header_at("version"), 4, old);
    samples::repair_header(bytes);
    CHECK(specimen.opened(bytes).code() == Code::corrupt);  // it wants a newer reader than itself
    put(bytes, format::header_at("minimum reader"), 4, old);
    // nor is this believed without its checksum
    CHECK(specimen.opened(bytes).code() == Code::corrupt);
    samples::repair_header(bytes);
    count_faults("facts that lie behind sound checksums");
    CHECK(specimen.opened(bytes).code() == Code::version);
  }
}

TEST_CASE("a file of the other byte order is stale") {
  Specimen specimen;
  std::vector<uint8_t> bytes = specimen.sound;
  std::reverse(bytes.begin() + format::header_at("byte order"),
               bytes.begin() + format::header_at("byte order") + 4);
  samples::repair_header(bytes);
  CHECK(specimen.opened(bytes).code() == Code::version);
}

TEST_CASE(
    "an unknown section is skipped when it is optional and makes the file stale when it is not") {
  Specimen specimen;
  std::vector<uint8_t> bytes = specimen.sound;
  const uint64_t entry = entry_of(bytes, SectionKind::bounds);
  for (uint32_t kind : {0u, 9u, 12u, 99u, 0xFFFFFFFFu}) {
    CAPTURE(kind);
    put(bytes, entry + format::entry_at("kind"), 4, kind);
    put(bytes, entry + format::entry_at("flags"), 4, 0);
    samples::repair_header(bytes);
    CHECK(specimen.opened(bytes).code() == Code::version);
    put(bytes, entry + format::entry_at("flags"), 4, format::optional_section);
    samples::repair_header(bytes);
    Status s;
    const auto file = specimen.open(bytes, &s);
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(file->sections().size() == 5);
    CHECK(file->find(SectionKind::bounds) == nullptr);
    CHECK(file->verify_all(nullptr, nullptr).ok());
  }
}

TEST_CASE("hostile section tables are refused behind sound checksums") {
  Specimen specimen;
  const uint64_t entry = entry_of(specimen.sound, SectionKind::pages);
  const uint64_t offset = get(specimen.sound, entry + format::entry_at("offset"), 8);
  struct Change {
    const char* name;
    uint64_t place;
    int bytes;
    uint64_t value;
  };
  const std::vector<Change> changes = {
      {"more sections than the table holds", format::header_at("section count"), 4, 33},
      {"four billion sections", format::header_at("section count"), 4, 0xFFFFFFFF},
      {"fewer sections", format::header_at("section count"), 4, 4},
      {"overlap with the section before", entry + format::entry_at("offset"), 8,
       offset - format::section_align},
      {"a gap", entry + format::entry_at("offset"), 8, offset + format::section_align},
      {"unaligned", entry + format::entry_at("offset"), 8, offset + 4096},
      {"over the header", entry + format::entry_at("offset"), 8, 0},
      {"past the end", entry + format::entry_at("offset"), 8, uint64_t{1} << 40},
      {"near the last address", entry + format::entry_at("offset"), 8, UINT64_MAX - 4095},
      {"larger by a byte", entry + format::entry_at("size"), 8, 20 * 4096 + 1},
      {"huge", entry + format::entry_at("size"), 8, uint64_t{1} << 62},
      {"larger than any", entry + format::entry_at("size"), 8, UINT64_MAX},
      {"a table elsewhere", entry + format::entry_at("table offset"), 8, 0},
      {"a table past the end", entry + format::entry_at("table offset"), 8, UINT64_MAX - 7},
      {"unknown flags", entry + format::entry_at("flags"), 4, 2},
      {"a kind twice", entry + format::entry_at("kind"), 4, 1},
      {"another size of file", format::header_at("file size"), 8, specimen.sound.size() + 1},
      {"no version", format::header_at("version"), 4, 0},
      {"no oldest reader", format::header_at("minimum reader"), 4, 0},
      {"a byte order that is none", format::header_at("byte order"), 4, 0x0A0B0C0E},
      {"a name without an end", format::header_at("model name") + 11, 8, 0x7878787800787878},
      {"bytes after the section table", format::header_at("sections") + 5 * format::entry_bytes, 8,
       1},
      {"bytes before the header's checksum", format::header_at("checksum") - 1, 1, 1},
  };
  for (const Change& change : changes) {
    CAPTURE(change.name);
    std::vector<uint8_t> bytes = specimen.sound;
    put(bytes, change.place, change.bytes, change.value);
    for (bool all : {false, true}) {
      all ? samples::repair(bytes) : samples::repair_header(bytes);
      count_faults("facts that lie behind sound checksums");
      const Status s = specimen.opened(bytes);
      CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
    }
  }
}

TEST_CASE("random damage with repaired checksums never leads a reader astray") {
  Specimen specimen;
  uint64_t state = 12345;
  const auto random = [&] {
    return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33;
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint8_t> bytes = specimen.sound;
    for (uint64_t i = 0; i <= random() % 4; ++i) {
      bytes[random() % 2 ? random() % 640 : random() % bytes.size()] =
          static_cast<uint8_t>(random());
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    samples::repair(bytes);
    count_faults("random damage behind repaired checksums");
    Status s;
    if (const auto file = specimen.open(bytes, &s)) touch_everything(*file);
  }
}
