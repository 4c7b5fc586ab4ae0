// Saving a timeline and mapping it back. The container is store/cache_file.h's; what the sections hold is in store/format.md.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "base/magnitude.h"
#include "session/session.h"
#include "store/cache_file.h"
#include "store/token_chain.h"

namespace kvasir {

using format::SectionKind;

namespace {

constexpr std::size_t state_bytes = 48;
constexpr std::size_t observed_head = 16;
constexpr uint32_t section_version = 1;  // of every section's own encoding

void put(std::byte* at, uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(value >> (8 * i));
}

uint64_t get(const std::byte* at, std::size_t bytes) {
  uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(at[i]) << (8 * i);
  return value;
}

std::array<std::byte, state_bytes> encode(const SavedTimeline& s) {
  std::array<std::byte, state_bytes> out{};
  const uint32_t small[] = {s.turn, s.full_precision, s.window_tokens, s.window_count, s.pages, s.page_tokens};
  for (std::size_t i = 0; i < 6; ++i) put(out.data() + 4 * i, small[i], 4);
  put(out.data() + 24, s.tokens, 8);
  put(out.data() + 32, s.document_tokens, 8);
  put(out.data() + 40, s.document_turn, 4);
  put(out.data() + 44, s.probed_pages, 4);
  return out;
}

SavedTimeline decode(const std::byte* at) {
  const auto small = [&](std::size_t i) { return static_cast<uint32_t>(get(at + 4 * i, 4)); };
  return {small(0), small(1), small(2), small(3), small(4), small(5), get(at + 24, 8), get(at + 32, 8), small(10), small(11)};
}

Status write_all(CacheWriter* writer, const void* data, std::size_t size, const Cancel* cancel, Progress* progress) {
  constexpr std::size_t piece = 4 << 20;  // between two looks at the cancel token
  for (std::size_t at = 0; at < size || size == 0; at += piece) {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; no file was changed");
    if (size == 0) return {};
    if (Status s = writer->write(static_cast<const std::byte*>(data) + at, std::min(piece, size - at)); !s.ok()) return s;
    if (!progress->update(writer->bytes_written(), writer->bytes_total()))
      return Status::error(Code::cancelled, "stopped by the progress callback; no file was changed");
  }
  return {};
}

Status check_version(const CacheFile& file, const CacheFile::Section& section) {
  if (section.version == section_version) return {};
  return Status::error(Code::version, "%s: section '%s' has version %u, this library reads %u; nothing was loaded", file.path().c_str(),
                       format::name_of(section.kind), section.version, section_version);
}

// A section that must be there with exactly this size, its checksums verified.
Status take(const CacheFile& file, SectionKind kind, uint64_t bytes, const std::byte** out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes != bytes)
    return Status::error(Code::corrupt, "%s: section '%s' has %" PRIu64 " bytes where %" PRIu64 " belong; nothing was loaded",
                         file.path().c_str(), format::name_of(kind), section ? section->bytes : 0, bytes);
  if (Status s = check_version(file, *section); !s.ok()) return s;
  if (Status s = file.check_section(*section); !s.ok()) return s;
  *out = file.bytes(kind).data();
  return {};
}

std::span<const float> floats(const std::byte* at, uint64_t bytes) {
  return {reinterpret_cast<const float*>(at), static_cast<std::size_t>(bytes / sizeof(float))};
}

}  // namespace

Status read_saved(const CacheFile& file, SavedTimeline* out) {
  const std::byte* at = nullptr;
  if (Status s = take(file, SectionKind::state, state_bytes, &at); !s.ok()) return s;
  *out = decode(at);
  return {};
}

