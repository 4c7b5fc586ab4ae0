// Documents before a sequence that were prefilled apart. Each is a session of a mapped file that
// runs nothing: it holds the pages and what its tokens spell. Forks share them; nothing changes
// them.
//
//   document 1 | document 2 | ... | the session's own sequence: questions and answers
//
// The own sequence has positions of its own, from 0 on. A query meets a document's keys turned by
// the tokens between (engine/document_attention.cc), so documents may come and go without a change
// of any key.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "session/session.h"

namespace kvasir {

struct ComposedDocument {
  std::string path;
  std::shared_ptr<Session> session;  // null: the session itself, which has no other
  uint64_t tokens = 0;               // of the document
  uint32_t skipped = 0;              // of its opening, which only the first one shows
  std::string absolute_path = {};    // when it was mapped
  FileStamp stamp = {};              // of its file
};

struct Composition {
  std::vector<ComposedDocument> documents;
  uint32_t max_documents = 0;  // that an answer attends; 0: up to 8, always chosen
};

// [layers] those whose queries choose documents, by the layers' errors (layer_probe.h): with at
// least half of the largest error, four at most. All, if there are not so many errors.
std::vector<bool> retrieval_layers(std::span<const float> errors, uint32_t layers);

}  // namespace kvasir
