// Loads a session by mapping its file: the data besides its store (saved_store.h).
#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "cachefile/cache_file.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_floats.h"
#include "session/saved_documents.h"
#include "session/saved_drafts.h"
#include "session/saved_states.h"
#include "session/saved_windows.h"
#include "session/session.h"

namespace kvasir {

using format::SectionKind;

namespace {

uint64_t get(const std::byte* at, std::size_t bytes) {
  uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(at[i]) << (8 * i);
  return value;
}

// Loads the queries of a section, after its first `head` bytes. tokens: of the sequence when it was
// saved. A missing section leaves *out unchanged.
Status load_queries(const CacheFile& file, SectionKind kind, uint64_t head, uint64_t tokens,
                    ThreadPool* pool, const Cancel* cancel, RecentQueries* out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes == 0) return {};
  const uint64_t token = out->token_floats() * sizeof(float), bytes = section->bytes - head;
  const uint64_t max_queries = std::min<uint64_t>(RecentQueries::capacity, tokens);
  if (bytes % token || bytes / token > max_queries)
    return Status::error(Code::corrupt,
                         "%s: section '%s' has %" PRIu64 " bytes, not a multiple for up to %" PRIu64
                         " queries; nothing was loaded",
                         file.path().c_str(), format::name_of(kind), section->bytes, max_queries);
  RETURN_IF_ERROR(expect(file, kind, section->bytes, &section));
  out->restore(static_cast<uint32_t>(bytes / token), tokens);
  return copy_floats(file, *section, head, out->saved_rows(), out->width(), pool, cancel,
                     [&](uint64_t row) { return out->saved_row(row); });
}

// Loads a number of tokens, at most the sequence's. A missing section leaves *out unchanged.
Status load_count(const CacheFile& file, SectionKind kind, const SectionFacts& facts,
                  uint64_t* out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes == 0) return {};
  const std::byte* at = nullptr;
  RETURN_IF_ERROR(take(file, kind, sizeof *out, facts, nullptr, nullptr, &at));
  std::memcpy(out, at, sizeof *out);
  return {};
}

}  // namespace

Status Session::load_spelling(const CacheFile& file, const SectionFacts& facts) {
  const CacheFile::Section* section = file.find(SectionKind::spelling);
  if (!section || section->bytes == 0) return {};
  const std::byte* at = nullptr;
  RETURN_IF_ERROR(
      take(file, SectionKind::spelling, section->bytes, facts, pool_.get(), nullptr, &at));
  Array<Spelling::Entry> entries(section->bytes / sizeof(Spelling::Entry));
  std::memcpy(entries.data(), at, section->bytes);
  sequence_.spelling.restore(entries);
  return {};
}

Status Session::load_observed(const CacheFile& file, const SectionFacts& facts,
                              const Cancel* cancel) {
  const CacheFile::Section* section = file.find(SectionKind::observed);
  if (!section || section->bytes == 0) return {};
  RETURN_IF_ERROR(expect(file, SectionKind::observed, section->bytes, &section));
  std::array<std::byte, format::observed_head_bytes> head{};
  RETURN_IF_ERROR(file.copy(
      *section, 0, std::min<uint64_t>(section->bytes, format::observed_head_bytes), head.data()));
  const uint64_t end = section->bytes < format::observed_head_bytes ? 0 : get(head.data(), 8),
                 pages = section->bytes < format::observed_head_bytes ? 0 : get(head.data() + 8, 8);
  if (const char* what = wrong_observed(end, pages, facts))
    return Status::error(Code::corrupt, "%s: section 'observed' %s; nothing was loaded",
                         file.path().c_str(), what);
  const ModelConfig& c = model_->config();
  sequence_.observed = {RecentQueries(c.layers, c.heads, c.head_dim), static_cast<uint32_t>(pages)};
  return load_queries(file, SectionKind::observed, format::observed_head_bytes, end, pool_.get(),
                      cancel, &sequence_.observed.queries);
}

