// Saving a session and mapping it back: what it has beside its store (saved_store.h). What the
// sections hold is in docs/file-format.md.
#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/quoted.h"
#include "cachefile/cache_file.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_floats.h"
#include "cachefile/token_chain.h"
#include "session/session.h"

namespace kvasir {

using format::SectionKind;

namespace {

constexpr std::size_t observed_head = format::observed_head_bytes;

void put(std::byte* at, uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(value >> (8 * i));
}

uint64_t get(const std::byte* at, std::size_t bytes) {
  uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(at[i]) << (8 * i);
  return value;
}

}  // namespace

Status Session::save(const std::string& path, const Cancel* cancel, Progress::Report report,
                     Progress::Report prepare_report,
                     const AtomicFile::BeforeRename& before_rename) {
  // An index may take minutes: what cannot be saved is refused before.
  if (make_plan(options_.select, store_.sealed_tokens(), store_.shape().layers, layer_errors_)
          .strategy->index)
    if (Status s = AtomicFile::check(path); !s.ok()) return s;
  Progress preparing(std::move(prepare_report));
  if (!store_.sketch().built() && sketch_is_due())  // a cancel kept it from being found
    if (Status s = build_sketch(cancel); !s.ok()) return s;
  // a document is saved with what it has
  if (Status s = prepare_index(true, cancel, &preparing); s.code() == Code::limit) {
    log(1, (std::string(s.message()) + ": it is saved without a new index").c_str());
  } else if (!s.ok()) {
    return s;
  }
  format::Identity identity;
  model_->identify(&identity);
  identity.vocabulary = model_->config().vocabulary;
  quote_head(model_->config().name, "", identity.model_name, sizeof identity.model_name);

  SavedSequence state;
  state.turn = static_cast<uint32_t>(turn_);
  state.window_tokens = options_.window;
  state.document_tokens = turn_ == Turn::answer ? document_tokens_ : 0;
  state.document_turn = static_cast<uint32_t>(turn_ == Turn::answer ? document_turn_ : Turn::empty);
  state.probed_pages = static_cast<uint32_t>(probed_at_ / store_.shape().page.page_tokens);
  const Array<float> queries = queries_.floats();
  Array<std::byte> observed;
  if (observed_.queries.count() > 0) {
    const Array<float> values = observed_.queries.floats();
    observed.resize(observed_head + values.size() * sizeof(float));
    put(observed.data(), observed_.queries.end(), 8);
    put(observed.data() + 8, observed_.pages, 4);
    std::memcpy(observed.data() + observed_head, values.data(), values.size() * sizeof(float));
  }
  const TokenChain chain =
      TokenChain::of({tokens_.data(), read_tokens_}, reading_key(sparse_tokens_ > 0));
  Array<uint64_t> hashes(1, chain.key);
  hashes.insert(hashes.end(), chain.hashes.begin(), chain.hashes.end());
  const bool with_logits = logits_at_ == tokens_.size() && logits_at_ > 0;
  const Array<std::byte> chat = has_marks()
                                    ? encode_chat_record(chat_format_name(chat_), instructions())
                                    : Array<std::byte>();
  std::vector<SavedPart> parts = {
      {SectionKind::tokens, tokens_.data(), tokens_.size() * sizeof(Token)},
      {SectionKind::errors, layer_errors_.data(), layer_errors_.size() * sizeof(float)},
      {SectionKind::logits, logits_.data(), with_logits ? logits_.size() * sizeof(float) : 0},
      {SectionKind::queries, queries.data(), queries.size() * sizeof(float)},
      {SectionKind::observed, observed.data(), observed.size()},
      {SectionKind::sparse, &sparse_tokens_, sparse_tokens_ ? sizeof sparse_tokens_ : 0},
      {SectionKind::read, &read_tokens_, read_tokens_ < tokens_.size() ? sizeof read_tokens_ : 0},
      {SectionKind::chain, hashes.data(), hashes.size() * sizeof(uint64_t)}};
  if (!chat.empty()) parts.push_back({SectionKind::chat, chat.data(), chat.size()});
  if (const auto spelling = spelling_.entries(); !spelling.empty())
    parts.push_back({SectionKind::spelling, spelling.data(), spelling.size_bytes()});
  return save_store(path, identity, store_, state, parts, cancel, std::move(report), before_rename);
}

namespace {

// The queries in a section, behind `head` bytes, of a sequence that had so many tokens then;
// nothing where there is none.
Status load_queries(const CacheFile& file, SectionKind kind, uint64_t head, uint64_t tokens,
                    ThreadPool* pool, const Cancel* cancel, RecentQueries* out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes == 0) return {};
  const uint64_t token = out->token_floats() * sizeof(float), bytes = section->bytes - head;
  const uint64_t most = std::min<uint64_t>(RecentQueries::capacity, tokens);
  if (bytes % token || bytes / token > most)
    return Status::error(Code::corrupt,
                         "%s: section '%s' has %" PRIu64
                         " bytes, which are not the queries of up to %" PRIu64
                         " tokens; nothing was loaded",
                         file.path().c_str(), format::name_of(kind), section->bytes, most);
  if (Status s = expect(file, kind, section->bytes, &section); !s.ok()) return s;
  out->restore(static_cast<uint32_t>(bytes / token), tokens);
  return copy_floats(file, *section, head, out->saved_rows(), out->width(), pool, cancel,
                     [&](uint64_t row) { return out->saved_row(row); });
}

// A number of tokens, of a sequence of so many; *out stays where there is none.
Status load_count(const CacheFile& file, SectionKind kind, const SectionFacts& facts,
                  uint64_t* out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes == 0) return {};
  const std::byte* at = nullptr;
  if (Status s = take(file, kind, sizeof *out, facts, nullptr, nullptr, &at); !s.ok()) return s;
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
  spelling_.restore(entries);
  return {};
}

