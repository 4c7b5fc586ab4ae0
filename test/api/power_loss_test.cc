// A power cut at every operation of a save and of a library's changes, by a model of the disk:
// names come back in the order in which they were made, up to any point since the folder's last
// sync; bytes that were not synced come back as they are, not at all, as zeros, cut or torn.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "failing_files.h"
#include "helpers.h"
#include "library_helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

using Bytes = std::vector<uint8_t>;
using Names = std::map<std::string, ino_t>;

// Watches one folder. What the hook sees before an operation is what the operation before it did.
class Disk {
 public:
  // Called for each folder that a cut may leave.
  using Check = std::function<void(const std::string& folder)>;

  Disk(const std::string& folder, Check check) : folder_(folder), check_(std::move(check)) {
    names_ = {look()};
    for (const auto& [name, inode] : names_.back())
      synced_[inode] = read_file(folder_ + "/" + name);
    current = this;
  }
  ~Disk() {
    current = nullptr;
    for (const auto& [inode, descriptor] : held_) ::close(descriptor);
  }

  // Runs the call with cuts at each of its operations, and then once more with what it promised by
  // returning.
  void during(const std::function<void()>& call, const Check& afterwards) {
    {
      const failing_files::WithFault fault(hook);
      call();
    }
    settle();
    check_ = afterwards;
    operation_ = "none";
    cut();
  }
  long cuts() const { return cuts_; }

 private:
  static Disk* current;

  static int hook(const char* operation, const char* path) {
    static constexpr const char* reading[] = {"read", "map", "lock", "list"};
    for (const char* name : reading)
      if (std::strcmp(operation, name) == 0) return 0;
    // The check's own operations on the disk are not recorded.
    kvasir::os::fault = nullptr;
    current->settle();
    current->cut();
    current->operation_ = operation;
    current->path_ = path;
    kvasir::os::fault = hook;
    return 0;
  }

  // The files of the folder. Each is held open, so that no inode's number comes back as another
  // file's.
  Names look() {
    Names names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const int descriptor = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
      struct stat info;
      REQUIRE(fstat(descriptor, &info) == 0);
      names[entry.path().filename().string()] = info.st_ino;
      if (!held_.try_emplace(info.st_ino, descriptor).second) ::close(descriptor);
    }
    return names;
  }

  Bytes bytes_of(ino_t inode) const {
    struct stat info;
    REQUIRE(fstat(held_.at(inode), &info) == 0);
    Bytes bytes(static_cast<std::size_t>(info.st_size));
    REQUIRE(pread(held_.at(inode), bytes.data(), bytes.size(), 0) == info.st_size);
    return bytes;
  }

  // What the last operation made durable.
  void settle() {
    const Names now = look();
    if (now != names_.back()) names_.push_back(now);
    if (operation_ == "sync_folder") names_ = {now};
    const auto file = now.find(std::filesystem::path(path_).filename().string());
    if (operation_ == "sync" && file != now.end()) synced_[file->second] = bytes_of(file->second);
  }

  enum class Unsynced { kept, dropped, zeroed, cut, torn };

  Bytes after_cut(ino_t inode, Unsynced kind) {
    const Bytes now = bytes_of(inode), &before = synced_[inode];
    if (now == before || kind == Unsynced::dropped) return before;
    Bytes out = now;
    if (kind == Unsynced::cut) out.resize(random_() % (now.size() + 1));
    if (kind == Unsynced::zeroed || kind == Unsynced::torn) {
      for (std::size_t sector = 0; sector < out.size(); sector += 512)
        for (std::size_t i = sector; i < std::min(out.size(), sector + 512); ++i)
          if (kind == Unsynced::zeroed || random_() % 2 == 0)
            out[i] = i < before.size() ? before[i] : 0;
    }
    return out;
  }

  void cut() {
    for (const Names& names : names_) {
      for (Unsynced kind :
           {Unsynced::kept, Unsynced::dropped, Unsynced::zeroed, Unsynced::cut, Unsynced::torn}) {
        bool differs = kind == Unsynced::kept;
        for (const auto& [name, inode] : names) differs |= bytes_of(inode) != synced_[inode];
        if (!differs) continue;
        TempFolder left;
        for (const auto& [name, inode] : names) write_file(left.file(name), after_cut(inode, kind));
        CAPTURE(operation_);
        CAPTURE(static_cast<int>(kind));
        check_(left.path());
        ++cuts_;
        count_faults("power is cut");
      }
    }
  }

  std::string folder_;
  Check check_;
  std::vector<Names> names_;  // since the folder's last sync, the first as it was then
  std::map<ino_t, Bytes> synced_;
  std::map<ino_t, int> held_;     // descriptors
  std::string operation_, path_;  // the last one that went on
  std::mt19937 random_{11};
  long cuts_ = 0;
};

Disk* Disk::current = nullptr;

std::size_t tokens_in(const std::string& path) {
  return sequence(load(tiny_model(), path, KV_VERIFY).get()).size();
}

void add(kv_library* library, const char* name, std::size_t bytes) {
  kv_session_options session = small_options();
  session.threads = 1;
  kv_library_session_options o;
  kv_init(&o, sizeof o);
  o.name = name;
  o.session = &session;
  kv_session* out = nullptr;
  kv_library_result result{};
  result.struct_size = sizeof result;
  const std::string text(bytes, name[0]);
  REQUIRE_OK(kv_library_session(library, tiny_model(), text.data(), text.size(), &o, nullptr, &out,
                                &result, error));
  CHECK(result.saved == 1);
  kv_session_close(out);
}

