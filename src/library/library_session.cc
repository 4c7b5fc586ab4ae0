// The session of a text: maps the longest beginning in the library and prefills the rest.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "base/checksum.h"
#include "cachefile/cache_peek.h"
#include "library/library_names.h"
#include "session/chat_record.h"
#include "session/saved_checkpoints.h"
#include "session/saved_documents.h"

namespace kvasir {

// A document that begins like the text.
struct Library::Found {
  std::string name;
  uint64_t tokens = 0;  // in common, at least: compared by hashes
  uint64_t all = 0;     // of the document, without answers behind it
  bool is_damaged = false;
};

bool Library::Wanted::is_in(const CachePeek& peek) const {
  TokenChain other;
  uint64_t all = 0;
  bool same_turns = false;
  if (peek.identity().model != model || !peek.read_chain(tokens.size(), &other, &all).ok() ||
      all != tokens.size() || !turns.match(peek, &same_turns).ok() || !same_turns)
    return false;
  return exact.common(tokens, other, all) == all ||
         (sparse && sparse->common(tokens, other, all) == all);
}

// The longest common beginning first; of equal ones the shorter document.
bool Library::longer(const Found& a, const Found& b) {
  return a.tokens != b.tokens ? a.tokens > b.tokens : a.all < b.all;
}

namespace {

// A failure of one file: others may be usable.
bool is_of_the_file(Code code) {
  return code == Code::corrupt || code == Code::not_found || code == Code::not_a_cache ||
         code == Code::version || code == Code::model_mismatch || code == Code::io ||
         code == Code::permission || code == Code::bad_argument;
}

// A document may have the same tokens in two chat formats: each has a name of its own.
std::string name_after(const TokenChain& chain, const Chat& chat) {
  char name[24];
  const std::string_view format = chat.text().empty() ? chat.name() : chat.text();
  std::snprintf(name, sizeof name, "%016" PRIx64,
                checksum(format.data(), format.size(),
                         chain.hashes.empty() ? chain.key : chain.hashes.back()));
  return name;
}

Turns turns_of(const Session& session) { return {session.chat(), session.instructions()}; }

}  // namespace

Status Turns::match(const CachePeek& peek, bool* out) const {
  ChatRecord record;
  RETURN_IF_ERROR(read_chat(peek, &record));
  *out = record.unknown.empty() && record.instructions == instructions &&
         (record.format.empty() || (record.format == chat.name() && record.marks == chat.text()));
  return {};
}

// A document of another version is logged once.
void Library::log_unusable(const std::string& name, const Status& why) const {
  if (why.code() == Code::version) {
    const std::lock_guard lock(logged_mutex_);
    if (!logged_.insert(name).second) return;
  }
  log(1, why, "; the library does not use it");
}

// Finds documents with a common beginning by their hashes.
Status Library::find(const Session& fresh, std::span<const Token> tokens, const Cancel* cancel,
                     std::vector<Found>* out) const {
  const TokenChain exact = TokenChain::of(tokens, fresh.prefill_key(false)),
                   sparse = TokenChain::of(tokens, fresh.prefill_key(true));
  const auto compare = [&](const os::FolderEntry& file, const CachePeek& peek, Status s) {
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; nothing was prefilled");
    TokenChain chain;
    uint64_t all = 0;
    if (s.ok() && !fresh.model().is_of(peek.identity())) return Status();
    if (s.ok() && refers_to_documents(peek)) return Status();
    if (s.ok()) s = peek.read_chain(tokens.size(), &chain, &all);
    if (!s.ok()) {
      log_unusable(file.name, s);
      return Status();
    }
    const uint64_t same =
        std::max(exact.common(tokens, chain, all),
                 fresh.prefills_sparsely() ? sparse.common(tokens, chain, all) : 0);
    if (same > 0) out->push_back({file.name, same, all, false});
    return Status();
  };
  if (Status s = for_each(compare); !s.ok()) return s;
  std::stable_sort(out->begin(), out->end(), longer);
  return {};
}

// *out stays null if no usable document begins like the text. Unusable ones are added to *unusable;
// those in it are skipped.
Status Library::load_best(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                          const Session& fresh, std::span<const Token> tokens,
                          std::vector<Found>* unusable, uint64_t* again, Found* used,
                          std::unique_ptr<Session>* out) const {
  std::vector<Found> found;
  if (Status s = find(fresh, tokens, request.cancel, &found); !s.ok()) return s;
  const auto skip = [&](const Found& f, const Status& why) {
    log_unusable(f.name, why);
    unusable->push_back(f);
    unusable->back().is_damaged = why.code() == Code::corrupt;
  };
  // The tokens decide: hashes cover whole blocks only, and may be equal by chance. A later document
  // in the order of hashes can be better by less than a block.
  std::size_t known = 0;
  while (!found.empty()) {
    const auto best = [&] {
      return std::min_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(known),
                              longer);
    };
    while (known < found.size() &&
           (known == 0 || found[known].tokens + TokenChain::block > best()->tokens)) {
      Found& f = found[known++];
      CachePeek peek;
      Array<Token> saved;
      Status s = CachePeek::open(path_of(f.name), &peek);
      if (s.ok()) s = peek.read_tokens(std::min<uint64_t>(tokens.size(), f.all), &saved);
      bool same_turns = true;
      if (s.ok()) s = turns_of(fresh).match(peek, &same_turns);
      if (!s.ok()) skip(f, s);
      if (!same_turns) saved.clear();
      f.tokens = static_cast<uint64_t>(
          std::mismatch(saved.begin(), saved.end(), tokens.begin(), tokens.end()).first -
          saved.begin());
      bool serves = f.tokens > 0;
      if (serves)
        if (Status p =
                prefix_serves(peek, model->windows_shape(), model->config(), f.tokens, &serves);
            !p.ok())
          skip(f, p), serves = false;
      if (!serves) f.tokens = 0;
      if (is_cancelled(request.cancel))
        return Status::error(Code::cancelled, "cancelled; nothing was read");
    }
    const Found f = *best();
    found.erase(best()), --known;
    const auto is_same = [&](const Found& other) { return other.name == f.name; };
    if (f.tokens == 0 || std::any_of(unusable->begin(), unusable->end(), is_same)) continue;
    const auto reading = [&, rest = tokens.size() - f.tokens](uint64_t done, uint64_t total) {
      *again = total;
      return request.reading(done, total + rest);
    };
    std::unique_ptr<Session> session;
    Status s = Session::load(model, path_of(f.name), request.session, request.verify,
                             request.cancel, request.verifying, &session, f.tokens,
                             request.reading ? Progress::Report(reading) : Progress::Report());
    if (!s.ok() && !is_of_the_file(s.code())) return s;
    if (!s.ok()) skip(f, s);
    if (!s.ok() || !session->in_document()) continue;
    if (Status touched = os::touch(path_of(f.name)); !touched.ok())
      log(2, touched, "; it stays as old as it was");
    *used = f;
    *out = std::move(session);
    return {};
  }
  return {};
}

