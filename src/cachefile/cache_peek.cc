#include "cachefile/cache_peek.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "base/checksum.h"
#include "base/plausible.h"
#include "cachefile/cache_verify.h"
#include "cachefile/packed_header.h"

namespace kvasir {

using namespace format;

Status CachePeek::open(const std::string& path, CachePeek* out) {
  CachePeek peek;
  RETURN_IF_ERROR(os::File::open_read(path, &peek.file_));
  uint64_t size = 0;
  RETURN_IF_ERROR(peek.file_.size(&size));
  std::array<uint8_t, header_bytes> begin;
  const auto readable = static_cast<std::size_t>(std::min(size, header_bytes));
  RETURN_IF_ERROR(peek.file_.read(0, begin.data(), readable));
  RETURN_IF_ERROR(CacheHeader::decode({begin.data(), readable}, size, path.c_str(), &peek.header_));
  *out = std::move(peek);
  return {};
}

const CachePeek::Section* CachePeek::find(SectionKind kind) const {
  const auto entries = header_.entries();
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const Section& e) { return e.kind == kind; });
  return found == entries.end() ? nullptr : &*found;
}

Status CachePeek::read(SectionKind kind, uint64_t max_bytes, Array<std::byte>* out) const {
  out->clear();
  const Section* section = find(kind);
  if (!section) return {};
  const uint64_t bytes = std::min(max_bytes, section->bytes), blocks = ceil_div(bytes, block_bytes);
  Array<uint64_t> table(blocks);
  RETURN_IF_ERROR(check_table(file_, *section, nullptr, blocks, table.data()));
  out->resize(std::min(blocks * block_bytes, section->bytes));
  RETURN_IF_ERROR(file_.read(section->offset, out->data(), out->size()));
  for (std::size_t b = 0; b < table.size(); ++b) {
    const std::size_t at = b * block_bytes,
                      size = std::min<std::size_t>(block_bytes, out->size() - at);
    if (checksum(out->data() + at, size, section->offset + at) != table[b])
      return section_damaged(file_, *section, section->offset + at);
  }
  out->resize(bytes);
  return {};
}

Status CachePeek::expect(SectionKind kind, uint64_t bytes) const {
  const Section* section = find(kind);
  if (section && section->bytes == bytes) return {};
  return Status::error(Code::corrupt,
                       "%s is damaged: section %s has %" PRIu64 " bytes where %" PRIu64 " belong",
                       file_.path().c_str(), name_of(kind), section ? section->bytes : 0, bytes);
}

Status CachePeek::read_chain(uint64_t text, TokenChain* out, uint64_t* tokens) const {
  uint64_t count = identity().tokens;
  if (const Section* read_tokens = find(SectionKind::read); read_tokens && read_tokens->bytes > 0) {
    Array<std::byte> bytes;
    RETURN_IF_ERROR(expect(SectionKind::read, sizeof count));
    RETURN_IF_ERROR(read(SectionKind::read, sizeof count, &bytes));
    std::memcpy(&count, bytes.data(), sizeof count);
  }
  const Section* section = find(SectionKind::chain);
  if (!section || section->bytes == 0)
    return Status::error(Code::version, "%s has no hashes of its tokens: an older library wrote it",
                         file_.path().c_str());
  if (count > identity().tokens)
    return Status::error(Code::corrupt,
                         "%s is damaged: section read says %" PRIu64 " of %" PRIu64 " tokens",
                         file_.path().c_str(), count, identity().tokens);
  uint64_t hashes = ceil_div(count, TokenChain::block);
  RETURN_IF_ERROR(
      expect(SectionKind::chain, claim_product({claim_sum({hashes, 1}), sizeof(uint64_t)})));
  hashes = std::min(hashes, text / TokenChain::block + 1);
  Array<std::byte> bytes;
  RETURN_IF_ERROR(read(SectionKind::chain, (1 + hashes) * sizeof(uint64_t), &bytes));
  TokenChain chain;
  chain.hashes.resize(hashes);
  std::memcpy(&chain.key, bytes.data(), sizeof chain.key);
  if (hashes > 0)
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

Status CachePeek::read_tokens(uint64_t max_tokens, Array<int32_t>* out) const {
  RETURN_IF_ERROR(expect(SectionKind::tokens, claim_product({identity().tokens, sizeof(int32_t)})));
  const uint64_t count = std::min(max_tokens, identity().tokens);
  Array<std::byte> bytes;
  RETURN_IF_ERROR(read(SectionKind::tokens, count * sizeof(int32_t), &bytes));
  out->resize(count);
  if (count > 0) std::memcpy(out->data(), bytes.data(), bytes.size());
  return {};
}

Status CachePeek::verify(Progress* progress, const Cancel* cancel) const {
  return verify_cache(file_, header_, progress, cancel);
}

}  // namespace kvasir
