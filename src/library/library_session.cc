// A text's session: the longest beginning that the library has, and the rest read.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "library/library.h"
#include "store/cache_peek.h"

namespace kvasir {

// A document that begins like the text.
struct Library::Found {
  std::string name;
  uint64_t tokens = 0;  // in common at least: compared by hashes
  uint64_t all = 0;     // of the document
};

// Longest beginning first; of equal ones the document that is no longer than that.
bool Library::longer(const Found& a, const Found& b) { return a.tokens != b.tokens ? a.tokens > b.tokens : a.all < b.all; }

namespace {

// What says of a file that it cannot be used, where others may do.
bool is_of_the_file(Code code) {
  return code == Code::corrupt || code == Code::not_found || code == Code::not_a_cache || code == Code::version || code == Code::model_mismatch ||
         code == Code::io || code == Code::permission || code == Code::bad_argument;
}

std::string name_after(const TokenChain& chain) {
  char name[24];
  std::snprintf(name, sizeof name, "%016" PRIx64, chain.hashes.empty() ? chain.key : chain.hashes.back());
  return name;
}

}  // namespace

// By their hashes.
Status Library::find(const Session& fresh, std::span<const Token> tokens, std::vector<Found>* out) const {
  std::vector<os::FolderEntry> files;
  if (Status s = documents(&files); !s.ok()) return s;
  const TokenChain exact = TokenChain::of(tokens, fresh.reading_key(false)), sparse = TokenChain::of(tokens, fresh.reading_key(true));
  for (const os::FolderEntry& file : files) {
    CachePeek peek;
    TokenChain chain;
    if (!CachePeek::open(path_of(file.name), &peek).ok() || peek.identity().model != fresh.model().fingerprint()) continue;
    if (!peek.read_chain(&chain).ok()) continue;
    const uint64_t all = peek.identity().tokens;
    const uint64_t same = std::max(exact.common(tokens, chain, all), fresh.reads_sparsely() ? sparse.common(tokens, chain, all) : 0);
    if (same > 0) out->push_back({file.name, same, all});
  }
  std::stable_sort(out->begin(), out->end(), longer);
  return {};
}

// *out stays null where no document begins like the text, or none that does can be used: those that are damaged are named in *damaged, and
// passed over where they are already.
Status Library::load_best(const std::shared_ptr<const Model>& model, const LibraryRequest& request, const Session& fresh,
                          std::span<const Token> tokens, std::vector<std::string>* damaged, uint64_t* again, std::unique_ptr<Session>* out,
                          LibraryOutcome* outcome) const {
  std::vector<Found> found;
  if (Status s = find(fresh, tokens, &found); !s.ok()) return s;
  const auto unusable = [&](const Found& f, const Status& why) {
    log(1, why, "; the library goes on without it");
    if (why.code() == Code::corrupt) damaged->push_back(f.name);
  };
  // The tokens themselves decide: hashes know whole blocks only, and might be equal by chance.
  for (Found& f : found) {
    CachePeek peek;
    Array<Token> its;
    Status s = CachePeek::open(path_of(f.name), &peek);
    if (s.ok()) s = peek.read_tokens(&its);
    if (!s.ok()) unusable(f, s);
    f.tokens = static_cast<uint64_t>(std::mismatch(its.begin(), its.end(), tokens.begin(), tokens.end()).first - its.begin());
  }
  std::stable_sort(found.begin(), found.end(), longer);
  for (const Found& f : found) {
    if (f.tokens == 0 || std::find(damaged->begin(), damaged->end(), f.name) != damaged->end()) continue;
    const auto reading = [&, rest = tokens.size() - f.tokens](uint64_t done, uint64_t total) {
      *again = total;
      return request.reading(done, total + rest);
    };
    std::unique_ptr<Session> session;
    Status s = Session::load(model, path_of(f.name), request.session, request.verify, request.cancel, request.verifying, &session, f.tokens,
                             request.reading ? Progress::Report(reading) : Progress::Report());
    if (!s.ok() && !is_of_the_file(s.code())) return s;
    if (!s.ok()) unusable(f, s);
    if (!s.ok() || !session->in_document()) continue;
    if (Status touched = os::touch(path_of(f.name)); !touched.ok()) log(2, touched, "; it stays as old as it was");
    outcome->name = f.name;
    outcome->found_tokens = f.tokens;
    *out = std::move(session);
    return {};
  }
  return {};
}

// The tokens that the session does not have yet.
static Status read_rest(Session* session, const LibraryRequest& request, std::span<const Token> tokens, uint64_t again) {
  if (tokens.empty()) return {};
  const auto reading = [&](uint64_t done, uint64_t total) { return request.reading(again + done, again + total); };
  uint64_t done = 0;
  return session->read_document(tokens, request.cancel, request.reading ? Progress::Report(reading) : Progress::Report(), &done);
}

Status Library::session(std::shared_ptr<const Model> model, const LibraryRequest& request, std::unique_ptr<Session>* out,
                        LibraryOutcome* outcome) const {
  *outcome = {};
  if (!request.name.empty())
    if (Status s = check_name(request.name); !s.ok()) return s;
  if (request.text.empty()) return Status::error(Code::bad_argument, "the text is empty");
  std::unique_ptr<Session> fresh;
  if (Status s = Session::open(model, request.session, &fresh); !s.ok()) return s;
  Array<Token> tokens;
  Array<uint32_t> lengths;
  if (Status s = fresh->encode_document(request.text, request.parse_special, request.cancel, &tokens, &lengths); !s.ok()) return s;
  std::vector<std::string> damaged;
  for (;;) {
    std::unique_ptr<Session> session;
    uint64_t again = 0;  // tokens of a document's window that were read once more
    *outcome = {};
    if (Status s = load_best(model, request, *fresh, tokens, &damaged, &again, &session, outcome); !s.ok()) return s;
    const bool found = session != nullptr;
    if (!found) session = std::move(fresh);
    const auto rest = std::span<const Token>(tokens).subspan(outcome->found_tokens);
    Status s = read_rest(session.get(), request, rest, again);
    if (found && s.code() == Code::corrupt) {  // a page, met only now
      log(1, s, "; the library goes on without it");
      damaged.push_back(outcome->name);
      continue;
    }
    if (!s.ok()) return s;
    outcome->tokens = tokens.size();
    if (!rest.empty()) {
      outcome->name = !request.name.empty() ? request.name
                      : !damaged.empty()    ? damaged.front()  // its place is taken by what was read now
                                            : name_after(TokenChain::of(tokens, session->reading_key(session->reads_sparsely())));
      outcome->save_failure = save(session.get(), request, outcome->name);
      outcome->saved = outcome->save_failure.ok();
      if (!outcome->saved) log(1, outcome->save_failure, "; the session is there, its document is not in the library");
    }
    *out = std::move(session);
    return {};
  }
}

}  // namespace kvasir