Status Session::load_observed(const CacheFile& file, const SectionFacts& facts,
                              const Cancel* cancel) {
  const CacheFile::Section* section = file.find(SectionKind::observed);
  if (!section || section->bytes == 0) return {};
  if (Status s = expect(file, SectionKind::observed, section->bytes, &section); !s.ok()) return s;
  std::array<std::byte, observed_head> head{};
  if (Status s =
          file.copy(*section, 0, std::min<uint64_t>(section->bytes, observed_head), head.data());
      !s.ok())
    return s;
  const uint64_t end = section->bytes < observed_head ? 0 : get(head.data(), 8),
                 pages = section->bytes < observed_head ? 0 : get(head.data() + 8, 8);
  if (const char* what = wrong_observed(end, pages, facts))
    return Status::error(Code::corrupt, "%s: section 'observed' %s; nothing was loaded",
                         file.path().c_str(), what);
  const ModelConfig& c = model_->config();
  observed_ = {RecentQueries(c.layers, c.heads, c.head_dim), static_cast<uint32_t>(pages)};
  return load_queries(file, SectionKind::observed, observed_head, end, pool_.get(), cancel,
                      &observed_.queries);
}

// The saved turns' format is the session's, whatever was recognised in the model. Another one that
// the caller chose is refused: the file's turns and the questions would be of two formats, of which
// no answer tells.
Status Session::use_chat(const ChatRecord& record, const char* path) {
  if (record.unknown.empty() && !tokens_.empty() && options_.instructions &&
      *options_.instructions != record.instructions)
    return Status::error(Code::model_mismatch,
                         "%s has %s: open it with the same or with NULL, or prefill the document "
                         "again; nothing was loaded",
                         path,
                         record.instructions.empty() ? "no instructions" : "other instructions");
  if (record.format.empty()) return {};
  const char* name = record.format.c_str();
  if (!record.unknown.empty())
    return Status::error(Code::version,
                         "%s: its turns have '%s', which this library does not know: read the "
                         "document again; nothing was loaded",
                         path, record.unknown.c_str());
  const auto chat = chat_format_by_name(record.format);
  if (!chat)
    return Status::error(Code::model_mismatch,
                         "%s is in the chat format '%s', which this library does not know: read "
                         "the document again; nothing was "
                         "loaded",
                         path, name);
  if (model_->chat_is_chosen() && model_->chat() != *chat)
    return Status::error(Code::model_mismatch,
                         "%s is in the chat format '%s', the model was opened with '%s': open it "
                         "with '%s' or with none, or read "
                         "the document again; nothing was loaded",
                         path, name, chat_format_name(model_->chat()), name);
  chat_ = *chat;
  options_.instructions = record.instructions;
  return {};
}

// The sections that a sequence can do without.
Status Session::load_optional(const CacheFile& file, const SavedSequence& state,
                              const Cancel* cancel) {
  const SectionFacts facts = state.facts(model_->config().vocabulary);
  const std::byte* at = nullptr;
  if (const CacheFile::Section* logits = file.find(SectionKind::logits); logits && logits->bytes) {
    if (Status s = take(file, SectionKind::logits, model_->config().vocabulary * sizeof(float),
                        facts, nullptr, cancel, &at);
        !s.ok())
      return s;
    const auto* values = reinterpret_cast<const float*>(at);
    logits_.assign(values, values + logits->bytes / sizeof *values);
    logits_at_ = state.tokens;
  }
  if (const CacheFile::Section* errors = file.find(SectionKind::errors); errors && errors->bytes) {
    if (Status s = take(file, SectionKind::errors, model_->config().layers * sizeof(float), facts,
                        nullptr, cancel, &at);
        !s.ok())
      return s;
    const auto* values = reinterpret_cast<const float*>(at);
    layer_errors_.assign(values, values + errors->bytes / sizeof *values);
    // the next one comes when it would have come
    probed_at_ = uint64_t{state.probed_pages} * state.page_tokens;
  }
  if (!options_.full_precision) {
    if (Status s = load_queries(file, SectionKind::queries, 0, state.tokens, pool_.get(), cancel,
                                &queries_);
        !s.ok())
      return s;
    if (Status s = load_observed(file, facts, cancel); !s.ok()) return s;
  }
  if (Status s = load_count(file, SectionKind::sparse, facts, &sparse_tokens_); !s.ok()) return s;
  RETURN_IF_ERROR(load_spelling(file, facts));
  read_tokens_ = state.tokens;
  return load_count(file, SectionKind::read, facts, &read_tokens_);
}

