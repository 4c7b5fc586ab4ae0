// Packed documents: unpacking restores the same bits. Damage of every kind is found. Damage and
// failures leave the existing file at the path.
#include "cachefile/pack.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <functional>
#include <new>

#include "base/little_endian.h"
#include "cachefile/split_pages.h"
#include "failing_allocations.h"
#include "failing_files.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace failing_files;
using samples::Part;
using samples::SectionKind;

namespace {

using Bytes = std::vector<uint8_t>;

// Pages whose keys have something in common from token to token, as a model's have.
Bytes like_pages(std::size_t size) {
  Bytes bytes = samples::noise(size, 5);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<uint8_t>(bytes[i] % 16 + (i % 4096 < 2048 ? i % 4 * 50 : 0));
  return bytes;
}

std::vector<Part> document(std::size_t extents) {
  return {{SectionKind::state, 1, samples::noise(48, 1)},
          {SectionKind::window, 1, {}},
          {SectionKind::pages, 1, like_pages(extents * 65536)},
          {SectionKind::scales, 1, samples::noise(extents * 2048, 2)}};
}

// A saved document, where its packed copy is, and where it comes back.
struct Specimen {
  TempFolder folder;
  std::string path = folder.file("a.kv"), packed_path = folder.file("a.kvz"),
              back = folder.file("back.kv");
  Bytes plain, packed;

  explicit Specimen(const std::vector<Part>& parts = document(9), uint32_t level = 1,
                    uint64_t tokens = 7) {
    REQUIRE(samples::save(path, parts, tokens).ok());
    plain = read_file(path);
    REQUIRE(pack(path, packed_path, level, nullptr, nullptr).ok());
    packed = read_file(packed_path);
    write_file(back, {1, 2, 3});
  }
  // Unpacks damaged bytes; whatever is refused leaves what was there.
  Status unpacked(const Bytes& bytes) {
    write_file(packed_path, bytes);
    write_file(back, {1, 2, 3});
    Status s = unpack(packed_path, back, nullptr, nullptr);
    CHECK(read_file(back) == (s.ok() ? plain : Bytes{1, 2, 3}));
    CHECK(folder.entries() == 3);
    return s;
  }
};

void repair_header(Bytes& file) {
  samples::put(file, packed::header_at("checksum"), 8,
               checksum(file.data(), packed::header_at("checksum"), packed::header_seed));
}

// Where each chunk begins.
std::vector<uint64_t> chunks_of(const Bytes& file) {
  std::vector<uint64_t> out;
  for (uint64_t at = packed::header_bytes; at < file.size();
       at += packed::chunk_header_bytes + load32(&file[at]))
    out.push_back(at);
  return out;
}

void repair_chunk(Bytes& file, uint64_t at) {
  const uint64_t data = at + packed::chunk_header_bytes;
  samples::put(file, at + 8, 8, checksum(&file[data], load32(&file[at]), data));
}

}  // namespace

TEST_CASE("packing restores pages with any content") {
  for (uint32_t page_tokens : {4u, 8u, 16u, 32u, 64u}) {
    const Bytes plain = samples::noise(65536, page_tokens);
    Bytes split(65536), joined(65536);
    split_pages(page_tokens, plain.data(), split.data());
    CHECK(split != plain);
    join_pages(page_tokens, split.data(), joined.data());
    CHECK(joined == plain);
  }
  // Keys that stay the same from token to token are their first token and nothing else.
  Bytes constant(65536), split(65536);
  for (std::size_t i = 0; i < constant.size(); ++i)
    constant[i] = static_cast<uint8_t>(i % 256 / 16 * 4 + i % 4 + 1);
  split_pages(32, constant.data(), split.data());
  CHECK(std::count(split.begin(), split.begin() + 32768, 0) == 32768 - 64);
}

