// A folder of saved documents, shared by any number of processes: finds what begins like a text, so
// that only the rest is read, and keeps what was read.
//
// The folder's files are all there is: NAME.kv is the document of that name, its own hashes
// (cachefile/token_chain.h) are what it is found by, the file's time is its last use. Nothing else
// could disagree with them.
//
// A document is a plain file NAME.kv, no link, whose NAME check_name() accepts and whose first
// bytes are those of a cache. All functions know these and no others: what else is in the folder is
// not listed, counted, evicted, removed or renamed, and keeps its name.
//
//   open      a session over a document has its file open, locked as shared (CacheFile): it is not
//   evicted or removed evict     under .lock, oldest use first, what can be locked exclusively,
//   until the files fit save      as any: a temporary file, renamed, the latter under .lock when it
//   is known what can go for it; that goes afterwards. A writer's lock on
//             the temporary file ends with the writer; what is not locked then is removed when a
//             library is opened
//   rename    under .lock, so that it does not replace a document
// All locks end with their process. A crash leaves a temporary file, or after a save documents that
// were to go for it, nothing else.
//
// Documents that begin alike do not share their pages on the disk: a copy of the pages of the
// common beginning is in each, at the cost of space, not of time; that a file is whole by itself is
// what makes removing and evicting it safe.
//
// Threads: all functions may run together.
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
  format::Identity identity;  // zeros where the file cannot be read
  Status damage;              // why it cannot
};

struct LibraryRequest {
  std::string_view text;
  bool parse_special = false;
  std::string
      name;  // of the document that is saved, made unique where it is taken; empty: after its hash
  bool replace = false;  // a document of that name
  bool verify = false;   // check all of a file before it is used
  SessionOptions session;
  const Cancel* cancel = nullptr;
  Progress::Report verifying, reading, preparing, saving;
};

struct LibraryOutcome {
  std::string name;           // of the document that the session has, or is saved as
  uint64_t tokens = 0;        // of the session
  uint64_t found_tokens = 0;  // of these the document had
  bool saved = false;
  // why a new document is not in the library though the session is there
  Status save_failure;
};

class Library {
 public:
  static constexpr std::size_t max_name = 200;  // bytes
  // A name is a file's: no path, not hidden, UTF-8, and room for a temporary file's ending.
  // Code::bad_argument.
  static Status check_name(const std::string& name);

  // Makes the folder where there is none, removes what dead writers left, evicts what is too much.
  static Status open(const std::string& folder, const LibraryOptions& options,
                     std::unique_ptr<Library>* out);

  Status list(std::vector<LibraryDocument>* out) const;  // the last used first
  // A session that has read the text: mapped as far as a document begins like it, read from there
  // on, and saved. Code::cancelled: nothing was saved. A document that the save meets damaged is
  // done without, by reading once more; where that fails *out is what had been read, with the
  // damage as save_failure.
  Status session(std::shared_ptr<const Model> model, const LibraryRequest& request,
                 std::unique_ptr<Session>* out, LibraryOutcome* outcome) const;
  Status rename(const std::string& from, const std::string& to) const;
  Status remove(const std::string& name) const;

 private:
  struct Found;
  struct Wanted;
  struct Place {
    std::string name;
    bool replaces = false;  // what has the name
    bool is_there = false;  // under this name, so that nothing has to be saved
  };
  struct Victim {
    std::string name, path;
    os::File lock;  // while it is chosen nobody begins to use it
  };
  static bool longer(const Found& a, const Found& b);
  class Update;

  Library(std::string folder, LibraryOptions options)
      : folder_(std::move(folder)), options_(std::move(options)) {}
  std::string path_of(const std::string& name) const;
  void log(int level, const Status& status, const char* what) const;
  // Calls it for each document, the last used first, until it fails. Status: why the peek tells
  // nothing.
  using Visit =
      std::function<Status(const os::FolderEntry& file, const CachePeek& peek, Status status)>;
  Status for_each(const Visit& visit) const;
  Status require(const std::string& name) const;  // a document of the name, or Code::not_found
  Status keep_limit() const;
  Status sweep() const;
  void go_on_without(const std::string& name, const Status& why) const;
  Status find(const Session& fresh, std::span<const Token> tokens, const Cancel* cancel,
              std::vector<Found>* out) const;
  Status load_best(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
                   const Session& fresh, std::span<const Token> tokens,
                   std::vector<Found>* unusable, uint64_t* again, Found* used,
                   std::unique_ptr<Session>* out) const;
  Status read(const std::shared_ptr<const Model>& model, const LibraryRequest& request,
              std::span<const Token> tokens, std::span<const uint32_t> lengths,
              std::unique_ptr<Session> fresh, std::unique_ptr<Session>* out,
              LibraryOutcome* outcome) const;
  void keep(Session* session, const LibraryRequest& request, std::span<const Token> tokens,
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
  mutable std::mutex told_mutex_;
  mutable std::set<std::string> told_;  // documents of another version, of which the log knows
};

}  // namespace kvasir