Status Session::save(const std::string& path, const Cancel* cancel, Progress::Report report, Progress::Report prepare_report) {
  Progress preparing(std::move(prepare_report));
  if (Status s = prepare_index(true, cancel, &preparing); !s.ok()) return s;
  const StoreShape& shape = store_.shape();
  format::Identity identity;
  identity.model = model_->fingerprint();
  identity.layers = shape.layers;
  identity.kv_heads = shape.kv_heads;
  identity.head_dim = shape.page.head_dim;
  identity.vocabulary = model_->config().vocabulary;
  identity.tokens = tokens_.size();
  std::snprintf(identity.model_name, sizeof identity.model_name, "%s", model_->config().name.c_str());

  SavedTimeline state;
  state.turn = static_cast<uint32_t>(turn_);
  state.full_precision = options_.full_precision;
  state.window_tokens = options_.window;
  state.window_count = store_.window_count();
  state.pages = store_.pages().pages();
  state.page_tokens = shape.page.page_tokens;
  state.tokens = tokens_.size();
  state.document_tokens = turn_ == Turn::answer ? document_tokens_ : 0;
  state.document_turn = static_cast<uint32_t>(turn_ == Turn::answer ? document_turn_ : Turn::empty);
  state.probed_pages = static_cast<uint32_t>(probed_at_ / shape.page.page_tokens);
  const auto state_data = encode(state);
  const Array<float> window = store_.window_floats(), queries = queries_.floats();
  Array<std::byte> observed;
  if (observed_.queries.count() > 0) {
    const Array<float> values = observed_.queries.floats();
    observed.resize(observed_head + values.size() * sizeof(float));
    put(observed.data(), observed_.queries.end(), 8);
    put(observed.data() + 8, observed_.pages, 4);
    std::memcpy(observed.data() + observed_head, values.data(), values.size() * sizeof(float));
  }
  const TokenChain chain = TokenChain::of(tokens_, reading_key(sparse_tokens_ > 0));
  Array<uint64_t> hashes(1, chain.key);
  hashes.insert(hashes.end(), chain.hashes.begin(), chain.hashes.end());
  const bool with_logits = logits_at_ == tokens_.size() && logits_at_ > 0;
  const struct {
    SectionKind kind;
    const void* data;
    std::size_t bytes;
  } parts[] = {{SectionKind::state, state_data.data(), state_data.size()},
               {SectionKind::tokens, tokens_.data(), tokens_.size() * sizeof(Token)},
               {SectionKind::centre, store_.centre().data(), store_.centre().size_bytes()},
               {SectionKind::sinks, store_.sink_floats().data(), store_.sink_floats().size_bytes()},
               {SectionKind::window, window.data(), window.size() * sizeof(float)},
               {SectionKind::errors, layer_errors_.data(), layer_errors_.size() * sizeof(float)},
               {SectionKind::logits, logits_.data(), with_logits ? logits_.size() * sizeof(float) : 0},
               {SectionKind::queries, queries.data(), queries.size() * sizeof(float)},
               {SectionKind::observed, observed.data(), observed.size()},
               {SectionKind::sparse, &sparse_tokens_, sparse_tokens_ ? sizeof sparse_tokens_ : 0},
               {SectionKind::chain, hashes.data(), hashes.size() * sizeof(uint64_t)}};

  std::unique_ptr<CacheWriter> writer;
  if (Status s = CacheWriter::create(path, identity, &writer); !s.ok()) return s;
  for (const auto& part : parts)
    if (Status s = writer->add_section(part.kind, section_version, part.bytes); !s.ok()) return s;
  for (SectionKind kind : PageStore::sections)
    if (Status s = writer->add_section(kind, section_version, PageStore::file_bytes(shape, kind, state.pages)); !s.ok()) return s;
  if (Status s = writer->add_section(SectionKind::sketch, section_version, store_.sketch().file_bytes()); !s.ok()) return s;
  if (Status s = writer->add_section(SectionKind::representatives, section_version, store_.representatives().file_bytes()); !s.ok()) return s;
  for (const TokenIndexes::Entry& entry : store_.indexes().entries)
    if (entry.index)
      if (Status s = writer->add_section(section_of(entry.index->kind()), section_version, entry.index->file_bytes()); !s.ok()) return s;
  if (Status s = writer->begin(); !s.ok()) return s;

  Progress progress(std::move(report));
  for (const auto& part : parts)
    if (Status s = write_all(writer.get(), part.data, part.bytes, cancel, &progress); !s.ok()) return s;
  const auto write = [&](const void* data, std::size_t size) { return write_all(writer.get(), data, size, cancel, &progress); };
  for (SectionKind kind : PageStore::sections)
    if (Status s = store_.pages().write(kind, write); !s.ok()) return s;
  if (Status s = store_.sketch().write(write); !s.ok()) return s;
  if (Status s = store_.representatives().write(write); !s.ok()) return s;
  for (const TokenIndexes::Entry& entry : store_.indexes().entries)
    if (entry.index)
      if (Status s = entry.index->write(entry.valid, write); !s.ok()) return s;
  if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; no file was changed");
  return writer->finish();
}