// Prefills the tokens that the session does not have yet.
static Status prefill_rest(Session* session, const LibraryRequest& request,
                           std::span<const Token> tokens, std::span<const uint32_t> lengths,
                           uint64_t again) {
  if (tokens.empty()) return {};
  const auto reading = [&](uint64_t done, uint64_t total) {
    return request.reading(again + done, again + total);
  };
  uint64_t done = 0;
  return session->prefill_document(tokens, lengths, request.cancel,
                                   request.reading ? Progress::Report(reading) : Progress::Report(),
                                   &done);
}

// Prefills the text and saves the result, and again without a document that turns out damaged. *out
// and *outcome are those of the last prefill that was complete. It may be over a damaged document,
// if only its save met the damage and the next prefill failed.
Status Library::prefill(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                        std::span<const Token> tokens, std::span<const uint32_t> lengths,
                        std::unique_ptr<Session> fresh, std::unique_ptr<Session>* out,
                        LibraryOutcome* outcome) const {
  std::vector<Found> unusable;
  for (;;) {
    std::unique_ptr<Session> session;
    uint64_t again = 0;  // tokens of a document's window that are prefilled again
    Found used;
    if (Status s = load_best(model, request, *fresh, tokens, &unusable, &again, &used, &session);
        !s.ok())
      return s;
    const auto complete = [&](std::unique_ptr<Session> begun) -> Status {
      LibraryOutcome found{used.name, tokens.size(), used.tokens, false, {}};
      const auto rest = tokens.subspan(used.tokens);
      RETURN_IF_ERROR(
          prefill_rest(begun.get(), request, rest, lengths.subspan(used.tokens), again));
      *outcome = std::move(found);
      // closes the session before, so that its document can be evicted
      *out = std::move(begun);
      if (!rest.empty()) save_result(out->get(), request, tokens, unusable, outcome);
      return {};
    };
    if (!session) return complete(std::move(fresh));
    Status s = complete(std::move(session));
    // Prefill or save met a damaged page or index.
    const Status& damage = s.ok() ? outcome->save_failure : s;
    if (damage.code() != Code::corrupt) return s;
    log_unusable(used.name, damage);
    unusable.push_back(used);
    unusable.back().is_damaged = true;
  }
}

