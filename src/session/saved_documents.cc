#include "session/saved_documents.h"

#include <bit>
#include <cstring>

#include "base/little_endian.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_rules.h"
#include "cachefile/section_sizes.h"
#include "os/os.h"
#include "os/paths.h"
#include "session/saved_store.h"

namespace kvasir {

using namespace format;

namespace {

// The places of an entry's fields.
consteval uint64_t in_entry(std::string_view name) {
  return documents_at(name) - documents_head_bytes;
}

}  // namespace

Array<std::byte> encode_documents(const SavedDocuments& documents) {
  std::size_t bytes = documents_head_bytes + documents.documents.size() * document_entry_bytes;
  for (const SavedDocument& document : documents.documents) bytes += document.path.size();
  Array<std::byte> out;
  out.resize(bytes);
  auto* const begin = reinterpret_cast<uint8_t*>(out.data());
  std::memset(begin, 0, bytes);
  store32(begin + documents_at("documents"), static_cast<uint32_t>(documents.documents.size()));
  store32(begin + documents_at("max documents"), documents.max_documents);
  store32(begin + documents_at("scores"), documents.has_scores ? documents_have_scores : 0);
  uint8_t* entry = begin + documents_head_bytes;
  uint8_t* path = entry + documents.documents.size() * document_entry_bytes;
  for (const SavedDocument& d : documents.documents) {
    store64(entry + in_entry("checksum"), d.stamp.checksum);
    store64(entry + in_entry("file size"), d.stamp.bytes);
    store64(entry + in_entry("tokens"), d.tokens);
    store32(entry + in_entry("path bytes"), static_cast<uint32_t>(d.path.size()));
    store32(entry + in_entry("flags"),
            (d.is_candidate ? document_is_candidate : 0) | (d.is_chosen ? document_is_chosen : 0));
    store32(entry + in_entry("score"), std::bit_cast<uint32_t>(d.score));
    std::memcpy(path, d.path.data(), d.path.size());
    entry += document_entry_bytes, path += d.path.size();
  }
  return out;
}

Status read_documents(const CachePeek& file, SavedDocuments* out) {
  *out = {};
  const CachePeek::Section* section = file.find(SectionKind::documents);
  if (!section) return {};
  RETURN_IF_ERROR(expect_section(file, SectionKind::documents, section->bytes));
  Array<std::byte> bytes;
  RETURN_IF_ERROR(file.read(SectionKind::documents, small_section, &bytes));
  if (const char* wrong = wrong_documents(bytes, file.identity().tokens))
    return Status::error(Code::corrupt, "%s: section 'documents' %s; nothing was loaded",
                         file.path().c_str(), wrong);
  const auto* const begin = reinterpret_cast<const uint8_t*>(bytes.data());
  out->max_documents = load32(begin + documents_at("max documents"));
  out->has_scores = load32(begin + documents_at("scores")) != 0;
  const uint32_t count = load32(begin + documents_at("documents"));
  const uint8_t* entry = begin + documents_head_bytes;
  const auto* path =
      reinterpret_cast<const char*>(entry + std::size_t{count} * document_entry_bytes);
  for (uint32_t i = 0; i < count; ++i, entry += document_entry_bytes) {
    SavedDocument& d = out->documents.emplace_back();
    d.stamp = {load64(entry + in_entry("checksum")), load64(entry + in_entry("file size"))};
    d.tokens = load64(entry + in_entry("tokens"));
    const uint32_t flags = load32(entry + in_entry("flags"));
    d.is_candidate = flags & document_is_candidate, d.is_chosen = flags & document_is_chosen;
    d.score = std::bit_cast<float>(load32(entry + in_entry("score")));
    d.path.assign(path, load32(entry + in_entry("path bytes")));
    path += d.path.size();
  }
  return {};
}

Status find_document(const std::string& path, const SavedDocuments& documents, std::size_t index,
                     std::string* out) {
  std::string whole;
  RETURN_IF_ERROR(os::absolute_path(path, &whole));
  const SavedDocument& document = documents.documents[index];
  *out = os::path_from(whole, document.path);
  if (out->empty())  // of another system, where it is relative
    return Status::error(Code::not_found,
                         "%s needs its document %zu, '%s', which is no relative path on this "
                         "system: compose the documents again; nothing was loaded",
                         path.c_str(), index + 1, document.path.c_str());
  CachePeek peek;
  const Status s = CachePeek::open(*out, &peek);
  if (s.code() == Code::not_found)
    return Status::error(Code::not_found,
                         "%s needs its document %zu, %s, which is missing: put it back, or compose "
                         "the other documents; nothing was loaded",
                         path.c_str(), index + 1, out->c_str());
  if (!s.ok() && s.code() != Code::corrupt && s.code() != Code::not_a_cache)
    return Status::error(s.code(), "%s needs its document %zu: %s; nothing was loaded",
                         path.c_str(), index + 1, s.message())
        .with_errno(s.sys_errno());
  if (s.ok() && peek.header().stamp() == document.stamp &&
      peek.identity().tokens == document.tokens)
    return {};
  return document_has_changed(path, index, *out);
}

Status document_has_changed(const std::string& path, std::size_t index,
                            const std::string& document) {
  return Status::error(Code::model_mismatch,
                       "%s needs its document %zu, %s, which has changed since it was saved: put "
                       "the old file back, or compose the documents again; nothing was loaded",
                       path.c_str(), index + 1, document.c_str());
}

}  // namespace kvasir
