// A composed session in a file: its own sequence, and references to its documents.
#include <algorithm>
#include <cinttypes>
#include <numeric>
#include <utility>

#include "cachefile/section_sizes.h"
#include "os/paths.h"
#include "session/composition.h"
#include "session/saved_documents.h"

namespace kvasir {

// Refuses to replace a document. `path` may lead to it by another name.
static Status check_no_document(const std::string& path, const Composition& composition) {
  os::File file;
  if (!os::File::open_read(path, &file).ok()) return {};  // another error is that of the save
  for (const ComposedDocument& document : composition.documents)
    if (file.is_at(document.absolute_path))
      return Status::error(Code::bad_argument,
                           "%s is one of the session's documents: save it under another name; no "
                           "file was changed",
                           path.c_str());
  return {};
}

// The section `documents` of a file at `path`.
Status Session::save_documents(const std::string& path, Array<std::byte>* out) const {
  const ComposedState& composed = sequence_.composed;
  const Composition& composition = *composed.documents;
  RETURN_IF_ERROR(check_no_document(path, composition));
  std::string whole;
  RETURN_IF_ERROR(os::absolute_path(path, &whole));
  SavedDocuments saved{composition.max_documents, !composed.scores.empty(), {}};
  const auto refused = [&](const ComposedDocument& document, const char* why) {
    return Status::error(Code::bad_argument, "%s cannot refer to %s: %s; no file was changed",
                         path.c_str(), document.path.c_str(), why);
  };
  for (const ComposedDocument& document : composition.documents) {
    DocumentReport report;
    RETURN_IF_ERROR(this->document(saved.documents.size(), &report));
    SavedDocument& d = saved.documents.emplace_back();
    d.path = os::relative_path(whole, document.absolute_path);
    if (d.path.empty()) return refused(document, "it is on another drive");
    if (d.path.size() > format::max_document_path)
      return refused(document, "the path from one to the other is longer than 1000 bytes");
    const auto is_control = [](char c) {
      return static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
    };
    if (std::any_of(d.path.begin(), d.path.end(), is_control))
      return refused(document, "its path has a control character");
    d.stamp = document.stamp;
    d.tokens = document.tokens;
    d.is_candidate = report.is_candidate, d.is_chosen = report.is_chosen;
    d.score = static_cast<float>(report.score);
  }
  Array<std::byte> bytes = encode_documents(saved);
  if (bytes.size() > small_section)
    return Status::error(Code::limit,
                         "%s: references to %zu documents take %zu bytes, more than %" PRIu64
                         "; no file was changed",
                         path.c_str(), saved.documents.size(), bytes.size(), small_section);
  *out = std::move(bytes);
  return {};
}

// Maps the documents before a sequence that was loaded.
Status Session::load_documents(const DocumentsToLoad& to) {
  RETURN_IF_ERROR(check_composable(*model_, options_));
  MemoryBudget memory = options_.memory;
  memory.bytes = to.memory_bytes;
  RETURN_IF_ERROR(check_memory_budget(memory, options_.full_precision));
  SequenceState& sequence = sequence_;
  const Turn turn = sequence.turn;
  const Chat chat = sequence.chat;
  const std::string own_instructions(instructions());
  options_.instructions = to.instructions;
  auto documents = std::make_shared<Composition>();
  documents->max_documents = to.saved.max_documents;
  std::vector<std::string> paths(to.saved.documents.size());
  for (std::size_t i = 0; i < paths.size(); ++i) {
    RETURN_IF_ERROR(find_document(to.path, to.saved, i, &paths[i]));
    if (!to.verify) continue;
    CachePeek peek;
    RETURN_IF_ERROR(CachePeek::open(paths[i], &peek));
    Progress progress(to.report);
    RETURN_IF_ERROR(peek.verify(&progress, to.cancel));
  }
  RETURN_IF_ERROR(add_documents(paths, to.cancel, {}, documents.get()));
  for (std::size_t i = 0; i < paths.size(); ++i)
    if (documents->documents[i].stamp != to.saved.documents[i].stamp)  // replaced meanwhile
      return document_has_changed(to.path, i, paths[i]);
  if (sequence.chat != chat || instructions() != own_instructions)
    return Status::error(Code::model_mismatch,
                         "%s has another chat format or other instructions than its documents: "
                         "compose them again; nothing was loaded",
                         to.path.c_str());
  if (!sequence.tokens.empty()) sequence.turn = turn;
  options_.memory.bytes = to.memory_bytes;
  RETURN_IF_ERROR(limit_documents(documents.get(), to.memory_bytes, to.cancel));
  return restore_choice(to, std::move(documents));
}

// Maps documents in place of those before the sequence. They must have the same turns.
Status Session::map_documents(std::span<const std::string> paths, const Cancel* cancel,
                              std::shared_ptr<Composition>* out) {
  auto documents = std::make_shared<Composition>();
  documents->max_documents = sequence_.composed.documents->max_documents;
  const Turn turn = sequence_.document_turn;
  const Chat chat = sequence_.chat;
  const std::string own_instructions(instructions());
  sequence_.layer_errors.clear();
  RETURN_IF_ERROR(add_documents(paths, cancel, {}, documents.get()));
  if (sequence_.document_turn != turn || sequence_.chat != chat ||
      instructions() != own_instructions)
    return Status::error(Code::model_mismatch,
                         "%s has another kind of text, chat format or instructions than the "
                         "session: compose another session; it keeps its documents",
                         paths[0].c_str());
  RETURN_IF_ERROR(limit_documents(documents.get(), options_.memory.bytes, cancel));
  *out = std::move(documents);
  return {};
}

// What map_documents() changes of a session; the destructor restores it unless released.
struct Session::KeptTurns {
  explicit KeptTurns(Session* s)
      : session(s), turn(s->sequence_.turn), document_turn(s->sequence_.document_turn),
        chat(s->sequence_.chat), instructions(s->options_.instructions),
        errors(s->sequence_.layer_errors), budget(s->sequence_.store.budget()) {}
  ~KeptTurns() {
    SequenceState& s = session->sequence_;
    if (is_released && s.tokens.empty()) return;
    s.turn = turn;
    if (is_released) return;
    s.document_turn = document_turn;
    s.chat = std::move(chat), session->options_.instructions = std::move(instructions);
    s.layer_errors = std::move(errors);
    try {
      (void)s.store.set_budget(budget, s.store.tokens(), nullptr);  // as it was
    } catch (const std::bad_alloc&) {  // the budget is set; nothing more is dropped
    }
  }

