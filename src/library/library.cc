// The folder: what is in it, names, room.
#include "library/library.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <thread>

#include "os/os.h"
#include "store/cache_peek.h"

namespace kvasir {

namespace {

constexpr std::string_view ending = ".kv";
constexpr char lock_name[] = ".lock";
constexpr int lock_tries = 1000;  // 10 ms apart

// After a change of names in the folder.
Status make_durable(const std::string& path, const char* change) {
  Status s = os::sync_folder_of(path);
  if (s.ok()) return s;
  return Status::error(s.code(), "%s is %s, but a power cut may still undo it: %s", path.c_str(), change, s.message()).with_errno(s.sys_errno());
}

}  // namespace

Status Library::check_name(const std::string& name) {
  const auto refused = [&](const char* why) { return Status::error(Code::bad_argument, "such a name cannot be a document's: %s", why); };
  if (name.empty()) return refused("it is empty");
  if (name.size() > Library::most_name) return refused("it is longer than 200 bytes");
  if (name.front() == '.') return refused("it begins with a dot");
  const auto bad = [](char c) { return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || c == 0x7F; };
  if (std::any_of(name.begin(), name.end(), bad)) return refused("it has a slash, a backslash or a control character");
  if (!os::can_name_file(name)) return refused("this system's files cannot have it");
  return {};
}

// The lock of all that changes the folder.
class Library::Update {
 public:
  Status begin(const std::string& folder, const Cancel* cancel = nullptr) {
    if (Status s = os::File::open_lock(folder + "/" + lock_name, &file_); !s.ok()) return s;
    for (int i = 0; i < lock_tries; ++i) {
      if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled; nothing was changed");
      bool got = false;
      if (Status s = file_.lock(os::Lock::exclusive, &got); !s.ok() || got) return s;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return Status::error(Code::busy, "%s: others have been changing the library for 10 seconds; nothing was changed", folder.c_str());
  }

 private:
  os::File file_;
};

Status Library::open(const std::string& folder, const LibraryOptions& options, std::unique_ptr<Library>* out) {
  if (folder.empty()) return Status::error(Code::bad_argument, "the library's folder has no name");
  if (Status s = os::make_folder(folder); !s.ok()) return s;
  std::unique_ptr<Library> library(new Library(folder, options));
  if (Status s = library->sweep(); !s.ok()) return s;
  if (options.most_bytes > 0) {
    Update update;
    if (Status s = update.begin(folder); !s.ok()) return s;
    std::vector<Victim> victims;
    if (Status s = library->choose_victims(0, "", &victims); !s.ok()) return s;
    library->evict(victims);
  }
  *out = std::move(library);
  return {};
}

std::string Library::path_of(const std::string& name) const { return folder_ + "/" + name + std::string(ending); }

void Library::log(int level, const Status& status, const char* what) const {
  if (options_.log) options_.log(level, (std::string(status.message()) + what).c_str());
}

// Files of documents; names without the ending.
Status Library::documents(std::vector<os::FolderEntry>* out) const {
  std::vector<os::FolderEntry> files;
  if (Status s = os::list_folder(folder_, &files); !s.ok()) return s;
  for (os::FolderEntry& file : files) {
    if (file.name.size() <= ending.size() || !file.name.ends_with(ending) || file.name.front() == '.') continue;
    file.name.resize(file.name.size() - ending.size());
    out->push_back(std::move(file));
  }
  // By name where the times are the same, so that the order is complete.
  std::sort(out->begin(), out->end(), [](const os::FolderEntry& a, const os::FolderEntry& b) {
    return a.modified_ns != b.modified_ns ? a.modified_ns > b.modified_ns : a.name < b.name;
  });
  return {};
}

// A document that nobody has open, locked by *file; logged where that cannot be found out.
bool Library::lock_unused(const std::string& name, os::File* file) const {
  bool locked = false;
  Status s = os::File::open_to_lock(path_of(name), file);
  if (s.ok()) s = file->lock(os::Lock::exclusive, &locked);
  if (!s.ok() && s.code() != Code::not_found) log(1, s, "; it cannot be evicted");
  return locked;
}

// Removes temporary files whose writers are gone: nobody has them locked.
Status Library::sweep() const {
  std::vector<os::FolderEntry> files;
  if (Status s = os::list_folder(folder_, &files); !s.ok()) return s;
  for (const os::FolderEntry& entry : files) {
    if (!os::is_temporary_name(entry.name)) continue;
    const std::string path = folder_ + "/" + entry.name;
    os::File file;
    bool locked = false;
    if (!os::File::open_to_lock(path, &file).ok() || !file.lock(os::Lock::exclusive, &locked).ok() || !locked) continue;
    if (Status s = os::remove_file(path); !s.ok() && s.code() != Code::not_found) log(1, s, "; a writer that is gone left it behind");
  }
  return {};
}

// Chooses what was used longest ago and is not open, until `bytes` more, which take the place of the document `replaced`, fit. Where that would not do
// none goes, Code::no_space; but with no bytes to come what can go goes. During an update.
Status Library::choose_victims(uint64_t bytes, const std::string& replaced, std::vector<Victim>* out) const {
  if (options_.most_bytes == 0) return {};
  std::vector<os::FolderEntry> files;
  if (Status s = documents(&files); !s.ok()) return s;
  std::erase_if(files, [&](const os::FolderEntry& file) { return bytes > 0 && file.name == replaced; });
  uint64_t remaining = bytes;
  for (const os::FolderEntry& file : files) remaining += file.bytes;
  for (std::size_t i = files.size(); i-- > 0 && remaining > options_.most_bytes && bytes <= options_.most_bytes;) {
    Victim victim{files[i].name, path_of(files[i].name), {}};
    if (!lock_unused(victim.name, &victim.lock)) continue;
    remaining -= files[i].bytes;
    out->push_back(std::move(victim));
  }
  if (bytes == 0 || remaining <= options_.most_bytes) return {};
  return Status::error(Code::no_space, "%s has no room for the new document of %" PRIu64 " bytes: it may hold %" PRIu64
                       ", and what is in it is in use; the document was not kept", folder_.c_str(), bytes, options_.most_bytes);
}

// What is left goes when room is made the next time.
void Library::evict(const std::vector<Victim>& victims) const {
  try {
    for (const Victim& victim : victims) {
      Status s = os::remove_file(victim.path);
      if (s.ok() && options_.log) options_.log(2, (victim.name + " was evicted from the library").c_str());
      if (!s.ok() && s.code() != Code::not_found) log(1, s, "; it cannot be evicted");
    }
  } catch (const std::bad_alloc&) {
  }
}

// The folder changes when the file is whole: only then is it locked, for a moment. A document that is being removed by its name is locked, which says
// nothing of the file that a save puts in its place: so saves, removals and renames do not meet. What goes for the new document goes after it has its
// name, durably: a failure in between costs no document, and a crash leaves more than there may be until room is made again, by the next save or open.
Status Library::save(Session* session, const LibraryRequest& request, const std::string& name) const {
  Update update;
  std::vector<Victim> victims;
  const auto make_place = [&](uint64_t bytes) {
    if (Status s = update.begin(folder_, request.cancel); !s.ok()) return s;
    if (request.no_replace)
      if (Status s = check_replaces(name, session->model(), session->tokens()); !s.ok()) return s;
    return choose_victims(bytes, name, &victims);
  };
  if (Status s = session->save(path_of(name), request.cancel, request.saving, request.preparing, make_place); !s.ok()) return s;
  evict(victims);
  return {};
}

Status Library::list(std::vector<LibraryDocument>* out) const {
  std::vector<os::FolderEntry> files;
  if (Status s = documents(&files); !s.ok()) return s;
  for (const os::FolderEntry& file : files) {
    CachePeek peek;
    Status s = CachePeek::open(path_of(file.name), &peek);
    if (s.code() == Code::not_found) continue;  // gone meanwhile
    out->push_back({file.name, file.bytes, file.modified_ns, s.ok() ? peek.identity() : format::Identity(), std::move(s)});
  }
  return {};
}

Status Library::rename(const std::string& from, const std::string& to) const {
  if (Status s = check_name(from); !s.ok()) return s;
  if (Status s = check_name(to); !s.ok()) return s;
  Update update;
  if (Status s = update.begin(folder_); !s.ok()) return s;
  std::vector<os::FolderEntry> files;
  if (Status s = documents(&files); !s.ok()) return s;
  const auto has = [&](const std::string& name) {
    return std::any_of(files.begin(), files.end(), [&](const os::FolderEntry& file) { return file.name == name; });
  };
  if (!has(from)) return Status::error(Code::not_found, "%s has no document '%s'", folder_.c_str(), from.c_str());
  if (from == to) return {};
  os::File there;  // under a name that the file system takes for this one, as where it does not tell capitals
  if (has(to) || (os::File::open_read(path_of(to), &there).ok() && !there.is_at(path_of(from))))
    return Status::error(Code::bad_state, "%s has a document '%s' already; nothing was renamed", folder_.c_str(), to.c_str());
  if (Status s = os::rename_replace(path_of(from), path_of(to)); !s.ok()) return s;
  return make_durable(path_of(to), "in place");
}

Status Library::remove(const std::string& name) const {
  if (Status s = check_name(name); !s.ok()) return s;
  Update update;
  if (Status s = update.begin(folder_); !s.ok()) return s;
  os::File file;
  if (Status s = os::File::open_to_lock(path_of(name), &file); !s.ok()) return s;
  bool locked = false;
  if (Status s = file.lock(os::Lock::exclusive, &locked); !s.ok()) return s;
  if (!locked)
    return Status::error(Code::busy, "%s is open in a session: close it first; the document is still there", path_of(name).c_str());
  if (Status s = os::remove_file(path_of(name)); !s.ok()) return s;
  return make_durable(path_of(name), "removed");
}

}  // namespace kvasir