// Uses the chat format of the saved turns, not the one recognised in the model. Refuses another
// format that the caller chose: otherwise turns of the file and questions would have two formats,
// and no answer would show it.
Status Session::use_chat(const ChatRecord& record, const char* path) {
  if (record.unknown.empty() && !sequence_.tokens.empty() && options_.instructions &&
      *options_.instructions != record.instructions)
    return Status::error(Code::model_mismatch,
                         "%s has %s: load it with the same or with NULL, or prefill the document "
                         "again; nothing was loaded",
                         path,
                         record.instructions.empty() ? "no instructions" : "other instructions");
  if (record.format.empty()) return {};
  const char* name = record.format.c_str();
  if (!record.unknown.empty())
    return Status::error(Code::version,
                         "%s: its turns have '%s', which this library does not support: prefill "
                         "the document again; nothing was loaded",
                         path, record.unknown.c_str());
  Chat chat;
  if (!Chat::parse(record.marks.empty() ? record.format : record.marks, &chat).ok())
    return Status::error(Code::model_mismatch,
                         "%s has the unknown chat format '%s': prefill the document again; nothing "
                         "was loaded",
                         path, name);
  const bool two_customs =
      chat.format() == ChatFormat::custom && model_->chat().format() == ChatFormat::custom;
  if (model_->chat_is_chosen() && model_->chat() != chat && two_customs)
    return Status::error(Code::model_mismatch,
                         "%s has another custom chat format than the model: open the model with "
                         "the file's or with none, or prefill the document again; nothing was "
                         "loaded",
                         path);
  if (model_->chat_is_chosen() && model_->chat() != chat)
    return Status::error(Code::model_mismatch,
                         "%s has the chat format '%s', but the model was opened with '%s': open it "
                         "with '%s' or with none, or prefill the document again; nothing was "
                         "loaded",
                         path, name, model_->chat().name(), name);
  sequence_.chat = chat;
  options_.instructions = record.instructions;
  return {};
}

// Loads what the next step needs, and a document that runs nothing does not.
Status Session::load_last_step(const CacheFile& file, const SavedSequence& state,
                               const Cancel* cancel) {
  const SectionFacts facts = state.facts(model_->config().vocabulary);
  const std::byte* at = nullptr;
  if (const CacheFile::Section* logits = file.find(SectionKind::logits); logits && logits->bytes) {
    RETURN_IF_ERROR(take(file, SectionKind::logits, model_->config().vocabulary * sizeof(float),
                         facts, nullptr, cancel, &at));
    const auto* values = reinterpret_cast<const float*>(at);
    sequence_.logits.assign(values, values + logits->bytes / sizeof *values);
    sequence_.logits_at = state.tokens;
  }
  if (options_.full_precision) return {};
  RETURN_IF_ERROR(load_queries(file, SectionKind::queries, 0, state.tokens, pool_.get(), cancel,
                               &sequence_.queries));
  return load_observed(file, facts, cancel);
}

// Loads the optional sections about the text.
Status Session::load_optional(const CacheFile& file, const SavedSequence& state,
                              const Cancel* cancel) {
  const SectionFacts facts = state.facts(model_->config().vocabulary);
  if (const CacheFile::Section* errors = file.find(SectionKind::errors); errors && errors->bytes) {
    const std::byte* at = nullptr;
    RETURN_IF_ERROR(take(file, SectionKind::errors, model_->config().layers * sizeof(float), facts,
                         nullptr, cancel, &at));
    const auto* values = reinterpret_cast<const float*>(at);
    sequence_.layer_errors.assign(values, values + errors->bytes / sizeof *values);
    // so that the next measurement is due as without save and load
    sequence_.probed_at = uint64_t{state.probed_pages} * state.page_tokens;
  }
  RETURN_IF_ERROR(load_count(file, SectionKind::sparse, facts, &sequence_.sparse_tokens));
  RETURN_IF_ERROR(load_spelling(file, facts));
  sequence_.prefilled_tokens = state.tokens;
  return load_count(file, SectionKind::read, facts, &sequence_.prefilled_tokens);
}

// Without the rows of a file the MTP layer attends the tokens that follow.
Status Session::load_saved_drafts(const std::shared_ptr<const CacheFile>& file,
                                  const SavedSequence& state, const Cancel* cancel) {
  if (!drafter_ || state.tokens == 0) return {};
  bool found = false;
  RETURN_IF_ERROR(load_drafts(file, state, model_->config().width, pool_.get(), cancel,
                              &*sequence_.drafts, &found));
  if (found) return {};
  const std::string line =
      file->path() +
      " was saved without drafts, or by another version: the MTP layer attends the tokens that "
      "follow, so fewer drafts are accepted; prefill the document with draft_tokens and save it "
      "again";
  log(1, line.c_str());
  return {};
}

