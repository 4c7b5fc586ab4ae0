// Any bytes as a cache file: CacheFile answers, and what it opens keeps every promise of
// cache_file.h.
//
// A file is large and mostly zeros and checksums, so an input is a recipe: one byte of modes, the
// header's beginning, and bytes for the sections. Checksums are made to match, or a fuzzer would
// never pass the first of them.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "../store/cache_samples.h"
#include "../temp_folder.h"
#include "base/memory.h"
#include "cachefile/cache_file.h"
#include "replay.h"
#include "session/saved_documents.h"

using namespace kvasir;
using kvasir::test::require;
namespace place = kvasir::format;

namespace {

constexpr std::size_t header_part = 640;  // of an input: up to the sixth section's entry
constexpr uint64_t largest_file = uint64_t{1} << 20;
constexpr uint64_t largest_section = 100'000;

enum Mode : uint8_t {
  arrange = 1,  // put sections, tables and the file's end where the format wants them
  repair = 2,   // make the checksums match
  shorten = 4,  // then cut the last byte
  damage = 8,   // then flip a bit of the first section
};

const std::string& held(const std::vector<uint8_t>& bytes) {
  static const TempFolder folder;
  static const std::string path = folder.file("file");
  write_file(path, bytes);
  return path;
}

// Says where everything must be: written from docs/file-format.md, not from the library.
void arrange_sections(std::vector<uint8_t>& file) {
  const uint64_t count =
      std::min<uint64_t>(samples::get(file, place::header_at("section count"), 4), 6);
  samples::put(file, place::header_at("section count"), 4, count);
  uint64_t end = 4096;
  const auto entry = [](uint64_t i) { return place::header_at("sections") + i * 64; };
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t bytes =
        samples::get(file, entry(i) + place::entry_at("size"), 8) % largest_section;
    const uint64_t offset = (end + 65535) / 65536 * 65536;
    samples::put(file, entry(i) + place::entry_at("size"), 8, bytes);
    samples::put(file, entry(i) + place::entry_at("offset"), 8, offset);
    end = offset + bytes;
  }
  end = (end + 4095) / 4096 * 4096;
  for (uint64_t i = 0; i < count; ++i) {
    samples::put(file, entry(i) + place::entry_at("table offset"), 8, end);
    end += (samples::get(file, entry(i) + place::entry_at("size"), 8) + 4095) / 4096 * 8;
  }
  samples::put(file, place::header_at("file size"), 8, end);
}

std::vector<uint8_t> cook(const uint8_t* data, std::size_t size, uint8_t modes) {
  std::vector<uint8_t> file(place::header_bytes);
  const std::size_t head = std::min(size, header_part);
  std::copy_n(data, head, file.begin());
  if (modes & arrange) arrange_sections(file);
  file.resize(std::clamp<uint64_t>(samples::get(file, place::header_at("file size"), 8), head,
                                   largest_file));
  if (size > head && file.size() > place::section_align) {
    const std::size_t body = std::min(size - head, file.size() - place::section_align);
    std::copy_n(data + head, body,
                file.begin() + static_cast<std::ptrdiff_t>(place::section_align));
  }
  if (modes & repair) samples::repair(file);
  if (modes & shorten && !file.empty()) file.pop_back();
  if (modes & damage && file.size() > place::section_align) file[place::section_align] ^= 1;
  return file;
}

std::size_t largest_allocation = 0;
bool note_allocation(std::size_t size) {
  largest_allocation = std::max(largest_allocation, size);
  return false;
}

// Whether all blocks of a section are as their checksums say.
bool read_section(const CacheFile& file, const CacheFile::Section& section) {
  require(section.offset % place::section_align == 0 && section.offset <= file.size() &&
              section.bytes <= file.size() - section.offset,
          "sections lie within the file");
  require(!file.check(section, section.bytes, 1) && !file.check(section, 1, UINT64_MAX),
          "ranges are limited");
  bool intact = true;
  for (uint64_t at = 0; at < section.bytes; at += 4096) intact &= file.check(section, at, 1);
  require(file.check(section, 0, section.bytes) == intact, "a section is as intact as its blocks");
  const Status whole = file.check_section(section);
  require(whole.ok() == intact && (intact || whole.code() == Code::corrupt),
          "damage is reported as damage");
  return intact;
}

// The documents that a file names are refused, or are those of its bytes.
void read_names(const std::string& path) {
  CachePeek peek;
  require(CachePeek::open(path, &peek).ok(), "what can be mapped can be read");
  SavedDocuments documents;
  const Status s = read_documents(peek, &documents);
  if (!s.ok()) {
    require(s.code() == Code::corrupt || s.code() == Code::version, "a refusal says what is wrong");
    return;
  }
  if (documents.documents.empty()) return;
  Array<std::byte> bytes;
  require(peek.read(place::SectionKind::documents, UINT64_MAX, &bytes).ok(), "a section");
  const Array<std::byte> again = encode_documents(documents);
  require(std::equal(again.begin(), again.end(), bytes.begin(), bytes.end()),
          "what was read is written as it was");
  for (std::size_t i = 0; i < documents.documents.size(); ++i) {
    std::string found;
    require(!find_document(path, documents, i, &found).ok() && found.front() == '/',
            "no document is there");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const uint8_t modes = data[0];
  const std::vector<uint8_t> bytes = cook(data + 1, size - 1, modes);
  const std::string& path = held(bytes);

  largest_allocation = 0;
  allocation_fault = note_allocation;
  std::shared_ptr<const CacheFile> file;
  const Status status = CacheFile::open(path, &file);
  allocation_fault = nullptr;
  require(largest_allocation <= bytes.size() + 64, "memory is bounded by the file's size");
  require(status.ok() == (file != nullptr), "a file or an error");
  if (!file) {
    require(status.message()[0] != 0, "a refusal says why");
    require(status.code() == Code::not_a_cache || status.code() == Code::version ||
                status.code() == Code::corrupt,
            "a refusal says what the caller can do");
    return 0;
  }
  require(file->size() == bytes.size(), "the size is exact");
  read_names(path);
  bool intact = true;
  for (const CacheFile::Section& section : file->sections()) {
    intact &= read_section(*file, section);
    require(file->find(section.kind) != nullptr, "a section is found by its kind");
  }
  if (modes == (arrange | repair)) require(intact, "sound blocks are accepted");
  const Status all = file->verify_all(nullptr, nullptr);
  require(intact || !all.ok(), "verify_all sees what check sees");
  return 0;
}
