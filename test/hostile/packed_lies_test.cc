// Packed documents that lie or are bombs: what they promise is compared with what they hold before
// a byte is written.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>

#include "base/checksum.h"
#include "base/little_endian.h"
#include "cachefile/pack.h"
#include "fault_count.h"
#include "hostile/cache_image.h"
#include "hostile/lies.h"
#include "hostile/measure.h"
#include "os/os.h"

using namespace kvasir;
using namespace hostile;
using samples::SectionKind;

namespace {

using Bytes = std::vector<uint8_t>;

// A frame of zstd by hand, as RFC 8878 has it: of bytes as they are, or of one byte that is
// repeated.
Bytes frame(std::size_t size, const uint8_t* bytes) {
  constexpr std::size_t max_block = std::size_t{128} << 10;
  Bytes out = {0x28, 0xB5, 0x2F, 0xFD, 0xA0, 0, 0, 0, 0};  // one segment, its size in 4 bytes
  samples::put(out, 5, 4, size);
  for (std::size_t at = 0; at < size; at += max_block) {
    const std::size_t part = std::min(max_block, size - at);
    const std::size_t head = out.size();
    out.resize(head + 3);
    samples::put(
        out, head, 3,
        (at + part == size ? 1u : 0u) | (bytes ? 0u : 2u) | static_cast<uint32_t>(part) << 3);
    if (bytes) out.insert(out.end(), bytes + at, bytes + at + part);
    else out.push_back(0);
  }
  return out;
}

// A packed document with these first bytes, followed by zeros; all checksums match.
struct PackedImage {
  PackedHeader header;
  Bytes begin;

  void write(const std::string& path) const {
    static const Bytes zeros(packed::chunk_bytes);
    Bytes file(packed::header_bytes);
    PackedHeader h = header;
    h.content = 0;
    Bytes zero_frame = frame(packed::chunk_bytes, nullptr);
    for (uint64_t at = 0; at < h.document_bytes; at += packed::chunk_bytes) {
      const auto size =
          static_cast<std::size_t>(std::min(packed::chunk_bytes, h.document_bytes - at));
      Bytes plain(at < begin.size() ? size : 0);
      if (at < begin.size())
        std::memcpy(plain.data(), begin.data() + at,
                    std::min<std::size_t>(size, begin.size() - at));
      h.content = checksum(plain.empty() ? zeros.data() : plain.data(), size, h.content);
      const Bytes packed = plain.empty() && size == packed::chunk_bytes
                               ? zero_frame
                               : frame(size, plain.empty() ? nullptr : plain.data());
      const std::size_t chunk = file.size(), data = chunk + packed::chunk_header_bytes;
      file.resize(data);
      samples::put(file, chunk, 4, packed.size());
      samples::put(file, chunk + 8, 8, checksum(packed.data(), packed.size(), data));
      file.insert(file.end(), packed.begin(), packed.end());
    }
    h.packed_bytes = file.size();
    h.encode(std::span<uint8_t, packed::header_bytes>(file.data(), packed::header_bytes));
    write_file(path, file);
  }
};

uint64_t written_bytes = 0, reservations = 0;

// Counts what a call asks of the system; nothing fails.
int count(const char* operation, const char*) {
  if (std::string_view(operation) == "preallocate") ++reservations;
  if (std::string_view(operation) == "write") ++written_bytes;
  return 0;
}

struct Bomb {
  TempFolder folder;
  std::string path = folder.file("a.kvz"), back = folder.file("a.kv");

  // Refused without a byte written, or a file in the folder but the bomb.
  Status refused() {
    Status s;
    written_bytes = reservations = 0;
    os::fault = count;
    const Cost cost = measure([&] { s = unpack(path, back, nullptr, nullptr); });
    os::fault = nullptr;
    CHECK_MESSAGE(is_cheap(cost), to_text(cost));
    CHECK(written_bytes == 0);
    CHECK(reservations == 0);
    CHECK(folder.entries() == 1);
    CHECK_FALSE(s.ok());
    return s;
  }
};

CacheHeader document_of(uint64_t pages_bytes, uint64_t tokens) {
  CacheHeader header;
  header.identity = samples::identity(tokens);
  header.section_count = 1;
  header.sections[0].kind = SectionKind::pages;
  header.sections[0].version = 1;
  header.sections[0].bytes = pages_bytes;
  REQUIRE(header.lay_out());
  return header;
}

PackedImage packed_of(const CacheHeader& document) {
  PackedImage image;
  image.header.document_bytes = document.file_size;
  image.header.format_version = document.version;
  image.header.identity = document.identity;
  image.begin.resize(format::header_bytes);
  document.encode(std::span<uint8_t, format::header_bytes>(image.begin));
  return image;
}

}  // namespace

TEST_CASE("a bomb that unpacks to no cache is refused before anything is written") {
  Bomb bomb;
  PackedImage zeros;
  zeros.header.document_bytes = uint64_t{3} << 20;  // within what any file may promise
  zeros.write(bomb.path);
  CHECK(bomb.refused().code() == Code::not_a_cache);
  zeros.header.document_bytes = uint64_t{256} << 20;
  zeros.write(bomb.path);
  const Status s = bomb.refused();
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() == packed::header_at("document bytes"));
}

