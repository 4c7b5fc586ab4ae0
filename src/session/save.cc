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

static constexpr std::size_t observed_head = format::observed_head_bytes;

static void put(std::byte* at, uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(value >> (8 * i));
}

Status Session::save(const std::string& path, const Cancel* cancel, Progress::Report report,
                     Progress::Report prepare_report,
                     const AtomicFile::BeforeRename& before_rename) {
  // A build of an index may take minutes, so an unusable path is refused before it.
  if (make_plan(options_.select, sequence_.store.sealed_tokens(), sequence_.store.shape().layers,
                sequence_.layer_errors)
          .strategy->index)
    RETURN_IF_ERROR(AtomicFile::check(path));
  Progress preparing(std::move(prepare_report));
  if (!sequence_.store.sketch().built() && sketch_is_due())  // a cancel had prevented the build
    RETURN_IF_ERROR(build_sketch(cancel));
  // without room for a new index, the save continues
  if (Status s = prepare_index(true, cancel, &preparing); s.code() == Code::limit) {
    log(1, (std::string(s.message()) + ": saving without a new index").c_str());
  } else if (!s.ok()) {
    return s;
  }
  format::Identity identity;
  model_->identify(&identity);
  identity.vocabulary = model_->config().vocabulary;
  quote_head(model_->config().name, "", identity.model_name, sizeof identity.model_name);

  SavedSequence state;
  state.turn = static_cast<uint32_t>(sequence_.turn);
  state.window_tokens = options_.window;
  state.document_tokens = sequence_.turn == Turn::answer ? sequence_.document_tokens : 0;
  state.document_turn =
      static_cast<uint32_t>(sequence_.turn == Turn::answer ? sequence_.document_turn : Turn::empty);
  state.probed_pages =
      static_cast<uint32_t>(sequence_.probed_at / sequence_.store.shape().page.page_tokens);
  const Array<float> queries = sequence_.queries.floats();
  Array<std::byte> observed;
  if (sequence_.observed.queries.count() > 0) {
    const Array<float> values = sequence_.observed.queries.floats();
    observed.resize(observed_head + values.size() * sizeof(float));
    put(observed.data(), sequence_.observed.queries.end(), 8);
    put(observed.data() + 8, sequence_.observed.pages, 4);
    std::memcpy(observed.data() + observed_head, values.data(), values.size() * sizeof(float));
  }
  const TokenChain chain = TokenChain::of({sequence_.tokens.data(), sequence_.prefilled_tokens},
                                          prefill_key(sequence_.sparse_tokens > 0));
  Array<uint64_t> hashes(1, chain.key);
  hashes.insert(hashes.end(), chain.hashes.begin(), chain.hashes.end());
  const bool with_logits =
      sequence_.logits_at == sequence_.tokens.size() && sequence_.logits_at > 0;
  const Array<std::byte> chat =
      sequence_.has_marks()
          ? encode_chat_record(sequence_.chat.name(), instructions(), sequence_.chat.text())
          : Array<std::byte>();
  std::vector<SavedPart> parts = {
      {SectionKind::tokens, sequence_.tokens.data(), sequence_.tokens.size() * sizeof(Token)},
      {SectionKind::errors, sequence_.layer_errors.data(),
       sequence_.layer_errors.size() * sizeof(float)},
      {SectionKind::logits, sequence_.logits.data(),
       with_logits ? sequence_.logits.size() * sizeof(float) : 0},
      {SectionKind::queries, queries.data(), queries.size() * sizeof(float)},
      {SectionKind::observed, observed.data(), observed.size()},
      {SectionKind::sparse, &sequence_.sparse_tokens,
       sequence_.sparse_tokens ? sizeof sequence_.sparse_tokens : 0},
      {SectionKind::read, &sequence_.prefilled_tokens,
       sequence_.prefilled_tokens < sequence_.tokens.size() ? sizeof sequence_.prefilled_tokens
                                                            : 0},
      {SectionKind::chain, hashes.data(), hashes.size() * sizeof(uint64_t)}};
  if (!chat.empty()) parts.push_back({SectionKind::chat, chat.data(), chat.size()});
  if (const auto spelling = sequence_.spelling.entries(); !spelling.empty())
    parts.push_back({SectionKind::spelling, spelling.data(), spelling.size_bytes()});
  return save_store(path, identity, sequence_.store, state, parts, cancel, std::move(report),
                    before_rename);
}

}  // namespace kvasir
