// Saves a session: the data besides its store (saved_store.h). docs/file-format.md describes the
// sections.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/quoted.h"
#include "cachefile/format_fields.h"
#include "cachefile/token_chain.h"
#include "session/session.h"

namespace kvasir {

using format::SectionKind;

static void put(std::byte* at, uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(value >> (8 * i));
}

// The state section, without the facts that save_store() fills in.
static SavedSequence saved_state(const SequenceState& sequence, uint32_t window_tokens) {
  SavedSequence state;
  state.turn = static_cast<uint32_t>(sequence.turn);
  state.window_tokens = window_tokens;
  if (sequence.is_composed()) {
    if (sequence.tokens.empty()) state.turn = static_cast<uint32_t>(Turn::empty);
  } else if (sequence.turn == Turn::answer) {
    state.document_tokens = sequence.document_tokens;
    state.document_turn = static_cast<uint32_t>(sequence.document_turn);
  }
  state.probed_pages =
      static_cast<uint32_t>(sequence.probed_at / sequence.store.shape().page.page_tokens);
  return state;
}

// The section of the queries by which a strategy has selected once; empty: there are none.
static Array<std::byte> encode_observed(const SequenceState::Observed& observed) {
  Array<std::byte> out;
  if (observed.queries.count() == 0) return out;
  const Array<float> values = observed.queries.floats();
  out.resize(format::observed_head_bytes + values.size() * sizeof(float));
  put(out.data(), observed.queries.end(), 8);
  put(out.data() + 8, observed.pages, 4);
  std::memcpy(out.data() + format::observed_head_bytes, values.data(),
              values.size() * sizeof(float));
  return out;
}

// Builds the sketch and the index that the strategy is to find in the file.
Status Session::prepare_save(const std::string& path, const Cancel* cancel, Progress* progress) {
  // A build of an index may take minutes, so an unusable path is refused before it.
  if (make_plan(options_.select, sequence_.store.sealed_tokens(), sequence_.store.shape().layers,
                sequence_.layer_errors)
          .strategy->index)
    RETURN_IF_ERROR(AtomicFile::check(path));
  if (!sequence_.store.sketch().built() && sketch_is_due())  // a cancel had prevented the build
    RETURN_IF_ERROR(build_sketch(cancel));
  Status s = prepare_index(true, cancel, progress);
  if (s.code() != Code::limit) return s;
  log(1, (std::string(s.message()) + ": saving without a new index").c_str());
  return {};
}

// A copy of what the MTP layer keeps, without pending rows. Nothing: it has no row.
Status Session::complete_drafts(const Cancel* cancel, std::optional<DraftState>* out) {
  if (!drafter_ || sequence_.drafts->first >= sequence_.tokens.size()) return {};
  out->emplace(*sequence_.drafts);
  bool lost = false;
  RETURN_IF_ERROR(
      or_without_drafts(drafter_->complete(sequence_.tokens.size(), cancel, &**out), &lost));
  if (lost) return out->reset(), drop_drafts(), Status();
  if ((*out)->end() != sequence_.tokens.size() || (*out)->store.tokens() == 0) out->reset();
  return {};
}

Status Session::save(const std::string& path, const Cancel* cancel, Progress::Report report,
                     Progress::Report prepare_report,
                     const AtomicFile::BeforeRename& before_rename) {
  RETURN_IF_ERROR(sequence_.store.check_file());
  fetch_logits();
  Array<std::byte> documents;
  if (sequence_.is_composed()) RETURN_IF_ERROR(save_documents(path, &documents));
  RETURN_IF_ERROR(prefill_missing(cancel, prepare_report));
  Progress preparing(std::move(prepare_report));
  RETURN_IF_ERROR(prepare_save(path, cancel, &preparing));
  format::Identity identity;
  model_->identify(&identity);
  identity.vocabulary = model_->config().vocabulary;
  quote_head(model_->config().name, "", identity.model_name, sizeof identity.model_name);

  const Array<float> queries = sequence_.queries.floats();
  const Array<std::byte> observed = encode_observed(sequence_.observed);
  const TokenChain chain = TokenChain::of({sequence_.tokens.data(), sequence_.prefilled_tokens},
                                          prefill_key(sequence_.sparse_tokens > 0));
  Array<uint64_t> hashes;
  if (!sequence_.is_composed()) {  // no text begins with an answer over documents
    hashes.push_back(chain.key);
    hashes.insert(hashes.end(), chain.hashes.begin(), chain.hashes.end());
  }
  const Array<std::byte> chat =
      sequence_.has_marks()
          ? encode_chat_record(sequence_.chat.name(), instructions(), sequence_.chat.text())
          : Array<std::byte>();
  std::vector<SavedPart> parts = {
      {SectionKind::tokens, sequence_.tokens.data(), sequence_.tokens.size() * sizeof(Token)},
      {SectionKind::errors, sequence_.layer_errors.data(),
       sequence_.layer_errors.size() * sizeof(float)},
      {SectionKind::logits, sequence_.logits.data(),
       sequence_.has_logits() ? sequence_.logits.size() * sizeof(float) : 0},
      {SectionKind::queries, queries.data(), queries.size() * sizeof(float)},
      {SectionKind::observed, observed.data(), observed.size()},
      {SectionKind::sparse, &sequence_.sparse_tokens,
       sequence_.sparse_tokens ? sizeof sequence_.sparse_tokens : 0},
      {SectionKind::read, &sequence_.prefilled_tokens,
       sequence_.prefilled_tokens < sequence_.tokens.size() ? sizeof sequence_.prefilled_tokens
                                                            : 0},
      {SectionKind::chain, hashes.data(), hashes.size() * sizeof(uint64_t)}};
  if (!documents.empty())
    parts.push_back({SectionKind::documents, documents.data(), documents.size()});
  if (!chat.empty()) parts.push_back({SectionKind::chat, chat.data(), chat.size()});
  if (const auto spelling = sequence_.spelling.entries(); !spelling.empty())
    parts.push_back({SectionKind::spelling, spelling.data(), spelling.size_bytes()});
  SavedSequence state = saved_state(sequence_, options_.window);
  state.long_rope = model_->has_long_ropes(options_.context);
  std::optional<DraftState> drafts;
  RETURN_IF_ERROR(complete_drafts(cancel, &drafts));
  const StepStores stores = sequence_.stores();
  return save_store(path, identity,
                    {stores.store, stores.windows, stores.states, drafts ? &*drafts : nullptr},
                    state, parts, cancel, std::move(report), before_rename);
}

}  // namespace kvasir