TEST_CASE("a bomb with a cache's header unpacks to no more than 64 times its size") {
  Bomb bomb;
  PackedImage image = packed_of(document_of(uint64_t{512} << 20, uint64_t{1} << 20));
  image.write(bomb.path);
  CHECK(bomb.refused().code() == Code::corrupt);  // 60 KB that promise 512 MB
  // A file that is long enough for its promise, in zeros that take no disk, ends where they begin.
  std::filesystem::resize_file(bomb.path, uint64_t{16} << 20);
  Bytes begin = read_file(bomb.path);
  begin.resize(packed::header_bytes);
  samples::put(begin, packed::header_at("packed bytes"), 8, uint64_t{16} << 20);
  samples::put(begin, packed::header_at("checksum"), 8,
               checksum(begin.data(), packed::header_at("checksum"), packed::header_seed));
  REQUIRE(overwrite(bomb.path, 0, begin.data(), begin.size()));
  Status s;
  const Cost cost = measure([&] { s = unpack(bomb.path, bomb.back, nullptr, nullptr); });
  CHECK_MESSAGE(is_cheap(cost), to_text(cost));
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() < uint64_t{1} << 20);
  CHECK(bomb.folder.entries() == 1);
}

TEST_CASE(
    "every number of a packed document's header, chunks and document that lies is refused for "
    "little") {
  TempFolder folder;
  const std::string path = folder.file("a.kvz"), back = folder.file("b.kv");
  const PackedImage honest = packed_of(document_of(uint64_t{1} << 20, 4096));
  honest.write(path);
  REQUIRE(unpack(path, back, nullptr, nullptr).ok());
  const Bytes file = read_file(path);
  const auto try_lie = [&](const std::string& what) {
    count_faults("lengths, counts and offsets that lie, checksums repaired");
    std::filesystem::remove(in_utf8(back));
    Status s;
    const Cost cost = measure([&] { s = unpack(path, back, nullptr, nullptr); });
    CHECK_MESSAGE(is_cheap(cost), what, ": ", to_text(cost));
    CHECK_MESSAGE((s.ok() || s.code() == Code::corrupt || s.code() == Code::version ||
                   s.code() == Code::not_a_cache),
                  what, ": ", s.message());
    CHECK(folder.entries() == (s.ok() ? 2 : 1));
    PackedHeader header;
    (void)read_packed_header(path, &header);
  };
  for (const bool in_chunk : {false, true})
    for (const format::Field& field : in_chunk
                                          ? std::span<const format::Field>(packed::chunk_fields)
                                          : std::span<const format::Field>(packed::header_fields)) {
      if (field.bytes > 8 || field.is == format::FieldIs::checksum) continue;
      const uint64_t at = (in_chunk ? packed::header_bytes : 0) + field.offset;
      for (const uint64_t lie : lies(samples::get(file, at, static_cast<int>(field.bytes)),
                                     file.size() * packed::max_ratio + packed::packed_slack,
                                     static_cast<uint32_t>(field.bytes))) {
        Bytes lying = file;
        samples::put(lying, at, static_cast<int>(field.bytes), lie);
        samples::put(lying, packed::header_at("checksum"), 8,
                     checksum(lying.data(), packed::header_at("checksum"), packed::header_seed));
        write_file(path, lying);
        try_lie(std::string(field.name) + " " + std::to_string(lie));
      }
    }
  const auto in_document = [&](const format::Field& field, uint64_t base) {
    if (field.bytes > 8 || field.is == format::FieldIs::data ||
        field.is == format::FieldIs::checksum)
      return;
    const uint64_t at = base + field.offset;
    for (const uint64_t lie : lies(samples::get(honest.begin, at, static_cast<int>(field.bytes)),
                                   uint64_t{1} << 20, static_cast<uint32_t>(field.bytes))) {
      PackedImage image = honest;
      samples::put(image.begin, at, static_cast<int>(field.bytes), lie);
      samples::repair_header(image.begin);
      image.write(path);
      try_lie("document's " + std::string(field.name) + " " + std::to_string(lie));
    }
  };
  for (const format::Field& field : format::header_fields) in_document(field, 0);
  for (const format::Field& field : format::entry_fields)
    in_document(field, format::header_at("sections"));
}

TEST_CASE("a document of zeros is packed so that it comes back") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), packed_path = folder.file("a.kvz"),
                    back = folder.file("b.kv");
  const uint64_t bytes = uint64_t{32} << 20;
  REQUIRE(samples::save(path, {{SectionKind::pages, 1, Bytes(bytes)}}, bytes / 1024).ok());
  REQUIRE(pack(path, packed_path, 1, nullptr, nullptr).ok());
  CHECK(std::filesystem::file_size(packed_path) * packed::max_ratio + packed::packed_slack >=
        std::filesystem::file_size(path));
  CHECK(std::filesystem::file_size(packed_path) < bytes / 32);
  REQUIRE(unpack(packed_path, back, nullptr, nullptr).ok());
  CHECK(read_file(back) == read_file(path));
}
