// A text's session: the longest beginning that the library has, and the rest read.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "base/checksum.h"
#include "cachefile/cache_peek.h"
#include "library/library_names.h"
#include "session/chat_record.h"

namespace kvasir {

// A document that begins like the text.
struct Library::Found {
  std::string name;
  uint64_t tokens = 0;  // in common at least: compared by hashes
  uint64_t all = 0;     // of the document, without what a model wrote behind it
  bool is_damaged = false;
};

bool Library::Wanted::is_in(const CachePeek& peek) const {
  TokenChain other;
  uint64_t all = 0;
  if (peek.identity().model != model || !peek.read_chain(tokens.size(), &other, &all).ok() ||
      all != tokens.size())
    return false;
  return exact.common(tokens, other, all) == all ||
         (sparse && sparse->common(tokens, other, all) == all);
}

// Longest beginning first; of equal ones the document that is no longer than that.
bool Library::longer(const Found& a, const Found& b) {
  return a.tokens != b.tokens ? a.tokens > b.tokens : a.all < b.all;
}

namespace {

// What says of a file that it cannot be used, where others may do.
bool is_of_the_file(Code code) {
  return code == Code::corrupt || code == Code::not_found || code == Code::not_a_cache ||
         code == Code::version || code == Code::model_mismatch || code == Code::io ||
         code == Code::permission || code == Code::bad_argument;
}

// In some formats a document's tokens are the same: it has a name in each.
std::string name_after(const TokenChain& chain, ChatFormat chat) {
  char name[24];
  const std::string_view format = chat_format_name(chat);
  std::snprintf(name, sizeof name, "%016" PRIx64,
                checksum(format.data(), format.size(),
                         chain.hashes.empty() ? chain.key : chain.hashes.back()));
  return name;
}

// An older library's file says nothing of its format: it passes for any.
Status has_turns(const CachePeek& peek, const Session& session, bool* out) {
  ChatRecord record;
  RETURN_IF_ERROR(read_chat(peek, &record));
  *out = record.unknown.empty() && record.instructions == session.instructions() &&
         (record.format.empty() || record.format == chat_format_name(session.chat()));
  return {};
}

}  // namespace

// What is of another version is nobody's fault and stays as it is: told once.
void Library::go_on_without(const std::string& name, const Status& why) const {
  if (why.code() == Code::version) {
    const std::lock_guard lock(told_mutex_);
    if (!told_.insert(name).second) return;
  }
  log(1, why, "; the library goes on without it");
}

// By their hashes.
Status Library::find(const Session& fresh, std::span<const Token> tokens, const Cancel* cancel,
                     std::vector<Found>* out) const {
  const TokenChain exact = TokenChain::of(tokens, fresh.prefill_key(false)),
                   sparse = TokenChain::of(tokens, fresh.prefill_key(true));
  const auto compare = [&](const os::FolderEntry& file, const CachePeek& peek, Status s) {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; nothing was read");
    TokenChain chain;
    uint64_t all = 0;
    if (s.ok() && !fresh.model().is_of(peek.identity())) return Status();
    if (s.ok()) s = peek.read_chain(tokens.size(), &chain, &all);
    if (!s.ok()) {
      go_on_without(file.name, s);
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

// *out stays null where no document begins like the text, or none that does can be used: those that
// cannot are in *unusable, and passed over where they are already.
Status Library::load_best(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                          const Session& fresh, std::span<const Token> tokens,
                          std::vector<Found>* unusable, uint64_t* again, Found* used,
                          std::unique_ptr<Session>* out) const {
  std::vector<Found> found;
  if (Status s = find(fresh, tokens, request.cancel, &found); !s.ok()) return s;
  const auto pass_over = [&](const Found& f, const Status& why) {
    go_on_without(f.name, why);
    unusable->push_back(f);
    unusable->back().is_damaged = why.code() == Code::corrupt;
  };
  // The tokens themselves decide: hashes know whole blocks only, and might be equal by chance. What
  // follows in the order of hashes can be better by less than a block.
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
      Array<Token> its;
      Status s = CachePeek::open(path_of(f.name), &peek);
      if (s.ok()) s = peek.read_tokens(std::min<uint64_t>(tokens.size(), f.all), &its);
      bool same_turns = true;  // the next question's have to be of the document's format
      if (s.ok()) s = has_turns(peek, fresh, &same_turns);
      if (!s.ok()) pass_over(f, s);
      if (!same_turns) its.clear();
      f.tokens = static_cast<uint64_t>(
          std::mismatch(its.begin(), its.end(), tokens.begin(), tokens.end()).first - its.begin());
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
    if (!s.ok()) pass_over(f, s);
    if (!s.ok() || !session->in_document()) continue;
    if (Status touched = os::touch(path_of(f.name)); !touched.ok())
      log(2, touched, "; it stays as old as it was");
    *used = f;
    *out = std::move(session);
    return {};
  }
  return {};
}

// The tokens that the session does not have yet.
static Status read_rest(Session* session, const LibraryRequest& request,
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

// Reads the text and saves what was read, and where a document is met damaged on the way once more
// without that one. *out and *outcome are the last reading that came to its end, over a damaged
// document where only its save met the damage and no other reading came to its end.
Status Library::read(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                     std::span<const Token> tokens, std::span<const uint32_t> lengths,
                     std::unique_ptr<Session> fresh, std::unique_ptr<Session>* out,
                     LibraryOutcome* outcome) const {
  std::vector<Found> unusable;
  for (;;) {
    std::unique_ptr<Session> session;
    uint64_t again = 0;  // tokens of a document's window that were read once more
    Found used;
    if (Status s = load_best(model, request, *fresh, tokens, &unusable, &again, &used, &session);
        !s.ok())
      return s;
    const bool is_new = session == nullptr;
    if (is_new) session = std::move(fresh);
    LibraryOutcome its{used.name, tokens.size(), used.tokens, false, {}};
    const auto rest = tokens.subspan(used.tokens);
    Status s = read_rest(session.get(), request, rest, lengths.subspan(used.tokens), again);
    if (s.ok()) {
      *outcome = std::move(its);
      // the one before has its document open no longer, so that it can be evicted
      *out = std::move(session);
      if (!rest.empty()) keep(out->get(), request, tokens, unusable, outcome);
    }
    // A page, an index, met only now by reading on or by copying.
    const Status& damage = s.ok() ? outcome->save_failure : s;
    if (is_new || damage.code() != Code::corrupt) return s;
    go_on_without(used.name, damage);
    unusable.push_back(used);
    unusable.back().is_damaged = true;
  }
}

Status Library::session(std::shared_ptr<const Model> model, const LibraryRequest& request,
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
    Status s = read(model, request, tokens, lengths, std::move(fresh), &session, outcome);
    if (!session) return s;
    if (!s.ok()) log(1, s, "; the session is over a document that is damaged");
  } catch (const std::bad_alloc&) {
    if (!session) throw;  // otherwise as any failure of a second reading
  }
  *out = std::move(session);
  return {};
}

// Saves what was read. Whatever becomes of that, the session is there.
void Library::keep(Session* session, const LibraryRequest& request, std::span<const Token> tokens,
                   std::span<const Found> unusable, LibraryOutcome* outcome) const {
  try {
    // The place of a damaged document is taken by what begins with all of it that can be told.
    const auto covers = [&](const Found& f) {
      return f.tokens == std::min<uint64_t>(f.all, tokens.size());
    };
    Wanted wanted;
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
      log(1, outcome->save_failure, "; the session is there, its document is not in the library");
  } catch (const std::bad_alloc&) {
    outcome->save_failure = Status::error(Code::no_memory, "out of memory");
  }
}

}  // namespace kvasir