Status Library::session(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                        std::unique_ptr<Session>* out, LibraryOutcome* outcome) const {
  *outcome = {};
  if (!request.name.empty())
    if (Status s = check_name(request.name); !s.ok()) return s;
  if (request.text.empty()) return Status::error(Code::bad_argument, "the text is empty");
  std::unique_ptr<Session> fresh, session;
  if (Status s = Session::open(model, request.session, &fresh); !s.ok()) return s;
  Array<Token> tokens;
  Array<uint32_t> lengths;
  if (Status s = fresh->encode_document(request.text, request.parse_special, request.cancel,
                                        &tokens, &lengths);
      !s.ok())
    return s;
  try {
    Status s = prefill(model, request, tokens, lengths, std::move(fresh), &session, outcome);
    if (!session) return s;
    if (!s.ok()) log(1, s, "; the session uses a damaged document");
  } catch (const std::bad_alloc&) {
    if (!session) throw;  // otherwise as any failure of a second prefill
  }
  *out = std::move(session);
  return {};
}

// Saves the session. A failure is in *outcome.
void Library::save_result(Session* session, const LibraryRequest& request,
                          std::span<const Token> tokens, std::span<const Found> unusable,
                          LibraryOutcome* outcome) const {
  try {
    // The new document replaces a damaged one whose tokens it begins with, as far as they are
    // known.
    const auto covers = [&](const Found& f) {
      return f.tokens == std::min<uint64_t>(f.all, tokens.size());
    };
    Wanted wanted;
    wanted.turns = turns_of(*session);
    wanted.name = request.name;
    wanted.replace = request.replace;
    wanted.model = session->model().fingerprint();
    wanted.tokens = tokens;
    wanted.exact = TokenChain::of(tokens, session->prefill_key(false));
    if (session->prefills_sparsely())
      wanted.sparse = TokenChain::of(tokens, session->prefill_key(true));
    wanted.hash = name_after(wanted.sparse ? *wanted.sparse : wanted.exact, session->chat());
    for (const Found& f : unusable)
      (f.is_damaged && covers(f) ? wanted.damaged : wanted.unusable).push_back(f.name);
    Place place;
    outcome->save_failure = save(session, request, wanted, &place);
    outcome->name = place.name;
    outcome->saved = outcome->save_failure.ok() && !place.is_there;
    if (!outcome->save_failure.ok())
      log(1, outcome->save_failure, "; the session exists, its document is not in the library");
  } catch (const std::bad_alloc&) {
    outcome->save_failure = Status::error(Code::no_memory, "out of memory");
  }
}

}  // namespace kvasir