namespace {

// The facts of a file that must fit each other, this model and the limits.
Status check_file(const CacheFile& file, const Model& model, const SessionOptions& options, uint64_t tokens, const SavedTimeline& s) {
  const auto corrupt = [&](const char* what) {
    return Status::error(Code::corrupt, "%s: section 'state': %s; nothing was loaded", file.path().c_str(), what);
  };
  const StoreShape shape = model.store_shape();
  const format::Identity& id = file.identity();
  if (id.layers != shape.layers || id.kv_heads != shape.kv_heads || id.head_dim != shape.page.head_dim ||
      id.vocabulary != model.config().vocabulary)
    return Status::error(Code::corrupt, "%s: the header's shape is not the model's though the fingerprint is; nothing was loaded",
                         file.path().c_str());
  if (s.turn > 3 || s.document_turn > 2) return corrupt("an unknown turn");
  if (s.document_tokens > s.tokens || (s.document_tokens == 0) != (s.document_turn == 0)) return corrupt("a conversation that begins nowhere");
  if (s.full_precision > 1) return corrupt("an unknown flag");
  if (s.probed_pages > s.pages) return corrupt("a measurement of pages that are not there");
  if (s.page_tokens != shape.page.page_tokens) return corrupt("another page size");
  if (s.tokens != id.tokens) return corrupt("not the header's number of tokens");
  if (s.tokens != uint64_t{s.pages} * s.page_tokens + s.window_count) return corrupt("pages and window do not add up to its tokens");
  if (s.full_precision && s.pages) return corrupt("sealed pages in a full-precision timeline");
  if (s.window_tokens == 0 || s.window_tokens > (1u << 20)) return corrupt("a window out of range");
  if ((s.turn == 0) != (s.tokens == 0)) return corrupt("a turn that does not fit its tokens");
  if (s.pages && s.window_count == 0) return corrupt("an empty window");
  if (tokens > s.tokens)
    return Status::error(Code::bad_argument, "%s holds %" PRIu64 " tokens: %" PRIu64 " were asked for; nothing was loaded", file.path().c_str(),
                         s.tokens, tokens);
  if (const uint64_t wanted = tokens ? tokens : s.tokens; wanted > options.context)
    return Status::error(Code::context_full, "%s: %" PRIu64 " tokens do not fit: the session's context is %" PRIu64 "; nothing was loaded",
                         file.path().c_str(), wanted, options.context);
  return {};
}

// Float sections hold what was computed: none of it is NaN or infinite.
Status check_finite(const CacheFile& file, SectionKind kind, std::span<const float> values) {
  if (all_finite(values)) return {};
  return Status::error(Code::corrupt, "%s: section '%s' holds a number that is not finite; nothing was loaded", file.path().c_str(),
                       format::name_of(kind));
}

// The queries in a section, behind `head` bytes, of a timeline that had so many tokens then; nothing where there is none.
Status load_queries(const CacheFile& file, SectionKind kind, uint64_t head, uint64_t tokens, RecentQueries* out) {
  const CacheFile::Section* section = file.find(kind);
  if (!section || section->bytes == 0) return {};
  const uint64_t token = out->token_floats() * sizeof(float), bytes = section->bytes - head;
  const uint64_t most = std::min<uint64_t>(RecentQueries::capacity, tokens);
  if (bytes % token || bytes / token > most)
    return Status::error(Code::corrupt, "%s: section '%s' has %" PRIu64 " bytes, which are not the queries of up to %" PRIu64
                         " tokens; nothing was loaded", file.path().c_str(), format::name_of(kind), section->bytes, most);
  const std::byte* at = nullptr;
  if (Status s = take(file, kind, section->bytes, &at); !s.ok()) return s;
  if (Status s = check_finite(file, kind, floats(at + head, bytes)); !s.ok()) return s;
  out->restore(floats(at + head, bytes), tokens);
  return {};
}

}  // namespace

Status Session::load_observed(const CacheFile& file) {
  const CacheFile::Section* section = file.find(SectionKind::observed);
  if (!section || section->bytes == 0) return {};
  const std::byte* at = nullptr;
  if (Status s = take(file, SectionKind::observed, section->bytes, &at); !s.ok()) return s;
  const uint64_t end = section->bytes < observed_head ? 0 : get(at, 8), pages = section->bytes < observed_head ? 0 : get(at + 8, 8);
  if (end == 0 || end > tokens_.size() || pages > end / store_.shape().page.page_tokens)
    return Status::error(Code::corrupt, "%s: section 'observed' is of another timeline; nothing was loaded", file.path().c_str());
  const ModelConfig& c = model_->config();
  observed_ = {RecentQueries(c.layers, c.heads, c.head_dim), static_cast<uint32_t>(pages)};
  return load_queries(file, SectionKind::observed, observed_head, end, &observed_.queries);
}