TEST_CASE("a packed document unpacks to the same bits") {
  for (std::size_t extents : {0u, 1u, 3u, 4u, 5u, 40u}) {
    CAPTURE(extents);
    Specimen specimen(document(extents), 1, 512 * extents);
    CHECK(specimen.unpacked(specimen.packed).ok());
    if (extents > 3) CHECK(specimen.packed.size() < specimen.plain.size() * 6 / 10);
  }
  Specimen nothing(std::vector<Part>{});
  CHECK(nothing.unpacked(nothing.packed).ok());
  Specimen odd(samples::parts(3));  // pages that are no whole extents
  CHECK(odd.unpacked(odd.packed).ok());
}

TEST_CASE("every level packs to the same document") {
  for (uint32_t level = min_level; level <= max_level; ++level) {
    CAPTURE(level);
    Specimen specimen(document(2), level);
    CHECK(specimen.unpacked(specimen.packed).ok());
    PackedHeader header;
    REQUIRE(read_packed_header(specimen.packed_path, &header).ok());
    CHECK(header.level == level);
  }
}

TEST_CASE("a packed document's header says what it holds") {
  Specimen specimen;
  PackedHeader header;
  REQUIRE(read_packed_header(specimen.packed_path, &header).ok());
  CHECK(header.packed_bytes == specimen.packed.size());
  CHECK(header.document_bytes == specimen.plain.size());
  CHECK(header.identity.tokens == 7);
  CHECK(header.identity.layers == 4);
  CHECK(header.identity.head_dim == 64);
  CHECK(std::string(header.identity.model_name) == "mini reader");
  CHECK(header.format_version == format::plain_version);
  CHECK(header.page_tokens == 32);
}

TEST_CASE("only a sound document is packed, and to another file") {
  Specimen specimen;
  CHECK(pack(specimen.path, specimen.path, 1, nullptr, nullptr).code() == Code::bad_argument);
  CHECK(unpack(specimen.packed_path, specimen.packed_path, nullptr, nullptr).code() ==
        Code::bad_argument);
  const std::string same = specimen.folder.path() + "/./a.kv",
                    same_packed = specimen.folder.path() + "//a.kvz";
  CHECK(pack(specimen.path, same, 1, nullptr, nullptr).code() == Code::bad_argument);
  CHECK(unpack(specimen.packed_path, same_packed, nullptr, nullptr).code() == Code::bad_argument);
  CHECK(read_file(specimen.path) == specimen.plain);
  CHECK(pack(specimen.folder.file("none"), specimen.packed_path, 1, nullptr, nullptr).code() ==
        Code::not_found);
  const Status again =
      pack(specimen.packed_path, specimen.folder.file("b.kvz"), 1, nullptr, nullptr);
  CHECK(again.code() == Code::not_a_cache);
  CHECK(std::string(again.message()).find("unpack it first") != std::string::npos);
  const Status plain = unpack(specimen.path, specimen.back, nullptr, nullptr);
  CHECK(plain.code() == Code::not_a_cache);
  Bytes damaged = specimen.plain;
  damaged[100] ^= 1;
  write_file(specimen.path, damaged);
  CHECK(pack(specimen.path, specimen.packed_path, 1, nullptr, nullptr).code() == Code::corrupt);
  damaged = specimen.plain;
  damaged.back() ^= 1;  // of a checksum table
  write_file(specimen.path, damaged);
  CHECK(pack(specimen.path, specimen.packed_path, 1, nullptr, nullptr).code() == Code::corrupt);
  CHECK(read_file(specimen.packed_path) == specimen.packed);
  CHECK(specimen.folder.entries() == 3);
}

TEST_CASE("packing takes no more memory for a large document") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  CacheHeader header;  // of zeros that are nowhere on the disk
  header.identity = samples::identity(1 << 24);
  header.section_count = 2;
  header.sections[0].kind = SectionKind::pages, header.sections[0].bytes = uint64_t{8} << 30;
  header.sections[1].kind = SectionKind::bounds, header.sections[1].bytes = uint64_t{1} << 30;
  REQUIRE(header.lay_out());
  for (CacheHeader::Entry& section : header.entries()) {
    const Bytes table(section.table_bytes());
    section.version = 1;
    section.table_checksum = checksum(table.data(), table.size(), section.table_offset);
  }
  Bytes begin(format::header_bytes);
  header.encode(std::span<uint8_t, format::header_bytes>(begin));
  write_file(path, begin);
  std::filesystem::resize_file(path, header.file_size);
  Progress stop([](uint64_t, uint64_t) { return 1; });  // when everything is there that is needed
  FailingAllocations allocations(1 << 30, true);
  CHECK(pack(path, folder.file("a.kvz"), 1, &stop, nullptr).code() == Code::cancelled);
  CHECK(allocations.largest() >= packed::chunk_bytes);
  CHECK(allocations.largest() < 1 << 20);
}