// Checks that the file was saved with these weights.
static Status check_model(const format::Identity& id, const std::string& path, const Model& model) {
  if (id.vocabulary == 0)
    return Status::error(Code::model_mismatch,
                         "%s was saved by kv_cache_save: load it with kv_cache_load; nothing was "
                         "loaded",
                         path.c_str());
  if (!model.is_of(id))
    return Status::error(
        Code::model_mismatch,
        "%s was saved with another model ('%s'): prefill the document again; nothing was loaded",
        path.c_str(), id.model_name);
  if (id.vocabulary != model.config().vocabulary)
    return Status::error(
        Code::corrupt,
        "%s: the header has the model's fingerprint but another shape; nothing was loaded",
        path.c_str());
  return {};
}

// Checks that the session computes RoPE as the saved tokens have it.
static Status check_rope(const std::string& path, const SavedSequence& state, const Model& model,
                         uint64_t context) {
  if (state.long_rope && !model.config().has_longrope())
    return Status::error(Code::corrupt, "%s: section 'state': an unknown flag; nothing was loaded",
                         path.c_str());
  if (state.tokens == 0 || state.long_rope == model.has_long_ropes(context)) return {};
  const char* than = state.long_rope ? "more than" : "at most";
  return Status::error(Code::model_mismatch,
                       "%s was computed for a context of %s %" PRIu64
                       " tokens, where the model's RoPE differs: load it with such context_tokens, "
                       "or prefill the document again; nothing was loaded",
                       path.c_str(), than, model.long_context());
}

// Checks lengths in tokens. saved: the file's; trained: the model's; context: the session's.
static Status check_length(const std::string& path, uint64_t saved, uint64_t wanted_tokens,
                           uint64_t trained, uint64_t context) {
  if (saved > trained)
    return Status::error(Code::corrupt,
                         "%s holds %" PRIu64 " tokens: its model was trained for %" PRIu64
                         "; nothing was loaded",
                         path.c_str(), saved, trained);
  if (wanted_tokens > saved)
    return Status::error(Code::bad_argument,
                         "%s holds %" PRIu64 " tokens: %" PRIu64
                         " were requested; nothing was loaded",
                         path.c_str(), saved, wanted_tokens);
  if (const uint64_t wanted = wanted_tokens ? wanted_tokens : saved; wanted > context)
    return Status::error(Code::context_full,
                         "%s: %" PRIu64 " tokens do not fit: the session's context is %" PRIu64
                         "; nothing was loaded",
                         path.c_str(), wanted, context);
  return {};
}

// What a file says of its layers.
struct SavedLayers {
  SavedSequence state;
  SavedWindows windows;
  SavedStates states;
};

namespace {

Status check_layers(const CachePeek& peek, const Model& model, SavedLayers* out) {
  RETURN_IF_ERROR(check_saved(peek, model.store_shape(), model.config().group(), out->state));
  RETURN_IF_ERROR(check_windows(peek, model.windows_shape(), out->state, &out->windows));
  return check_states(peek, model.config(), out->state, &out->states);
}

// The layers of a checked file that do not keep every token.
struct OtherLayers {
  std::optional<KvStore> windows;
  std::optional<RecurrentState> states;
};
Status load_other_layers(const std::shared_ptr<const CacheFile>& file, const SavedLayers& saved,
                         const WantedCheckpoints& wanted, ThreadPool* pool, const Cancel* cancel,
                         OtherLayers* out) {
  if (out->windows)
    RETURN_IF_ERROR(
        load_windows(file, saved.state, saved.windows, wanted, pool, cancel, &*out->windows));
  if (out->states)
    RETURN_IF_ERROR(load_states(file, saved.states, wanted, pool, cancel, &*out->states));
  return {};
}

}  // namespace

struct Session::MapRequest {
  const std::string& path;
  bool verify = false;
  const Cancel* cancel = nullptr;
  Progress::Report report = {};
  uint64_t tokens = 0;       // that are wanted; 0: all
  bool is_document = false;  // that is composed with others
};

struct Session::MappedFile {
  std::unique_ptr<Session> session;
  std::shared_ptr<const CacheFile> file;
  SavedLayers saved;
  ChatRecord chat;
  SavedDocuments documents;  // before the sequence
  FileStamp stamp;
};

