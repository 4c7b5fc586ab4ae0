// The documents of a composed session in a cache file: section `documents`. The file refers to
// their files and holds the session's own sequence.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/cache_header.h"
#include "cachefile/cache_peek.h"

namespace kvasir {

struct SavedDocument {
  std::string path;  // from the folder of the file, with slashes
  FileStamp stamp;   // of the document's file
  uint64_t tokens = 0;
  bool is_candidate = false, is_chosen = false;
  float score = -1;  // of a candidate, where the documents have scores
};

struct SavedDocuments {
  uint32_t max_documents = 0;  // as Composition
  bool has_scores = false;
  std::vector<SavedDocument> documents;  // none: the file has a sequence alone
};

// Whether the file is of a composed session.
inline bool refers_to_documents(const CachePeek& file) {
  return file.find(format::SectionKind::documents) != nullptr;
}

Array<std::byte> encode_documents(const SavedDocuments& documents);
// Code::corrupt, Code::version, Code::io.
Status read_documents(const CachePeek& file, SavedDocuments* out);

// What Session::load() makes a composed session of, besides its own sequence.
struct DocumentsToLoad {
  const std::string& path;  // of the file
  const SavedDocuments& saved;
  uint64_t memory_bytes = 0;                // of all documents and the sequence; 0: no limit
  std::optional<std::string> instructions;  // that the caller expects
  bool verify = false;                      // each document's file
  const Cancel* cancel = nullptr;
  Progress::Report report;  // of verifying, file by file
};

// The absolute path of a document, and whether its file is there and the same. The message names
// both files. path: of the file that refers to it.
Status find_document(const std::string& path, const SavedDocuments& documents, std::size_t index,
                     std::string* out);
Status document_has_changed(const std::string& path, std::size_t index,
                            const std::string& document);

}  // namespace kvasir