TEST_CASE("a flipped bit of a packed header is found, also with its checksum made to match") {
  Specimen specimen(document(1));
  for (uint64_t bit = 0; bit < packed::header_bytes * 8; ++bit) {
    CAPTURE(bit);
    Bytes file = specimen.packed;
    file[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    count_faults("bits flipped");
    const Status s = specimen.unpacked(file);
    CHECK((s.code() == Code::corrupt || (bit / 8 < 8 && s.code() == Code::not_a_cache)));
    CHECK(s.message()[0] != 0);
    if (bit / 8 >= packed::header_at("checksum")) continue;
    repair_header(file);
    count_faults("bits flipped, checksums repaired");
    const Status repaired = specimen.unpacked(file);
    if (repaired.ok()) {  // what is for people, or fewer pages than whole extents have
      const uint64_t place = bit / 8;
      CHECK(
          ((place >= packed::header_at("level") && place < packed::header_at("packed bytes")) ||
           (place >= packed::header_at("version") && place < packed::header_at("minimum reader")) ||
           (place >= packed::header_at("pages bytes") &&
            place < packed::header_at("pages bytes") + 2)));
    } else if (bit / 8 >= 8) {
      CHECK((repaired.code() == Code::corrupt || repaired.code() == Code::version ||
             repaired.code() == Code::no_space));
    }
  }
}

TEST_CASE(
    "a flipped bit of a packed body is found at its chunk, also with the chunk's checksum made to "
    "match" *
    doctest::test_suite("slow")) {
  Specimen specimen(document(9));
  const std::vector<uint64_t> chunks = chunks_of(specimen.packed);
  REQUIRE(chunks.size() > 2);
  for (uint64_t at = packed::header_bytes; at < specimen.packed.size();
       at += at % 4096 < 64 ? 1 : 1009) {
    CAPTURE(at);
    Bytes file = specimen.packed;
    file[at] ^= static_cast<uint8_t>(1u << at % 8);
    count_faults("bits flipped");
    const Status s = specimen.unpacked(file);
    CHECK(s.code() == Code::corrupt);
    const uint64_t chunk = *(std::upper_bound(chunks.begin(), chunks.end(), at) - 1);
    CHECK(s.offset() == chunk);
    if (at - chunk < packed::chunk_header_bytes) continue;
    repair_chunk(file, chunk);
    count_faults("bits flipped, checksums repaired");
    CHECK(specimen.unpacked(file).code() == Code::corrupt);
  }
}

TEST_CASE(
    "a packed file that is cut off or has something at its end is refused, also when its header "
    "agrees") {
  Specimen specimen(document(5));
  for (std::size_t size = 0; size < specimen.packed.size(); size += size < 300 ? 1 : 997) {
    CAPTURE(size);
    Bytes file(specimen.packed.begin(),
               specimen.packed.begin() + static_cast<std::ptrdiff_t>(size));
    const Status s = specimen.unpacked(file);
    CHECK(s.code() == (size == 0 ? Code::not_a_cache : Code::corrupt));
    count_faults("file cut, or with something at its end");
    if (size < packed::header_bytes) continue;
    samples::put(file, packed::header_at("packed bytes"), 8, size);
    repair_header(file);
    CHECK(specimen.unpacked(file).code() == Code::corrupt);
  }
  for (std::size_t more : {1u, 16u, 4096u}) {
    Bytes file = specimen.packed;
    file.resize(file.size() + more);
    count_faults("file cut, or with something at its end");
    CHECK(specimen.unpacked(file).offset() == specimen.packed.size());
    samples::put(file, packed::header_at("packed bytes"), 8, file.size());
    repair_header(file);
    CHECK(specimen.unpacked(file).code() == Code::corrupt);
  }
}

TEST_CASE("chunks that changed places, and chunks of another document, are found") {
  Specimen specimen(document(13));
  const std::vector<uint64_t> chunks = chunks_of(specimen.packed);
  const auto at = [](Bytes& file, uint64_t i) {
    return file.begin() + static_cast<std::ptrdiff_t>(i);
  };
  Bytes swapped = specimen.packed;
  count_faults("parts swapped, doubled or zeroed", 3);
  std::rotate(at(swapped, chunks[0]), at(swapped, chunks[1]), at(swapped, chunks[2]));
  CHECK(specimen.unpacked(swapped).code() == Code::corrupt);
  for (uint64_t chunk : chunks_of(swapped)) repair_chunk(swapped, chunk);
  CHECK(specimen.unpacked(swapped).code() == Code::not_a_cache);  // what comes first is no header
  swapped = specimen.packed;
  std::rotate(at(swapped, chunks[1]), at(swapped, chunks[2]), at(swapped, chunks[3]));
  for (uint64_t chunk : chunks_of(swapped)) repair_chunk(swapped, chunk);
  CHECK(specimen.unpacked(swapped).code() == Code::corrupt);
}

TEST_CASE(
    "a packed file that promises too little, too much or the impossible is refused before it fills "
    "a disk") {
  Specimen specimen(document(9));
  const auto size = static_cast<uint64_t>(specimen.plain.size());
  for (uint64_t lie :
       {uint64_t{0}, uint64_t{1}, size - 1, size + 1, size / 2, size - 65536, size + (1 << 18),
        size * 50, uint64_t{1} << 40, uint64_t{1} << 62, UINT64_MAX}) {
    CAPTURE(lie);
    Bytes file = specimen.packed;
    count_faults("facts that lie behind sound checksums");
    samples::put(file, packed::header_at("document bytes"), 8, lie);
    repair_header(file);
    CHECK(specimen.unpacked(file).code() == Code::corrupt);
  }
}

TEST_CASE("a packed file of a newer or a too old version is distinguished from a damaged one") {
  Specimen specimen(document(1));
  Bytes file = specimen.packed;
  samples::put(file, packed::header_at("version"), 4, 9);
  samples::put(file, packed::header_at("reserved"), 4, 77);  // what newer versions may use
  repair_header(file);
  CHECK(specimen.unpacked(file).ok());
  samples::put(file, packed::header_at("minimum reader"), 4, packed::version + 1);
  repair_header(file);
  CHECK(specimen.unpacked(file).code() == Code::version);
  Bytes old = specimen.packed;  // from before the first release
  samples::put(old, packed::header_at("version"), 4, 1);
  samples::put(old, packed::header_at("minimum reader"), 4, 1);
  repair_header(old);
  CHECK(specimen.unpacked(old).code() == Code::version);
  for (const Bytes& begin : {Bytes{0x0B}, Bytes{0xC2, 0x8B}, Bytes{0xEF, 0xBF, 0xBD}}) {
    Bytes text = begin;
    text.insert(text.end(), specimen.packed.begin() + 1, specimen.packed.end());
    const Status s = specimen.unpacked(text);
    CHECK(s.code() == Code::corrupt);
    CHECK(std::string(s.message()).find("as binary") != std::string::npos);
  }
}

TEST_CASE("packing and unpacking that are stopped anywhere leave the existing file") {
  Specimen specimen(document(9));
  for (const bool packing : {true, false}) {
    const std::string& target = packing ? specimen.packed_path : specimen.back;
    for (int stop_at = 0; stop_at < 2; ++stop_at) {
      write_file(target, packing ? Bytes{1} : Bytes{2});
      if (!packing) write_file(specimen.packed_path, specimen.packed);
      int calls = 0;
      uint64_t last = 0;
      Progress progress([&](uint64_t done, uint64_t total) {
        CHECK(done >= last);
        CHECK(total == specimen.plain.size());
        last = done;
        return stop_at == 0 || done == total ? 1 : (++calls, 0);
      });
      const Status s = packing ? pack(specimen.path, target, 1, &progress, nullptr)
                               : unpack(specimen.packed_path, target, &progress, nullptr);
      CHECK(s.code() == Code::cancelled);
      CHECK(read_file(target).size() == 1);
      CHECK(specimen.folder.entries() == 3);
    }
    Cancel cancel;
    cancel.fire();
    const Status s = packing ? pack(specimen.path, target, 1, nullptr, &cancel)
                             : unpack(specimen.packed_path, target, nullptr, &cancel);
    CHECK(s.code() == Code::cancelled);
    CHECK(specimen.folder.entries() == 3);
  }
}

TEST_CASE("packing and unpacking whose Nth file operation fails leave the existing file") {
  Specimen specimen(document(5));
  const std::size_t descriptors = open_descriptors();
  WithFault fault(planned);
  for (const bool packing : {true, false}) {
    const std::string& target = packing ? specimen.packed_path : specimen.back;
    for (int error : {EIO, ENOSPC, EMFILE}) {
      for (bool once : {true, false}) {
        for (long n = 0;; ++n) {
          CAPTURE(n);
          write_file(target, {1});
          if (!packing) write_file(specimen.packed_path, specimen.packed);
          plan = {n, once, error};
          const Status s = packing ? pack(specimen.path, target, 1, nullptr, nullptr)
                                   : unpack(specimen.packed_path, target, nullptr, nullptr);
          const bool reached = plan.reached();
          plan = {};
          CHECK(specimen.folder.entries() == 3);
          CHECK(open_descriptors() == descriptors);
          const Bytes there = read_file(target);
          const bool is_new = there == (packing ? specimen.packed : specimen.plain);
          CHECK((is_new || there == Bytes{1}));
          if (!reached) {
            CHECK(s.ok());
            CHECK(is_new);
            CHECK(n > 8);
            break;
          }
          CHECK(s.code() == (error == ENOSPC   ? Code::no_space
                             : error == EMFILE ? Code::limit
                                               : Code::io));
          CHECK(s.sys_errno() == error);
        }
      }
    }
  }
}

TEST_CASE("packing goes on after interruptions and short transfers") {
  Specimen specimen(document(2));
  for (os::Fault hook : {interrupt_every_second, transfer_in_parts}) {
    const WithFault fault(hook);
    count_faults("interruptions or short transfers", 2);
    CHECK(pack(specimen.path, specimen.packed_path, 1, nullptr, nullptr).ok());
    CHECK(unpack(specimen.packed_path, specimen.back, nullptr, nullptr).ok());
    CHECK(read_file(specimen.back) == specimen.plain);
  }
}

TEST_CASE("packing and unpacking without memory leave the existing file") {
  Specimen specimen(document(2));
  for (const bool packing : {true, false}) {
    for (bool once : {true, false}) {
      for (long n = 0;; ++n) {
        CAPTURE(n);
        write_file(specimen.packed_path, specimen.packed);
        write_file(specimen.back, {1, 2, 3});
        // only the folder's sync was left, and the message says so
        bool failed = false, reached, in_place = false;
        {
          FailingAllocations failing(n, once);
          try {
            const Status s = packing
                                 ? pack(specimen.path, specimen.packed_path, 1, nullptr, nullptr)
                                 : unpack(specimen.packed_path, specimen.back, nullptr, nullptr);
            failed = !s.ok();
            in_place = failed &&
                       std::string_view(s.message()).find("is written") != std::string_view::npos;
          } catch (const std::bad_alloc&) {
            failed = true;
          }
          reached = failing.reached();
        }
        CHECK(failed == reached);
        CHECK(specimen.folder.entries() == 3);
        CHECK(read_file(specimen.packed_path) == specimen.packed);
        const Bytes back = read_file(specimen.back);
        // nor was there memory to say it
        const bool without_words = failed && !once && back == specimen.plain;
        CHECK((without_words ||
               back == (packing || (failed && !in_place) ? Bytes{1, 2, 3} : specimen.plain)));
        if (!reached) {
          CHECK(n > 2);
          break;
        }
      }
    }
  }
}