// A file that refers to documents has no text of its own.
static Status check_documents(const SavedDocuments& documents, const std::string& path,
                              const SavedSequence& state, bool is_document, uint64_t tokens) {
  if (documents.documents.empty()) return {};
  if (is_document)
    return Status::error(
        Code::bad_argument,
        "%s is a session over %zu documents, not a document: compose the documents "
        "themselves; nothing was loaded",
        path.c_str(), documents.documents.size());
  if (tokens > 0)
    return Status::error(Code::unsupported,
                         "%s is a session over %zu documents: load all of it and rewind it; "
                         "nothing was loaded",
                         path.c_str(), documents.documents.size());
  const bool answers = state.turn == static_cast<uint32_t>(Turn::answer);
  if ((state.tokens == 0 || answers) && state.document_tokens == 0) return {};
  return Status::error(Code::corrupt,
                       "%s: section 'state': a text after documents; nothing was loaded",
                       path.c_str());
}

// Opens a file, and checks what it says of itself.
Status Session::open_checked(const Model& model, const MapRequest& request, SessionOptions* options,
                             CachePeek* peek, MappedFile* out) {
  const std::string& path = request.path;
  RETURN_IF_ERROR(resolve(model, options));
  RETURN_IF_ERROR(CachePeek::open(path, peek));
  RETURN_IF_ERROR(check_model(peek->identity(), path, model));
  const SavedSequence& state = out->saved.state;
  RETURN_IF_ERROR(read_saved(*peek, &out->saved.state));
  RETURN_IF_ERROR(read_chat(*peek, &out->chat));
  RETURN_IF_ERROR(check_layers(*peek, model, &out->saved));
  out->stamp = peek->header().stamp();
  RETURN_IF_ERROR(read_documents(*peek, &out->documents));
  RETURN_IF_ERROR(
      check_documents(out->documents, path, state, request.is_document, request.tokens));
  RETURN_IF_ERROR(check_rope(path, state, model, options->context));
  RETURN_IF_ERROR(
      check_length(path, state.tokens, request.tokens, model.config().context, options->context));
  options->full_precision = state.full_precision;
  options->window = state.window_tokens;
  if (!request.verify) return {};
  Progress progress(request.report);
  return peek->verify(&progress, request.cancel);
}

Status Session::map_file(const std::shared_ptr<const Model>& model, const MapRequest& request,
                         SessionOptions options, MappedFile* out) {
  const Cancel* cancel = request.cancel;
  CachePeek peek;
  RETURN_IF_ERROR(open_checked(*model, request, &options, &peek, out));
  if (!out->documents.documents.empty()) options.memory.bytes = 0;  // load_documents() divides it
  const ModelConfig& config = model->config();
  const SavedLayers& saved = out->saved;
  const SavedSequence& state = saved.state;
  // the later session's pool, because a large file has many tables to verify
  std::unique_ptr<ThreadPool> pool;
  RETURN_IF_ERROR(ThreadPool::create(options.threads, &pool));
  std::shared_ptr<const CacheFile>& file = out->file;
  RETURN_IF_ERROR(CacheFile::open(std::move(peek), &file, pool.get(), cancel));
  KvStore store(model->store_shape(), options.window);
  const uint64_t kept = request.tokens ? request.tokens : state.tokens;
  RETURN_IF_ERROR(set_budget(&options, [&] {
    return load_store(file, state, config.group(), options.memory, kept, pool.get(), cancel,
                      &store);
  }));
  const uint32_t checkpoints = options.memory.checkpoints;
  OtherLayers others = {make_windows(*model, store.window_tokens(), checkpoints),
                        make_states(config, checkpoints)};
  uint64_t prefilled = state.tokens;
  RETURN_IF_ERROR(load_count(*file, SectionKind::read, state.facts(config.vocabulary), &prefilled));
  const WantedCheckpoints wanted = {
      {checkpoints_of(*model, options.window, state.kept_of(kept), checkpoints),
       prefilled > 0 ? prefilled : CheckpointLimits::none},
      state.kept_of(kept)};
  RETURN_IF_ERROR(load_other_layers(file, saved, wanted, pool.get(), cancel, &others));
  SequenceState sequence(config, model->chat(), std::move(store), std::move(others.windows),
                         std::move(others.states));
  out->session.reset(new Session(model, options, std::move(sequence)));
  out->session->pool_ = std::move(pool);
  RETURN_IF_ERROR(out->session->load_text(*file, state, out->chat, cancel));
  RETURN_IF_ERROR(out->session->load_last_step(*file, state, cancel));
  // these sections are copied: drops their mapped pages
  for (const CacheFile::Section& section : file->sections())
    if (section.kind <= SectionKind::window || section.kind == SectionKind::logits ||
        section.kind == SectionKind::queries || section.kind == SectionKind::windows_rows)
      file->advise(section, os::Mapping::Advice::dont_need);
  return {};
}

