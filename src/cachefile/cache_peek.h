// What a cache file says of itself, read without mapping it: the header, and small sections on
// request. For looking through many files.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/cache_header.h"
#include "cachefile/token_chain.h"
#include "os/os.h"

namespace kvasir {

class CachePeek {
 public:
  // Codes as CacheFile::open; checksum tables are looked at when a section is read.
  static Status open(const std::string& path, CachePeek* out);

  using Section = CacheHeader::Entry;
  const std::string& path() const { return file_.path(); }
  const CacheHeader& header() const { return header_; }
  const format::Identity& identity() const { return header_.identity; }
  uint64_t size() const { return header_.file_size; }
  const Section* find(format::SectionKind kind) const;  // the first of its kind, or null

  // The first `most` bytes of a section, or all of a shorter one, verified; empty when there is
  // none. Memory is bounded by `most`, time by the section's checksum table. Code::corrupt,
  // Code::io. Throws std::bad_alloc.
  Status read(format::SectionKind kind, uint64_t most, Array<std::byte>* out) const;
  // Code::corrupt where there is no such section of exactly this size. Nothing is read.
  Status expect(format::SectionKind kind, uint64_t bytes) const;
  // The chain of the first tokens, as far as a text of `text` tokens can be compared with it, and
  // of how many tokens all of it is: those that were read as a document is. Code::version where the
  // file has none: an older library wrote it.
  Status read_chain(uint64_t text, TokenChain* out, uint64_t* tokens) const;
  // The first `most` tokens, or all of fewer.
  Status read_tokens(uint64_t most, Array<int32_t>* out) const;
  // Every byte of the file; see verify_cache().
  Status verify(Progress* progress, const Cancel* cancel) const;

  // For who goes on with the open file.
  os::File take_file() && { return std::move(file_); }

 private:
  os::File file_;
  CacheHeader header_;
};

// Whether a file may be what a save, kv_pack or kv_unpack left that did not finish: they write the
// magic number last, or first: the first bytes are its bytes or zeros. False where it cannot be
// read.
bool may_be_unfinished(const os::File& file);

}  // namespace kvasir
