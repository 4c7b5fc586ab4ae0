// The header of a cache file, read without mapping it, and small sections on request. For scans of
// many files.
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
  // Codes as for CacheFile::open. A checksum table is verified when its section is read.
  static Status open(const std::string& path, CachePeek* out);

  using Section = CacheHeader::Entry;
  const std::string& path() const { return file_.path(); }
  const CacheHeader& header() const { return header_; }
  const format::Identity& identity() const { return header_.identity; }
  uint64_t size() const { return header_.file_size; }
  const Section* find(format::SectionKind kind) const;  // the first of its kind, or null

  // The first max_bytes bytes of a section, or all of a shorter one, verified; empty without the
  // section. max_bytes bounds the memory; the section's checksum table bounds the time.
  // Code::corrupt, Code::io. Throws std::bad_alloc.
  Status read(format::SectionKind kind, uint64_t max_bytes, Array<std::byte>* out) const;
  // Code::corrupt without a section of exactly this size. Reads nothing.
  Status expect(format::SectionKind kind, uint64_t bytes) const;
  // The chain of the first tokens, as far as a text of `text` tokens can be compared with it, and
  // the number of tokens of the whole document: those that were prefilled as a document.
  // Code::version without a chain: an older library wrote the file.
  Status read_chain(uint64_t text, TokenChain* out, uint64_t* tokens) const;
  // The first max_tokens tokens, or all if there are fewer.
  Status read_tokens(uint64_t max_tokens, Array<int32_t>* out) const;
  // Verifies every byte of the file; see verify_cache().
  Status verify(Progress* progress, const Cancel* cancel) const;

  // For a caller that continues with the open file.
  os::File take_file() && { return std::move(file_); }

 private:
  os::File file_;
  CacheHeader header_;
};

// Whether a file may be left over from an interrupted save, kv_pack or kv_unpack. These write the
// magic number last, or first: its bytes are the file's first bytes, or zeros. False for an
// unreadable file.
bool may_be_unfinished(const os::File& file);

}  // namespace kvasir