// Names of documents with how many tokens each has; all of them whole, and nothing else is there.
std::map<std::string, uint64_t> documents_in(const std::string& folder) {
  const Library library = open_library(folder);
  std::map<std::string, uint64_t> out;
  for (uint32_t i = 0;; ++i) {
    kv_library_document d{};
    d.struct_size = sizeof d;
    const kv_status status = kv_library_list(library.get(), i, &d, nullptr);
    if (status == KV_NOT_FOUND) break;
    REQUIRE(status == KV_OK);
    CHECK(d.status == KV_OK);
    REQUIRE_OK(kv_file_verify((folder + "/" + d.name + ".kv").c_str(), nullptr, error));
    out[d.name] = d.tokens;
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    CHECK(entry.path().extension() != ".tmp");
  return out;
}

using Documents = std::map<std::string, uint64_t>;

}  // namespace

TEST_CASE("a power cut at any operation of a save leaves the old document or the new one") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Session old = tiny_session(100), session = tiny_session(300);
  save(old.get(), path);
  Disk disk(folder.path(), [](const std::string& left) {
    const std::size_t tokens = tokens_in(left + "/a.kv");
    CHECK((tokens == 100 || tokens == 300));
  });
  disk.during([&] { save(session.get(), path); },
              [](const std::string& left) { CHECK(tokens_in(left + "/a.kv") == 300); });
  CHECK(disk.cuts() > 30);
}

TEST_CASE(
    "a power cut at any operation of packing and unpacking leaves what was there, or all of what "
    "comes") {
  TempFolder folder;
  const std::string plain = folder.file("a.kv"), packed = folder.file("a.kvz"),
                    back = folder.file("b.kv");
  save(tiny_session(300).get(), plain);
  const Bytes document = read_file(plain);
  const auto must_restore = [&](const std::string& left) {
    const TempFolder elsewhere;
    REQUIRE_OK(
        kv_unpack((left + "/a.kvz").c_str(), elsewhere.file("a.kv").c_str(), nullptr, error));
    CHECK(read_file(elsewhere.file("a.kv")) == document);
  };
  const auto must_be_back = [&](const std::string& left) {
    CHECK(read_file(left + "/b.kv") == document);
  };
  const auto if_there = [](const char* name, const Disk::Check& check) {
    return [name, check](const std::string& left) {
      if (std::filesystem::exists(left + "/" + name)) check(left);
    };
  };
  Disk(folder.path(), if_there("a.kvz", must_restore))
      .during([&] { REQUIRE_OK(kv_pack(plain.c_str(), packed.c_str(), 0, nullptr, error)); },
              must_restore);
  Disk(folder.path(), if_there("b.kv", must_be_back))
      .during([&] { REQUIRE_OK(kv_unpack(packed.c_str(), back.c_str(), nullptr, error)); },
              must_be_back);
}

TEST_CASE(
    "a power cut at any operation of a library's changes loses no document and leaves no part of "
    "one") {
  TempFolder folder;
  const Library library = open_library(folder.path());
  add(library.get(), "first", 200);
  add(library.get(), "second", 300);
  Documents before = documents_in(folder.path());
  REQUIRE(before.size() == 2);
  // Every cut leaves the documents as they were before the change or as they are after it; once it
  // has returned, as they are after it.
  const auto change = [&](const std::function<void()>& call, const Documents& after) {
    const auto either = [&](const std::string& left) {
      const Documents there = documents_in(left);
      CHECK((there == before || there == after));
    };
    Disk disk(folder.path(), either);
    disk.during(call, [&](const std::string& left) { CHECK(documents_in(left) == after); });
    CHECK(disk.cuts() > 2);
    before = after;
  };
  Documents after = before;
  {
    TempFolder elsewhere;
    add(open_library(elsewhere.path()).get(), "third", 400);
    after["third"] = documents_in(elsewhere.path()).at("third");
  }
  change([&] { add(library.get(), "third", 400); }, after);
  after.erase("first");
  after["new name"] = before["first"];
  change([&] { REQUIRE_OK(kv_library_rename(library.get(), "first", "new name", error)); }, after);
  after.erase("second");
  change([&] { REQUIRE_OK(kv_library_remove(library.get(), "second", error)); }, after);
}

TEST_CASE(
    "a power cut while one document goes for another leaves the old one or the new one, or both") {
  TempFolder folder;
  {
    const Library library = open_library(folder.path());
    add(library.get(), "first", 300);
    std::this_thread::sleep_for(std::chrono::milliseconds(12));  // used later
    add(library.get(), "second", 300);
  }
  const Library library =
      open_library(folder.path(), std::filesystem::file_size(folder.file("first.kv")) * 5 / 2);
  REQUIRE(documents_in(folder.path()).size() == 2);
  const auto is_good = [](const std::string& left) {
    const Documents there = documents_in(left);
    CHECK(there.count("second") == 1);
    CHECK((there.count("first") == 1 || there.count("third") == 1));
  };
  Disk disk(folder.path(), is_good);
  disk.during([&] { add(library.get(), "third", 300); },
              [](const std::string& left) { CHECK(documents_in(left).count("third") == 1); });
  CHECK(disk.cuts() > 2);
  const Documents after = documents_in(folder.path());
  CHECK((after.size() == 2 && after.count("first") == 0));
}
