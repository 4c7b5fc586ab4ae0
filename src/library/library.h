// A folder of saved documents, shared by any number of processes. It finds the document that begins
// like a text, so that only the rest is prefilled, and saves the result.
//
// The files are the only state: NAME.kv is the document of that name, its hashes
// (cachefile/token_chain.h) find it, and the file's time is its last use.
//
// A document is a plain file NAME.kv, no link, whose NAME check_name() accepts and whose first
// bytes are those of a cache file. All other files are neither listed, counted, evicted, removed,
// renamed nor replaced.
//
//   open      A session holds a shared lock on its file (CacheFile): no eviction, no removal.
//   evict     Under .lock: takes the least recently used files that can be locked exclusively,
//             until the rest fits.
//   save      Writes a temporary file and renames it. The rename is under .lock, after the victims
//             are chosen; they are removed afterwards. A writer's lock on its temporary file ends
//             with the writer. Opening a library removes temporary files without a lock.
//   rename    Under .lock, so that it replaces no document.
// Locks end with their process. A crash leaves at most a temporary file, or the victims of a save.
//
// Each document is complete by itself: documents with a common beginning do not share pages on the
// disk. That costs space and no time, and makes removal and eviction safe.
//
// Thread safety: all functions may run at the same time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cachefile/cache_peek.h"
#include "cachefile/format.h"
#include "os/os.h"
#include "session/session.h"

namespace kvasir {

struct LibraryOptions {
  uint64_t max_bytes = 0;  // of all documents; 0: no limit
  LogFn log;
};

struct LibraryDocument {
  std::string name;
  uint64_t bytes = 0;
  uint64_t used_ns = 0;       // since 1970
  format::Identity identity;  // zeros if the file cannot be read
  Status damage;              // why not
  bool refers = false;        // a conversation over documents
};

struct LibraryRequest {
  std::string_view text;
  bool parse_special = false;
  std::string name;      // of the saved document, made unique if it is taken; empty: its hash
  bool replace = false;  // a document of that name
  bool verify = false;   // verify the whole file before use
  SessionOptions session;
  const Cancel* cancel = nullptr;
  Progress::Report verifying, reading, preparing, saving;
};

struct LibraryComposition {
  std::vector<std::string> names;  // none: all documents, by name
  uint32_t max_documents = 0;      // as Session::compose()
  SessionOptions session;
  const Cancel* cancel = nullptr;
};

struct LibraryOutcome {
  std::string name;           // of the document found or saved
  uint64_t tokens = 0;        // of the session
  uint64_t found_tokens = 0;  // of these, found in a document
  bool saved = false;
  Status save_failure;  // why the new document is not in the library although the session exists
};

class Library {
 public:
  static constexpr std::size_t max_name = 200;  // bytes
  // A name has no path, is not hidden, is UTF-8, and leaves room for the suffix of a temporary
  // file. Code::bad_argument.
  static Status check_name(const std::string& name);

  // Creates the folder if it does not exist, removes temporary files of dead writers, evicts.
  static Status open(const std::string& folder, const LibraryOptions& options,
                     std::unique_ptr<Library>* out);

  Status list(std::vector<LibraryDocument>* out) const;  // the most recently used first
  // Creates a session of the text: maps the longest common beginning, prefills the rest, saves.
  // Code::cancelled: nothing was saved. If the save meets a damaged document, the text is prefilled
  // again without it. If that fails, *out is the first session and save_failure is the damage.
  Status session(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                 std::unique_ptr<Session>* out, LibraryOutcome* outcome) const;
  // Creates a session over documents: those named, or all of this model that can be used; the log
  // has the others. Code::not_found: there is none, or none of the name. Codes as
  // kv_library_compose.
  Status compose(const std::shared_ptr<const Model>& model, const LibraryComposition& request,
                 std::unique_ptr<Session>* out) const;
  Status rename(const std::string& from, const std::string& to) const;
  Status remove(const std::string& name) const;

 private:
  struct Found;
  struct Wanted;
  struct Place {
    std::string name;
    bool replaces = false;  // the file of that name
    bool is_there = false;  // the document exists under this name: nothing to save
  };
  struct Victim {
    std::string name, path;
    os::File lock;  // no session opens it meanwhile
  };
  static bool longer(const Found& a, const Found& b);
  class Update;

  Library(std::string folder, LibraryOptions options)
      : folder_(std::move(folder)), options_(std::move(options)) {}
  std::string path_of(const std::string& name) const;
  void log(int level, const Status& status, const char* what) const;
  // Calls `visit` for each document, the most recently used first, until it fails. status: why
  // `peek` is empty.
  using Visit =
      std::function<Status(const os::FolderEntry& file, const CachePeek& peek, Status status)>;
  Status for_each(const Visit& visit) const;
  Status require(const std::string& name) const;  // a document of the name, or Code::not_found
  Status keep_limit() const;
  Status sweep() const;
  void log_unusable(const std::string& name, const Status& why) const;
  Status find(const Session& fresh, std::span<const Token> tokens, const Cancel* cancel,
              std::vector<Found>* out) const;
  Status load_best(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                   const Session& fresh, std::span<const Token> tokens,
                   std::vector<Found>* unusable, uint64_t* again, Found* used,
                   std::unique_ptr<Session>* out) const;
  Status prefill(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                 std::span<const Token> tokens, std::span<const uint32_t> lengths,
                 std::unique_ptr<Session> fresh, std::unique_ptr<Session>* out,
                 LibraryOutcome* outcome) const;
  void save_result(Session* session, const LibraryRequest& request, std::span<const Token> tokens,
                   std::span<const Found> unusable, LibraryOutcome* outcome) const;
  Status choose_place(const Wanted& wanted, Place* out) const;
  Status save(Session* session, const LibraryRequest& request, const Wanted& wanted,
              Place* place) const;
  bool lock_unused(const std::string& name, os::File* file) const;
  Status choose_victims(uint64_t bytes, const std::string& replaced,
                        std::vector<Victim>* out) const;
  void evict(const std::vector<Victim>& victims) const;

  std::string folder_;
  LibraryOptions options_;
  mutable std::mutex logged_mutex_;
  mutable std::set<std::string> logged_;  // documents of another version: logged once
};

}  // namespace kvasir