// The sections that a timeline can do without.
Status Session::load_optional(const CacheFile& file, const SavedTimeline& state) {
  const std::byte* at = nullptr;
  if (const CacheFile::Section* logits = file.find(SectionKind::logits); logits && logits->bytes) {
    if (Status s = take(file, SectionKind::logits, model_->config().vocabulary * sizeof(float), &at); !s.ok()) return s;
    const auto values = floats(at, logits->bytes);
    if (Status s = check_finite(file, SectionKind::logits, values); !s.ok()) return s;
    logits_.assign(values.begin(), values.end());
    logits_at_ = state.tokens;
  }
  if (const CacheFile::Section* errors = file.find(SectionKind::errors); errors && errors->bytes) {
    if (Status s = take(file, SectionKind::errors, model_->config().layers * sizeof(float), &at); !s.ok()) return s;
    const auto values = floats(at, errors->bytes);
    if (Status s = check_finite(file, SectionKind::errors, values); !s.ok()) return s;
    layer_errors_.assign(values.begin(), values.end());
    probed_at_ = uint64_t{state.probed_pages} * state.page_tokens;  // the next one comes when it would have come
  }
  if (!options_.full_precision) {
    if (Status s = load_queries(file, SectionKind::queries, 0, state.tokens, &queries_); !s.ok()) return s;
    if (Status s = load_observed(file); !s.ok()) return s;
  }
  if (const CacheFile::Section* sparse = file.find(SectionKind::sparse); sparse && sparse->bytes) {
    if (Status s = take(file, SectionKind::sparse, sizeof sparse_tokens_, &at); !s.ok()) return s;
    std::memcpy(&sparse_tokens_, at, sizeof sparse_tokens_);
    if (sparse_tokens_ > state.tokens)
      return Status::error(Code::corrupt, "%s: section 'sparse' says %" PRIu64 " of %" PRIu64 " tokens; nothing was loaded", file.path().c_str(),
                           sparse_tokens_, state.tokens);
  }
  return {};
}

