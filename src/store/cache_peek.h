// What a cache file says of itself, read without mapping it: the header, and small sections on request. For looking through many files.
#pragma once

#include <cstdint>
#include <string>

#include "base/memory.h"
#include "base/status.h"
#include "os/os.h"
#include "store/cache_header.h"
#include "store/token_chain.h"

namespace kvasir {

class CachePeek {
 public:
  // Codes as CacheFile::open; checksum tables are looked at when a section is read.
  static Status open(const std::string& path, CachePeek* out);

  const format::Identity& identity() const { return header_.identity; }
  uint64_t size() const { return header_.file_size; }

  // All of a section, verified; empty when there is none. Code::corrupt, Code::io. Throws std::bad_alloc.
  Status read(format::SectionKind kind, Array<std::byte>* out) const;
  // And of how many tokens: those that were read as a document is. Code::version where the file has none: an older library wrote it.
  Status read_chain(TokenChain* out, uint64_t* tokens) const;
  Status read_tokens(Array<int32_t>* out) const;

 private:
  os::File file_;
  CacheHeader header_;
};

// Whether a file may be what a save, kv_pack or kv_unpack left that did not finish: they write the
// magic number last, or first: the first bytes are its bytes or zeros. False where it cannot be read.
bool may_be_unfinished(const os::File& file);

}  // namespace kvasir