Status Session::load(std::shared_ptr<const Model> model, const std::string& path,
                     SessionOptions options, bool verify, const Cancel* cancel,
                     Progress::Report report, std::unique_ptr<Session>* out, uint64_t tokens_wanted,
                     Progress::Report reading) {
  const uint64_t begin = os::now_ns();
  if (Status s = resolve(*model, &options); !s.ok()) return s;
  CachePeek peek;
  if (Status s = CachePeek::open(path, &peek); !s.ok()) return s;
  const format::Identity& id = peek.identity();
  const ModelConfig& config = model->config();
  if (id.vocabulary == 0)
    return Status::error(Code::model_mismatch,
                         "%s is a cache of no model: kv_cache_load loads it; nothing was loaded",
                         path.c_str());
  if (!model->is_of(id))
    return Status::error(
        Code::model_mismatch,
        "%s was saved with another model ('%s'): read the document again; nothing was loaded",
        path.c_str(), id.model_name);
  if (id.vocabulary != config.vocabulary)
    return Status::error(
        Code::corrupt,
        "%s: the header's shape is not the model's though the fingerprint is; nothing was loaded",
        path.c_str());
  SavedSequence state;
  if (Status s = read_saved(peek, &state); !s.ok()) return s;
  ChatRecord chat;
  if (Status s = read_chat(peek, &chat); !s.ok()) return s;
  if (Status s = check_saved(peek, model->store_shape(), config.group(), state); !s.ok()) return s;
  if (state.tokens > config.context)
    return Status::error(Code::corrupt,
                         "%s holds %" PRIu64 " tokens: its model was trained for %" PRIu64
                         "; nothing was loaded",
                         path.c_str(), state.tokens, config.context);
  if (tokens_wanted > state.tokens)
    return Status::error(Code::bad_argument,
                         "%s holds %" PRIu64 " tokens: %" PRIu64
                         " were asked for; nothing was loaded",
                         path.c_str(), state.tokens, tokens_wanted);
  if (const uint64_t wanted = tokens_wanted ? tokens_wanted : state.tokens;
      wanted > options.context)
    return Status::error(Code::context_full,
                         "%s: %" PRIu64 " tokens do not fit: the session's context is %" PRIu64
                         "; nothing was loaded",
                         path.c_str(), wanted, options.context);
  if (verify) {
    Progress progress(std::move(report));
    if (Status s = peek.verify(&progress, cancel); !s.ok()) return s;
  }
  // the session's: of a long text's file there is much to look at
  std::unique_ptr<ThreadPool> pool;
  if (Status s = ThreadPool::create(options.threads, &pool); !s.ok()) return s;
  std::shared_ptr<const CacheFile> file;
  if (Status s = CacheFile::open(std::move(peek), &file, pool.get(), cancel); !s.ok()) return s;
  options.full_precision = state.full_precision;
  options.window = state.window_tokens;
  KvStore store(model->store_shape(), options.window);
  const uint64_t kept = tokens_wanted ? tokens_wanted : state.tokens;
  if (Status s =
          load_store(file, state, config.group(), options.memory, kept, pool.get(), cancel, &store);
      !s.ok())
    return s;
  const std::byte* tokens = nullptr;
  if (Status s = take(*file, SectionKind::tokens, state.tokens * sizeof(Token),
                      state.facts(config.vocabulary), pool.get(), cancel, &tokens);
      !s.ok())
    return s;
  std::unique_ptr<Session> session(new Session(model, options, std::move(store)));
  session->pool_ = std::move(pool);
  session->tokens_.resize(state.tokens);
  if (state.tokens) std::memcpy(session->tokens_.data(), tokens, state.tokens * sizeof(Token));
  session->turn_ = static_cast<Turn>(state.turn);
  session->document_tokens_ = state.document_tokens;
  session->document_turn_ = static_cast<Turn>(state.document_turn);
  if (Status e = session->use_chat(chat, path.c_str()); !e.ok()) return e;
  if (Status e = session->load_optional(*file, state, cancel); !e.ok()) return e;
  // copied by now, and not to stay in memory twice
  for (const CacheFile::Section& section : file->sections())
    if (section.kind <= SectionKind::window || section.kind == SectionKind::logits ||
        section.kind == SectionKind::queries)
      file->advise(section, os::Mapping::Advice::dont_need);
  if (Status s = session->start(); !s.ok()) return s;
  if (tokens_wanted)
    if (Status s = session->shorten(tokens_wanted, cancel, std::move(reading)); !s.ok()) return s;
  session->load_ns_ = os::now_ns() - begin;
  *out = std::move(session);
  return {};
}

}  // namespace kvasir
