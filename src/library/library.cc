// The folder: its documents, names and size.
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <thread>

#include "library/library_names.h"
#include "os/os.h"
#include "session/saved_documents.h"
#include "text/utf8.h"

namespace kvasir {

namespace {

constexpr std::string_view ending = ".kv";
constexpr char lock_name[] = ".lock";
constexpr int lock_tries = 1000;  // 10 ms apart

// Makes a change of names in the folder durable.
Status make_durable(const std::string& path, const char* change) {
  Status s = os::sync_folder_of(path);
  if (s.ok()) return s;
  return Status::error(s.code(), "%s is %s, but a power cut may still undo it: %s", path.c_str(),
                       change, s.message())
      .with_errno(s.sys_errno());
}

bool is_utf8(std::string_view text) {
  std::size_t length = 0;
  for (; !text.empty(); text.remove_prefix(length))
    if (utf8_step(text, &length) != Utf8::valid) return false;
  return true;
}

// Whether Kvasir wrote the file, also one that cannot be read.
bool is_ours(const Status& s) {
  return s.ok() || s.code() == Code::corrupt || s.code() == Code::version;
}

// A unique name: the name, cut if too long, the start of a hash and, from the second on, a number.
std::string with_ending(const std::string& name, const std::string& hash, uint32_t number) {
  if (number == 0) return name;
  const std::string added =
      "-" + hash.substr(0, 8) + (number == 1 ? "" : "-" + std::to_string(number));
  std::size_t size = std::min(name.size(), Library::max_name - added.size());
  while (size < name.size() && size > 0 && (static_cast<unsigned char>(name[size]) & 0xC0) == 0x80)
    --size;
  return name.substr(0, size) + added;
}

}  // namespace

Status Library::check_name(const std::string& name) {
  const auto refused = [&](const char* why) {
    return Status::error(Code::bad_argument, "such a name cannot be a document's: %s", why);
  };
  if (name.empty()) return refused("it is empty");
  if (name.size() > Library::max_name) return refused("it is longer than 200 bytes");
  if (name.front() == '.') return refused("it begins with a dot");
  const auto bad = [](char c) {
    return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
  };
  if (std::any_of(name.begin(), name.end(), bad))
    return refused("it has a slash, a backslash or a control character");
  if (!is_utf8(name)) return refused("it is not UTF-8");
  if (!os::can_name_file(name)) return refused("this system's files cannot have it");
  return {};
}

// The lock of every change of the folder.
class Library::Update {
 public:
  Status begin(const std::string& folder, const Cancel* cancel = nullptr) {
    if (Status s = os::File::open_lock(folder + "/" + lock_name, &file_); !s.ok()) return s;
    for (int i = 0; i < lock_tries; ++i) {
      if (is_cancelled(cancel))
        return Status::error(Code::cancelled, "cancelled; nothing was changed");
      bool got = false;
      if (Status s = file_.lock(os::Lock::exclusive, &got); !s.ok() || got) return s;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return Status::error(
        Code::busy,
        "%s: other processes have been changing the library for 10 seconds; nothing was changed",
        folder.c_str());
  }

 private:
  os::File file_;
};

Status Library::open(const std::string& folder, const LibraryOptions& options,
                     std::unique_ptr<Library>* out) {
  if (folder.empty()) return Status::error(Code::bad_argument, "the library's folder has no name");
  std::string path;  // absolute: the current folder may change
  if (Status s = os::absolute_path(folder, &path); !s.ok()) return s;
  if (Status s = os::make_folder(path); !s.ok()) return s;
  std::unique_ptr<Library> library(new Library(std::move(path), options));
  if (Status s = library->sweep(); !s.ok()) return s;
  if (options.max_bytes > 0)
    if (Status s = library->keep_limit(); !s.ok()) return s;
  *out = std::move(library);
  return {};
}

Status Library::keep_limit() const {
  Update update;
  std::vector<Victim> victims;
  Status s = update.begin(folder_);
  if (s.code() == Code::permission) {  // a folder that cannot be changed does not grow
    log(1, s, "; nothing can be evicted");
    return {};
  }
  if (s.ok()) s = choose_victims(0, "", &victims);
  if (s.ok()) evict(victims);
  return s;
}

std::string Library::path_of(const std::string& name) const {
  return folder_ + "/" + name + std::string(ending);
}

void Library::log(int level, const Status& status, const char* what) const {
  if (options_.log) options_.log(level, (std::string(status.message()) + what).c_str());
}

Status Library::for_each(const Visit& visit) const {
  std::vector<os::FolderEntry> files;
  if (Status s = os::list_folder(folder_, &files); !s.ok()) return s;
  std::erase_if(files, [](os::FolderEntry& file) {
    if (!file.name.ends_with(ending)) return true;
    file.name.resize(file.name.size() - ending.size());
    return !check_name(file.name).ok();
  });
  // Equal times are ordered by name.
  std::sort(files.begin(), files.end(), [](const os::FolderEntry& a, const os::FolderEntry& b) {
    return a.modified_ns != b.modified_ns ? a.modified_ns > b.modified_ns : a.name < b.name;
  });
  for (const os::FolderEntry& file : files) {
    CachePeek peek;
    Status s = CachePeek::open(path_of(file.name), &peek);
    if (s.code() == Code::not_found || s.code() == Code::not_a_cache)
      continue;  // removed meanwhile, or of another program
    if (Status stopped = visit(file, peek, std::move(s)); !stopped.ok()) return stopped;
  }
  return {};
}

Status Library::list(std::vector<LibraryDocument>* out) const {
  return for_each([out](const os::FolderEntry& file, const CachePeek& peek, Status s) {
    const format::Identity identity = s.ok() ? peek.identity() : format::Identity();
    const bool refers = s.ok() && refers_to_documents(peek);
    out->push_back({file.name, file.bytes, file.modified_ns, identity, std::move(s), refers});
    return Status();
  });
}

Status Library::compose(const std::shared_ptr<const Model>& model,
                        const LibraryComposition& request, std::unique_ptr<Session>* out) const {
  std::vector<std::string> paths;
  for (const std::string& name : request.names) {
    RETURN_IF_ERROR(require(name));
    paths.push_back(path_of(name));
  }
  Session::ComposeRequest composed{{}, request.max_documents, request.cancel, {}};
  if (request.names.empty()) {
    RETURN_IF_ERROR(for_each([&](const os::FolderEntry& file, const CachePeek& peek, Status s) {
      if (!s.ok()) log_unusable(file.name, s);
      else if (model->is_of(peek.identity()) && !refers_to_documents(peek))
        paths.push_back(path_of(file.name));
      return Status();
    }));
    std::sort(paths.begin(), paths.end());
    composed.leaves_out = [this](const std::string&, const Status& why) {
      log(1, why, "; the session leaves it out");
      return why.code() != Code::no_memory && why.code() != Code::limit;
    };
  }
  if (paths.empty())
    return Status::error(Code::not_found, "%s has no document of this model", folder_.c_str());
  composed.paths = paths;
  RETURN_IF_ERROR(Session::compose(model, composed, request.session, out));
  for (const DocumentReport& document : (*out)->documents())
    if (Status s = os::touch(document.path); !s.ok()) log(2, s, "; it stays as old as it was");
  return {};
}

Status Library::require(const std::string& name) const {
  std::vector<LibraryDocument> all;
  if (Status s = list(&all); !s.ok()) return s;
  if (std::any_of(all.begin(), all.end(),
                  [&](const LibraryDocument& document) { return document.name == name; }))
    return {};
  return Status::error(Code::not_found, "%s has no document '%s'", folder_.c_str(), name.c_str());
}

// Locks a document that no session has open. Logs if that cannot be determined.
bool Library::lock_unused(const std::string& name, os::File* file) const {
  bool locked = false;
  Status s = os::File::open_to_lock(path_of(name), file);
  if (s.ok()) s = file->lock(os::Lock::exclusive, &locked);
  if (!s.ok() && s.code() != Code::not_found) log(1, s, "; it cannot be evicted");
  return locked;
}

// Removes temporary files of Kvasir that no writer has locked.
Status Library::sweep() const {
  std::vector<os::FolderEntry> files;
  if (Status s = os::list_folder(folder_, &files); !s.ok()) return s;
  for (const os::FolderEntry& entry : files) {
    if (!os::is_temporary_name(entry.name)) continue;
    const std::string path = folder_ + "/" + entry.name;
    os::File file;
    bool locked = false;
    if (!os::File::open_to_lock(path, &file).ok() ||
        !file.lock(os::Lock::exclusive, &locked).ok() || !locked)
      continue;
    if (!may_be_unfinished(file)) continue;
    if (Status s = os::remove_file(path); !s.ok() && s.code() != Code::not_found)
      log(1, s, "; a dead writer left it");
  }
  return {};
}

// Chooses the least recently used documents that are not open, until `bytes` more fit, which
// replace the document `replaced`. If they cannot fit, Code::no_space and no victim; with `bytes`
// 0, all possible victims. Called during an update. Files that cannot be read may be of other
// programs, and conversations over documents were not read: they neither count nor are evicted.
Status Library::choose_victims(uint64_t bytes, const std::string& replaced,
                               std::vector<Victim>* out) const {
  if (options_.max_bytes == 0) return {};
  std::vector<LibraryDocument> files;
  if (Status s = list(&files); !s.ok()) return s;
  std::erase_if(files, [&](const LibraryDocument& file) {
    return (bytes > 0 && file.name == replaced) || !is_ours(file.damage) || file.refers;
  });
  uint64_t remaining = bytes;
  for (const LibraryDocument& file : files) remaining += file.bytes;
  for (std::size_t i = files.size();
       i-- > 0 && remaining > options_.max_bytes && bytes <= options_.max_bytes;) {
    Victim victim{files[i].name, path_of(files[i].name), {}};
    if (!lock_unused(victim.name, &victim.lock)) continue;
    remaining -= files[i].bytes;
    out->push_back(std::move(victim));
  }
  if (bytes == 0 || remaining <= options_.max_bytes) return {};
  return Status::error(Code::no_space,
                       "%s has no room for the new document of %" PRIu64
                       " bytes: it may hold %" PRIu64
                       ", and its documents are in use; the document was not saved",
                       folder_.c_str(), bytes, options_.max_bytes);
}

// Documents that cannot be removed now are evicted by the next save or open.
void Library::evict(const std::vector<Victim>& victims) const {
  try {
    for (const Victim& victim : victims) {
      Status s = os::remove_file(victim.path);
      if (s.ok() && options_.log)
        options_.log(2, (victim.name + " was evicted from the library").c_str());
      if (!s.ok() && s.code() != Code::not_found) log(1, s, "; it cannot be evicted");
    }
  } catch (const std::bad_alloc&) {
  }
}

// Chooses the name of the new document. It replaces only the document that the caller names, or a
// damaged one of this text. A document of the same text and model that another process has saved
// meanwhile stays.
Status Library::choose_place(const Wanted& wanted, Place* out) const {
  if (wanted.name.empty() && !wanted.damaged.empty()) {
    *out = {wanted.damaged.front(), true, false};
    return {};
  }
  constexpr uint32_t max_endings = 1000;
  const std::string& name = wanted.name.empty() ? wanted.hash : wanted.name;
  for (uint32_t i = 0; i < max_endings; ++i) {
    *out = {with_ending(name, wanted.hash, i), false, false};
    const std::string path = path_of(out->name);
    if (!os::exists(path)) return {};
    const auto is_among = [&](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), out->name) != names.end();
    };
    out->replaces = is_among(wanted.damaged);
    if (out->replaces) return {};
    CachePeek peek;
    const Status s = CachePeek::open(path, &peek);
    out->is_there = s.ok() && !is_among(wanted.unusable) && wanted.is_in(peek);
    out->replaces = i == 0 && wanted.replace && is_ours(s) && !out->is_there;
    if (out->is_there || out->replaces) return {};
  }
  return Status::error(Code::bad_state,
                       "%s has too many documents '%s'; the document was not saved",
                       folder_.c_str(), name.c_str());
}