// Loads what a file has of a sequence besides its stores.
Status Session::load_text(const CacheFile& file, const SavedSequence& state, const ChatRecord& chat,
                          const Cancel* cancel) {
  const std::byte* tokens = nullptr;
  RETURN_IF_ERROR(take(file, SectionKind::tokens, state.tokens * sizeof(Token),
                       state.facts(model_->config().vocabulary), pool_.get(), cancel, &tokens));
  sequence_.tokens.resize(state.tokens);
  if (state.tokens) std::memcpy(sequence_.tokens.data(), tokens, state.tokens * sizeof(Token));
  sequence_.turn = static_cast<Turn>(state.turn);
  sequence_.document_tokens = state.document_tokens;
  sequence_.document_turn = static_cast<Turn>(state.document_turn);
  RETURN_IF_ERROR(use_chat(chat, file.path().c_str()));
  return load_optional(file, state, cancel);
}

Status Session::load(const std::shared_ptr<const Model>& model, const std::string& path,
                     SessionOptions options, bool verify, const Cancel* cancel,
                     Progress::Report report, std::unique_ptr<Session>* out, uint64_t tokens_wanted,
                     Progress::Report prefill_progress) {
  const uint64_t begin = os::now_ns();
  MappedFile mapped;
  const MapRequest request{path, verify, cancel, report, tokens_wanted};
  RETURN_IF_ERROR(map_file(model, request, options, &mapped));
  std::unique_ptr<Session> session = std::move(mapped.session);
  RETURN_IF_ERROR(session->start(cancel));
  if (!mapped.documents.documents.empty())
    RETURN_IF_ERROR(session->load_documents({path, mapped.documents, options.memory.bytes,
                                             std::move(options.instructions), verify, cancel,
                                             std::move(report)}));
  RETURN_IF_ERROR(session->load_saved_drafts(mapped.file, mapped.saved.state, cancel));
  if (tokens_wanted)
    RETURN_IF_ERROR(session->shorten(tokens_wanted, cancel, std::move(prefill_progress)));
  session->load_ns_ = os::now_ns() - begin;
  *out = std::move(session);
  return {};
}

// Maps a document of a composition: its session cannot run, and has no window of its own, queries
// or logits. Has one open file, because a process may have few. Called on several threads.
Status Session::map_document(const std::string& path, const Cancel* cancel, MappedFile* out) const {
  if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; nothing was loaded");
  SessionOptions options = options_;
  options.memory = {};  // the composition limits its documents
  CachePeek peek;
  RETURN_IF_ERROR(open_checked(*model_, {.path = path, .cancel = cancel, .is_document = true},
                               &options, &peek, out));
  RETURN_IF_ERROR(CacheFile::open(std::move(peek), &out->file, nullptr, cancel));
  const SavedSequence& state = out->saved.state;
  const ModelConfig& config = model_->config();
  KvStore store(model_->store_shape(), options.window);
  RETURN_IF_ERROR(map_store(out->file, state, state.facts(config.vocabulary), cancel, &store));
  SequenceState sequence(config, model_->chat(), std::move(store), {}, {});
  out->session.reset(new Session(model_, options, std::move(sequence)));
  return out->session->load_text(*out->file, state, out->chat, cancel);
}

// Maps documents on all threads, and adds them in their order.
Status Session::add_documents(std::span<const std::string> paths, const Cancel* cancel,
                              const LeavesOut& leaves_out, Composition* to) {
  std::vector<MappedFile> mapped(paths.size());
  std::vector<Status> results(paths.size());
  pool_->run(static_cast<uint32_t>(paths.size()), [&](uint32_t i, uint32_t) {
    results[i] = map_document(paths[i], cancel, &mapped[i]);
  });
  for (std::size_t i = 0; i < paths.size(); ++i) {
    Status& s = results[i];
    MappedFile file = std::move(mapped[i]);  // a refused one is closed here
    if (s.ok()) s = add_document(paths[i], file.stamp, std::move(file.session), to);
    if (!s.ok() && (s.code() == Code::cancelled || !leaves_out || !leaves_out(paths[i], s)))
      return std::move(s);
  }
  return {};
}

}  // namespace kvasir
