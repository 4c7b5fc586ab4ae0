#include "store/cache_peek.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "base/checksum.h"
#include "store/packed_header.h"

namespace kvasir {

using namespace format;

Status CachePeek::open(const std::string& path, CachePeek* out) {
  CachePeek peek;
  if (Status s = os::File::open_read(path, &peek.file_); !s.ok()) return s;
  uint64_t size = 0;
  if (Status s = peek.file_.size(&size); !s.ok()) return s;
  std::array<uint8_t, header_bytes> begin;
  const auto readable = static_cast<std::size_t>(std::min(size, header_bytes));
  if (Status s = peek.file_.read(0, begin.data(), readable); !s.ok()) return s;
  if (Status s = CacheHeader::decode({begin.data(), readable}, size, path.c_str(), &peek.header_); !s.ok()) return s;
  *out = std::move(peek);
  return {};
}

Status CachePeek::read(SectionKind kind, Array<std::byte>* out) const {
  out->clear();
  const auto entries = header_.entries();
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const CacheHeader::Entry& e) { return e.kind == kind; });
  if (found == entries.end()) return {};
  const auto damaged = [&](uint64_t offset) {
    return Status::error(Code::corrupt, "%s is damaged: section %s at byte %" PRIu64, file_.path().c_str(), name_of(kind), offset).with_offset(offset);
  };
  Array<uint64_t> table(found->blocks());
  if (Status s = file_.read(found->table_offset, table.data(), found->table_bytes()); !s.ok()) return s;
  if (checksum(table.data(), found->table_bytes(), found->table_offset) != found->table_checksum) return damaged(found->table_offset);
  out->resize(found->bytes);
  if (Status s = file_.read(found->offset, out->data(), out->size()); !s.ok()) return s;
  for (std::size_t b = 0; b < table.size(); ++b) {
    const std::size_t at = b * block_bytes, size = std::min<std::size_t>(block_bytes, out->size() - at);
    if (checksum(out->data() + at, size, found->offset + at) != table[b]) return damaged(found->offset + at);
  }
  return {};
}

Status CachePeek::read_chain(TokenChain* out, uint64_t* tokens) const {
  Array<std::byte> bytes, read_tokens;
  if (Status s = read(SectionKind::chain, &bytes); !s.ok()) return s;
  if (Status s = read(SectionKind::read, &read_tokens); !s.ok()) return s;
  uint64_t count = identity().tokens;
  if (read_tokens.size() == sizeof count) std::memcpy(&count, read_tokens.data(), sizeof count);
  const uint64_t hashes = ceil_div(count, TokenChain::block);
  if (bytes.empty()) return Status::error(Code::version, "%s has no hashes of its tokens: an older library wrote it", file_.path().c_str());
  if (count > identity().tokens || bytes.size() != (1 + hashes) * sizeof(uint64_t))
    return Status::error(Code::corrupt, "%s is damaged: section chain has %zu bytes", file_.path().c_str(), bytes.size());
  TokenChain chain;
  chain.hashes.resize(hashes);
  std::memcpy(&chain.key, bytes.data(), sizeof chain.key);
  std::memcpy(chain.hashes.data(), bytes.data() + sizeof chain.key, hashes * sizeof(uint64_t));
  *out = std::move(chain);
  *tokens = count;
  return {};
}

bool may_be_unfinished(const os::File& file) {
  std::array<uint8_t, magic.size()> begin{};
  uint64_t size = 0;
  if (!file.size(&size).ok()) return false;
  const auto count = static_cast<std::size_t>(std::min<uint64_t>(size, begin.size()));
  if (!file.read(0, begin.data(), count).ok()) return false;
  for (std::size_t i = 0; i < begin.size(); ++i)  // a power cut may lose any of them
    if (begin[i] != 0 && begin[i] != magic[i] && begin[i] != packed::magic[i]) return false;
  return true;
}

Status CachePeek::read_tokens(Array<int32_t>* out) const {
  Array<std::byte> bytes;
  if (Status s = read(SectionKind::tokens, &bytes); !s.ok()) return s;
  if (bytes.size() != identity().tokens * sizeof(int32_t))
    return Status::error(Code::corrupt, "%s is damaged: section tokens has %zu bytes", file_.path().c_str(), bytes.size());
  out->resize(identity().tokens);
  std::memcpy(out->data(), bytes.data(), bytes.size());
  return {};
}

}  // namespace kvasir