// The folder is locked only when the new file is complete, for a moment. The lock of a document
// that is being removed does not cover the file that a save renames into its place, so saves,
// removals and renames exclude each other. Victims are removed after the new file is durable in
// place: a failure in between removes no document, and after a crash the next save or open evicts
// them.
Status Library::save(Session* session, const LibraryRequest& request, const Wanted& wanted,
                     Place* place) const {
  Update update;
  std::vector<Victim> victims;
  if (Status s = choose_place(wanted, place); !s.ok() || place->is_there) return s;
  const auto make_place = [&](uint64_t bytes, std::string* path) {
    if (Status s = update.begin(folder_, request.cancel); !s.ok()) return s;
    if (Status s = choose_place(wanted, place); !s.ok())
      return s;  // another process may have taken the name meanwhile
    if (place->is_there)
      return Status::error(Code::bad_state, "%s has the document already", folder_.c_str());
    *path = path_of(place->name);
    return choose_victims(bytes, place->replaces ? place->name : "", &victims);
  };
  Status s = session->save(path_of(place->name), request.cancel, request.saving, request.preparing,
                           make_place);
  if (place->is_there) return {};
  if (s.ok()) evict(victims);
  return s;
}

Status Library::rename(const std::string& from, const std::string& to) const {
  if (Status s = check_name(from); !s.ok()) return s;
  if (Status s = check_name(to); !s.ok()) return s;
  Update update;
  if (Status s = update.begin(folder_); !s.ok()) return s;
  if (Status s = require(from); !s.ok()) return s;
  if (from == to) return {};
  // the same file under both names, in a file system that ignores case
  os::File there;
  const auto is_from = [&] {
    return os::File::open_to_lock(path_of(to), &there).ok() && there.is_at(path_of(from));
  };
  if (require(to).ok() || (os::exists(path_of(to)) && !is_from()))
    return Status::error(Code::bad_state,
                         "%s has a document or a file '%s' already; nothing was renamed",
                         folder_.c_str(), to.c_str());
  if (Status s = os::rename_replace(path_of(from), path_of(to)); !s.ok()) return s;
  return make_durable(path_of(to), "in place");
}

Status Library::remove(const std::string& name) const {
  if (Status s = check_name(name); !s.ok()) return s;
  Update update;
  if (Status s = update.begin(folder_); !s.ok()) return s;
  if (Status s = require(name); !s.ok()) return s;
  os::File file;
  if (Status s = os::File::open_to_lock(path_of(name), &file); !s.ok()) return s;
  bool locked = false;
  if (Status s = file.lock(os::Lock::exclusive, &locked); !s.ok()) return s;
  if (!locked)
    return Status::error(Code::busy,
                         "%s is open in a session: close it first; the document is still there",
                         path_of(name).c_str());
  if (Status s = os::remove_file(path_of(name)); !s.ok()) return s;
  return make_durable(path_of(name), "removed");
}

}  // namespace kvasir
