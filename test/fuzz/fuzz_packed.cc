// Any bytes as a packed document: unpack() restores what the header says or refuses, with bounded
// memory and nothing left behind.
//
// An input is one byte of modes and a file, whose checksums are made to match on request, or a
// fuzzer would never pass the first of them.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "../store/cache_samples.h"
#include "../temp_folder.h"
#include "base/memory.h"
#include "cachefile/pack.h"
#include "replay.h"

using namespace kvasir;
using kvasir::test::require;
namespace fs = std::filesystem;
namespace place = kvasir::packed;

namespace {

enum Mode : uint8_t {
  repair = 1,   // make the file's size and the header's and the chunks' checksums match
  shorten = 2,  // then cut the last byte
};

constexpr uint64_t largest_document = uint64_t{8} << 20;
constexpr std::size_t largest_piece = std::size_t{512} << 10;  // that may be asked for at once

void repair_all(std::vector<uint8_t>& file) {
  if (file.size() < place::header_bytes) return;
  samples::put(file, place::header_at("packed bytes"), 8, file.size());
  samples::put(file, place::header_at("document bytes"), 8,
               samples::get(file, place::header_at("document bytes"), 8) % largest_document);
  samples::put(file, place::header_at("checksum"), 8,
               checksum(file.data(), place::header_at("checksum"), place::header_seed));
  for (uint64_t at = place::header_bytes; at + place::chunk_header_bytes <= file.size();) {
    const uint64_t size = samples::get(file, at, 4), data = at + place::chunk_header_bytes;
    if (size > file.size() - data) return;
    samples::put(file, at + 8, 8, checksum(&file[at] + place::chunk_header_bytes, size, data));
    at = data + size;
  }
}

std::size_t largest_allocation = 0;
bool note_allocation(std::size_t size) {
  largest_allocation = std::max(largest_allocation, size);
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  static const TempFolder scratch;
  if (size == 0) return 0;
  std::vector<uint8_t> bytes(data + 1, data + size);
  if (data[0] & repair) repair_all(bytes);
  if (data[0] & shorten && !bytes.empty()) bytes.pop_back();
  const std::string path = scratch.file("packed"), back = scratch.file("back");
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));

  PackedHeader header;
  const Status read = read_packed_header(path, &header);
  if (read.ok() && header.document_bytes > largest_document) return 0;  // sound, but slow
  largest_allocation = 0;
  allocation_fault = note_allocation;
  const Status status = unpack(path, back, nullptr, nullptr);
  allocation_fault = nullptr;
  require(largest_allocation <= largest_piece, "memory is bounded whatever the file says");
  require(read.ok() || status.code() == read.code(), "the header is refused alike");
  require(status.ok() == fs::exists(back), "a document or none");
  require(scratch.entries() == (status.ok() ? 2 : 1), "nothing is left behind");
  if (status.ok()) {
    require(fs::file_size(back) == header.document_bytes, "the document has its size");
    fs::remove(back);
    return 0;
  }
  require(status.message()[0] != 0, "a refusal says why");
  require(status.code() == Code::not_a_cache || status.code() == Code::version ||
              status.code() == Code::corrupt,
          "a refusal says what the caller can do");
  return 0;
}