  Session* session;
  Turn turn, document_turn;
  Chat chat;
  std::optional<std::string> instructions;
  Array<float> errors;
  MemoryBudget budget;
  bool is_released = false;
};

Status Session::replace_documents(std::span<const std::string> paths, const Cancel* cancel) {
  SequenceState& s = sequence_;
  if (!s.is_composed())
    return Status::error(Code::bad_state,
                         "the session is not over several documents: compose a new one");
  if (paths.empty()) return Status::error(Code::bad_argument, "there is no document to compose");
  KeptTurns kept(this);
  std::shared_ptr<Composition> documents;
  RETURN_IF_ERROR(map_documents(paths, cancel, &documents));
  std::vector<uint32_t> all(documents->documents.size()), chosen;
  std::iota(all.begin(), all.end(), 0u);
  const std::vector<ComposedDocument>& now = documents->documents;
  for (const uint32_t i : all)  // attended before, and still there
    if (std::any_of(s.composed.chosen.begin(), s.composed.chosen.end(), [&](uint32_t old) {
          const ComposedDocument& before = s.composed.documents->documents[old];
          return now[i].absolute_path == before.absolute_path && now[i].stamp == before.stamp;
        }))
      chosen.push_back(i);
  if (chosen.empty() && !s.tokens.empty()) {  // the first one that fits
    const auto fits = [&](uint32_t i) {
      return s.tokens.size() + now[i].tokens <= options_.context;
    };
    const auto first = std::find_if(all.begin(), all.end(), fits);
    if (first != all.end()) chosen.push_back(*first);
  }
  kept.is_released = true;
  trace_.reset(), document_traces_.clear(), traced_documents_.clear();
  attended_.clear(), document_plans_.clear(), document_selectors_.clear();
  s.composed = {std::move(documents), std::move(all), {}, {}, 0, true};
  attend(std::move(chosen));
  return {};
}

// Candidates, chosen documents and scores, as they were saved.
Status Session::restore_choice(const DocumentsToLoad& to,
                               std::shared_ptr<const Composition> documents) {
  ComposedState& composed = sequence_.composed;
  composed = {std::move(documents), {}, {}, {}, 0, true};
  std::vector<uint32_t> candidates, chosen;
  std::vector<float> scores;
  for (uint32_t i = 0; i < to.saved.documents.size(); ++i) {
    const SavedDocument& document = to.saved.documents[i];
    if (document.is_candidate) candidates.push_back(i), scores.push_back(document.score);
    if (document.is_chosen) chosen.push_back(i);
  }
  RETURN_IF_ERROR(set_candidates(candidates));
  if (to.saved.has_scores) composed.scores = std::move(scores);
  attend(std::move(chosen));
  if (sequence_.positions() <= options_.context) return {};
  return Status::error(Code::context_full,
                       "%s: its documents and tokens take %" PRIu64
                       ": the session's context is %" PRIu64 "; nothing was loaded",
                       to.path.c_str(), sequence_.positions(), options_.context);
}

}  // namespace kvasir