Status Session::load(std::shared_ptr<const Model> model, const std::string& path, SessionOptions options, bool verify,
                     const Cancel* cancel, Progress::Report report, std::unique_ptr<Session>* out,
                     uint64_t tokens_wanted, Progress::Report reading) {
  const uint64_t begin = os::now_ns();
  if (Status s = resolve(*model, &options); !s.ok()) return s;
  std::shared_ptr<const CacheFile> file;
  if (Status s = CacheFile::open(path, &file); !s.ok()) return s;
  if (file->identity().model != model->fingerprint())
    return Status::error(Code::model_mismatch, "%s was saved with another model ('%s'): read the document again; nothing was loaded",
                         path.c_str(), file->identity().model_name);
  if (verify) {
    Progress progress(std::move(report));
    if (Status s = file->verify_all(&progress, cancel); !s.ok()) return s;
  }
  SavedTimeline state;
  if (Status s = read_saved(*file, &state); !s.ok()) return s;
  if (Status s = check_file(*file, *model, options, tokens_wanted, state); !s.ok()) return s;
  options.full_precision = state.full_precision;
  options.window = state.window_tokens;

  const StoreShape shape = model->store_shape();
  const uint64_t row = uint64_t{shape.heads_total()} * shape.page.dim * sizeof(float);
  const CacheFile::Section* centre_section = file->find(SectionKind::centre);
  const CacheFile::Section* sinks_section = file->find(SectionKind::sinks);
  const bool was_sealed = state.pages || (centre_section && centre_section->bytes);  // a rewound timeline keeps its centre
  const bool has_sinks = state.pages || (sinks_section && sinks_section->bytes);
  const std::byte *tokens, *centre, *sinks, *window;
  const uint64_t sizes[] = {state.tokens * sizeof(Token), was_sealed ? row : 0,
                            has_sinks ? row * 2 * shape.page.page_tokens : 0, row * 2 * state.window_count};
  if (Status s = take(*file, SectionKind::tokens, sizes[0], &tokens); !s.ok()) return s;
  if (Status s = take(*file, SectionKind::centre, sizes[1], &centre); !s.ok()) return s;
  if (Status s = take(*file, SectionKind::sinks, sizes[2], &sinks); !s.ok()) return s;
  if (Status s = take(*file, SectionKind::window, sizes[3], &window); !s.ok()) return s;
  if (Status s = check_finite(*file, SectionKind::centre, floats(centre, sizes[1])); !s.ok()) return s;
  if (Status s = check_finite(*file, SectionKind::sinks, floats(sinks, sizes[2])); !s.ok()) return s;
  if (Status s = check_finite(*file, SectionKind::window, floats(window, sizes[3])); !s.ok()) return s;
  for (SectionKind kind : PageStore::sections) {
    const CacheFile::Section* section = file->find(kind);
    if (!section || section->bytes != PageStore::file_bytes(shape, kind, state.pages))
      return Status::error(Code::corrupt, "%s: section '%s' does not have the size of %u pages; nothing was loaded", path.c_str(),
                           format::name_of(kind), state.pages);
    if (Status s = check_version(*file, *section); !s.ok()) return s;
    if (kind == SectionKind::pages) file->advise(*section, os::Mapping::Advice::random);
  }

  PageStore pages(shape);
  if (Status s = PageStore::map(shape, file, state.pages, &pages); !s.ok()) return s;
  KeySketch sketch(shape);
  if (const CacheFile::Section* section = file->find(SectionKind::sketch); section && section->bytes && section->version == section_version) {  // another version's is made again
    if (Status s = KeySketch::map(shape, file, state.pages, &sketch); !s.ok()) return s;
  }
  Representatives representatives(shape, options.full_precision ? KvStore::keep_all : options.window);
  if (const CacheFile::Section* section = file->find(SectionKind::representatives);
      section && section->bytes && section->version == section_version && !options.full_precision) {
    if (Status s = Representatives::map(file, state.tokens, &representatives); !s.ok()) return s;
  } else if (state.tokens > 0) {
    representatives.forget();  // read by an older library
  }
  KvStore store = KvStore::restore(std::move(pages), std::move(sketch), std::move(representatives),
                                   options.full_precision ? KvStore::keep_all : options.window, state.window_count,
                                   floats(centre, sizes[1]), floats(sinks, sizes[2]), floats(window, sizes[3]));
  for (IndexKind kind : all_index_kinds) {
    std::shared_ptr<TokenIndex> index;
    uint32_t valid = 0;
    const uint32_t group = model->config().heads / shape.kv_heads;
    if (Status s = TokenIndex::map(kind, shape, group, file, static_cast<uint32_t>(state.sealed_tokens()), &index, &valid);
        !s.ok())
      return s;
    if (index) store.set_index(std::move(index), valid);
  }
  if (Status s = store.set_budget(options.memory, state.tokens); !s.ok()) return s;
  std::unique_ptr<Session> session(new Session(model, options, std::move(store)));
  session->tokens_.resize(state.tokens);
  if (state.tokens) std::memcpy(session->tokens_.data(), tokens, sizes[0]);
  const auto vocabulary = static_cast<Token>(model->config().vocabulary);
  if (std::any_of(session->tokens_.begin(), session->tokens_.end(), [&](Token t) { return t < 0 || t >= vocabulary; }))
    return Status::error(Code::corrupt, "%s: section 'tokens' holds a token that the model does not have; nothing was loaded", path.c_str());
  session->turn_ = static_cast<Turn>(state.turn);
  session->document_tokens_ = state.document_tokens;
  session->document_turn_ = static_cast<Turn>(state.document_turn);
  if (Status e = session->load_optional(*file, state); !e.ok()) return e;
  for (const CacheFile::Section& section : file->sections())  // copied by now, and not to stay in memory twice
    if (section.kind <= SectionKind::window || section.kind == SectionKind::logits || section.kind == SectionKind::queries)
      file->advise(section, os::Mapping::Advice::dont_need);
  if (Status s = session->start(); !s.ok()) return s;
  if (tokens_wanted)
    if (Status s = session->shorten(tokens_wanted, cancel, std::move(reading)); !s.ok()) return s;
  session->load_ms_ = static_cast<double>(os::now_ns() - begin) / 1e6;
  *out = std::move(session);
  return {};
}

}  // namespace kvasir
