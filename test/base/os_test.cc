// The seam to the operating system: what it refuses, how it names failures, and that nothing of the
// host's is disturbed.
#include "os/os.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <set>
#include <thread>

#include "os/calling_thread.h"
#include "temp_folder.h"
#include "temporary_file.h"

using namespace kvasir;

namespace {

std::string asked_for, asked_path;
int answer = 0, calls = 0;

int one_answer(const char* operation, const char* path) {
  if (asked_for != operation) return 0;
  asked_path = path;
  return calls++ == 0 ? answer : 0;
}

// The named operation gets `error` once.
struct WithFault {
  WithFault(const char* operation, int error) {
    asked_for = operation;
    answer = error;
    calls = 0;
    os::fault = one_answer;
  }
  ~WithFault() { os::fault = nullptr; }
};

}  // namespace

TEST_CASE("what is written at any offset is read back") {
  TempFolder folder;
  os::File file = temporary(folder, "hello");
  REQUIRE(file.write(100, "world", 5).ok());
  uint64_t size = 0;
  REQUIRE(file.size(&size).ok());
  CHECK(size == 105);
  char text[105];
  REQUIRE(file.read(0, text, sizeof text).ok());
  CHECK(std::string(text, 5) == "hello");
  CHECK(text[50] == 0);
  CHECK(std::string(text + 100, 5) == "world");
}

TEST_CASE("reading beyond the end is damage at a known offset, not a short answer") {
  TempFolder folder;
  const os::File file = temporary(folder, "hello");
  char text[8];
  const Status s = file.read(2, text, 8);
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() == 5);
  CHECK(file.read(UINT64_MAX - 2, text, 8).code() == Code::io);
  CHECK(file.read(5, text, 0).ok());
}

TEST_CASE("folders, devices and absent files are refused at once") {
  TempFolder folder;
  os::File file;
  CHECK(os::File::open_read(folder.path(), &file).code() == Code::bad_argument);
  CHECK(os::File::open_read(on_windows ? "NUL" : "/dev/zero", &file).code() == Code::bad_argument);
  const Status absent = os::File::open_read(folder.file("absent"), &file);
  CHECK(absent.code() == Code::not_found);
  CHECK(absent.sys_errno() == ENOENT);
  CHECK(std::string(absent.message()).find("absent") != std::string::npos);
  CHECK(os::File::open_read(folder.file("absent/below"), &file).code() == Code::not_found);
  CHECK(os::File::open_read("", &file).code() == Code::not_found);
  CHECK_FALSE(file.is_open());
}

TEST_CASE("a reason survives the longest path") {
  os::File file;
  const Status s = os::File::open_read("/" + std::string(3000, 'x') + "/y", &file);
  CHECK(s.code() == Code::bad_argument);
  // in English, whatever the locale
  CHECK(std::string(s.message()).find("too long") != std::string::npos);
}

TEST_CASE("errors of the system become the codes that callers act on") {
  TempFolder folder;
  const std::pair<int, Code> expected[] = {
      {ENOSPC, Code::no_space},  {EFBIG, Code::no_space},
      {ENOENT, Code::not_found}, {EACCES, Code::permission},
      {EPERM, Code::permission}, {EROFS, Code::permission},
      {ENOMEM, Code::no_memory}, {EMFILE, Code::limit},
      {ENFILE, Code::limit},     {EIO, Code::io},
  };
  os::File file = temporary(folder, "x");
  for (const auto& [error, code] : expected) {
    WithFault fault("write", error);
    const Status s = file.write(0, "y", 1);
    CHECK(s.code() == code);
    CHECK(s.sys_errno() == error);
    CHECK(std::string(s.message()).find(file.path()) != std::string::npos);
  }
}

TEST_CASE("every operation can be made to fail, with its path") {
  TempFolder folder;
  os::File file = temporary(folder, "x"), other;
  os::Mapping mapping;
  char byte;
  const std::string target = folder.file("target");
  const std::pair<const char*, std::function<Status()>> operations[] = {
      {"open", [&] { return os::File::open_read(file.path(), &other); }},
      {"open", [&] { return os::File::create_temporary(target, &other); }},
      {"read", [&] { return file.read(0, &byte, 1); }},
      {"write", [&] { return file.write(0, "x", 1); }},
      {"preallocate", [&] { return file.preallocate(10); }},
      {"sync", [&] { return file.sync(); }},
      {"map", [&] { return os::Mapping::map(file, &mapping); }},
      {"rename", [&] { return os::rename_replace(file.path(), target); }},
      {"sync_folder", [&] { return os::sync_folder_of(target); }},
      {"remove", [&] { return os::remove_file(file.path()); }},
      {"close", [&] { return file.close(); }},
  };
  for (const auto& [name, call] : operations) {
    CAPTURE(name);
    WithFault fault(name, EIO);
    CHECK(call().code() == Code::io);
    CHECK(calls == 1);
    CHECK(asked_path.find(folder.path()) == 0);
  }
  CHECK_FALSE(file.is_open());  // a failed close closes
  CHECK_FALSE(other.is_open());
  CHECK(mapping.data() == nullptr);
}

TEST_CASE("interrupted calls are made again and short transfers are continued") {
  TempFolder folder;
  os::File file = temporary(folder, std::string(1000, 'a'));
  char text[1000];
  for (int how : {EINTR, -1}) {
    {
      WithFault fault("write", how);
      CHECK(file.write(0, std::string(1000, 'b').data(), 1000).ok());
      CHECK(calls == 2);
    }
    WithFault fault("read", how);
    std::memset(text, 0, sizeof text);
    CHECK(file.read(0, text, sizeof text).ok());
    CHECK(calls == 2);
    CHECK(std::string(text, sizeof text) == std::string(1000, 'b'));
  }
  for (const char* operation : {"sync", "preallocate"}) {
    WithFault fault(operation, EINTR);
    CHECK((*operation == 's' ? file.sync() : file.preallocate(2000)).ok());
#ifdef _WIN32
    CHECK(calls >= 2);  // more where space cannot be reserved
#else
    CHECK(calls == 2);
#endif
  }
}

TEST_CASE("one read fills several places, in order, also in pieces of any size") {
  TempFolder folder;
  std::string text;
  for (int i = 0; i < 5000; ++i) text += static_cast<char>('a' + i * 7 % 26);
  os::File file = temporary(folder, text);
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < 150; ++i) parts.emplace_back(i % 5 == 0 ? 0 : i % 37, '-');
  std::vector<os::File::Piece> pieces;
  for (std::string& part : parts) pieces.push_back({part.data(), part.size()});
  for (int how : {0, EINTR, -1}) {
    WithFault fault("read", how);
    REQUIRE(file.read(3, pieces).ok());
    std::string all;
    for (std::string& part : parts) all += part, part.assign(part.size(), '-');
    CHECK(all == text.substr(3, all.size()));
  }
  char last[8];
  const os::File::Piece beyond[] = {{last, 4}, {last + 4, 4}};
  const Status s = file.read(4995, beyond);
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() == 5000);
  CHECK(file.read(0, std::span<const os::File::Piece>()).ok());
}

TEST_CASE(
    "space is reserved without changing what is there, also where the file system cannot reserve") {
  TempFolder folder;
  for (int error : {0, EOPNOTSUPP, ENOSYS}) {
    os::File file = temporary(folder, "hello");
    WithFault fault("preallocate", error);
    REQUIRE(file.preallocate(100'000).ok());
    uint64_t size = 0;
    REQUIRE(file.size(&size).ok());
    CHECK(size == 100'000);
    char text[6];
    REQUIRE(file.read(0, text, 6).ok());
    CHECK(std::string(text, 6) == std::string("hello\0", 6));
    CHECK(file.preallocate(0).ok());
  }
}

TEST_CASE("a disk that is too small is known before the work") {
  TempFolder folder;
  for (int error : {0, EOPNOTSUPP}) {
    os::File file = temporary(folder);
    WithFault fault("preallocate", error);
    CHECK(file.preallocate(uint64_t{1} << 43).code() == Code::no_space);
    CHECK(file.preallocate(UINT64_MAX).code() == Code::no_space);
  }
}

TEST_CASE("a temporary file is new and in the target's folder") {
  TempFolder folder;
  std::set<std::string> names;
  for (int i = 0; i < 50; ++i) {
    const os::File file = temporary(folder);
    CHECK(file.path().find(folder.file("target.")) == 0);
    CHECK(names.insert(file.path()).second);
  }
}

TEST_CASE("a target whose name fills a folder entry still gets its temporary file") {
  TempFolder folder;
  std::string name;
  while (name.size() + 2 <= 255) name += "\xC3\xA6";  // ae, two bytes
  os::File file;
  REQUIRE(os::File::create_temporary(folder.file(name), &file).ok());
  REQUIRE(file.close().ok());
  CHECK(os::rename_replace(file.path(), folder.file(name)).ok());
  CHECK(os::File::create_temporary(folder.file(name + "xy"), &file).ok());
  // Windows counts units of UTF-16.
  if (!on_windows)
    CHECK(os::rename_replace(file.path(), folder.file(name + "xy")).code() == Code::bad_argument);
}

TEST_CASE("a mapping outlives its file and an empty file maps to nothing") {
  TempFolder folder;
  os::Mapping mapping, empty;
  {
    const os::File file = temporary(folder, std::string(10'000, 'm'));
    REQUIRE(os::Mapping::map(file, &mapping).ok());
    REQUIRE(os::remove_file(file.path()).ok());
  }
  os::Mapping moved = std::move(mapping);
  CHECK(mapping.data() == nullptr);
  REQUIRE(moved.size() == 10'000);
  CHECK(moved.data()[9'999] == std::byte{'m'});
  for (auto advice : {os::Mapping::Advice::sequential, os::Mapping::Advice::random,
                      os::Mapping::Advice::will_need, os::Mapping::Advice::dont_need}) {
    moved.advise(5000, 100, advice);
    moved.advise(5000, UINT64_MAX, advice);
    moved.advise(UINT64_MAX, 1, advice);
  }
  CHECK(moved.data()[5'000] == std::byte{'m'});
  const os::File file = temporary(folder);
  REQUIRE(os::Mapping::map(file, &empty).ok());
  CHECK(empty.size() == 0);
  empty.advise(0, 10, os::Mapping::Advice::will_need);
}

TEST_CASE("moved files close once, and what they replace is closed") {
  TempFolder folder;
  const std::size_t before = open_descriptors();
  {
    os::File a = temporary(folder), b = temporary(folder);
    const std::string path = a.path();
    b = std::move(a);
    CHECK(b.path() == path);
    os::File c = std::move(b);
    CHECK(c.is_open());
    CHECK_FALSE(b.is_open());
    CHECK(c.close().ok());
    CHECK(c.close().ok());
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("a file is known by whatever path leads to it") {
  TempFolder folder;
  write_file(folder.file("a"), {1});
  write_file(folder.file("b"), {1});
  // which is a privilege there
  if (!on_windows) std::filesystem::create_symlink("a", folder.file("link"));
  os::File file;
  REQUIRE(os::File::open_read(folder.file("a"), &file).ok());
  CHECK(file.is_at(folder.file("a")));
  CHECK(file.is_at(folder.path() + "/.//a"));
  if (!on_windows) CHECK(file.is_at(folder.file("link")));
  CHECK_FALSE(file.is_at(folder.file("b")));
  CHECK_FALSE(file.is_at(folder.file("c")));
  CHECK_FALSE(file.is_at(""));
}

TEST_CASE("a file that is opened again is the same one, or none") {
  TempFolder folder;
  const std::string path = folder.file("a");
  write_file(path, {1});
  os::File file, again, other;
  REQUIRE(os::File::open_read(path, &file).ok());
  REQUIRE(file.reopen(&again).ok());
  CHECK(again.is_at(path));
  write_file(folder.file("b"), {2});
  if (on_windows) return;  // which opens a file again wherever it is
  REQUIRE(os::rename_replace(folder.file("b"), path).ok());
  CHECK(file.reopen(&other).code() == Code::not_found);
  CHECK_FALSE(other.is_open());
  uint8_t byte = 0;
  REQUIRE(again.read(0, &byte, 1).ok());
  CHECK(byte == 1);
}

TEST_CASE("renaming replaces, removing what is absent says so, folders sync") {
  TempFolder folder;
  write_file(folder.file("a"), {1});
  write_file(folder.file("b"), {2});
  CHECK(os::rename_replace(folder.file("a"), folder.file("b")).ok());
  CHECK(read_file(folder.file("b")) == std::vector<uint8_t>{1});
  CHECK(os::remove_file(folder.file("a")).code() == Code::not_found);
  CHECK(os::sync_folder_of(folder.file("b")).ok());
  CHECK(os::sync_folder_of("name-only").ok());
  CHECK(os::sync_folder_of(folder.file("no/where")).code() == Code::not_found);
}

TEST_CASE("CPUs and time are sensible") {
  CHECK(os::cpu_count() >= 1);
  CHECK(os::physical_memory() > uint64_t{64} << 20);
  const uint64_t before = os::now_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(os::now_ns() - before >= 1'000'000);
}

TEST_CASE("a lock is seen by other files, and ends with its file") {
  TempFolder folder;
  const std::string path = folder.file("a");
  os::File one, two;
  bool got = false;
  REQUIRE(os::File::open_lock(path, &one).ok());
  REQUIRE(os::File::open_read(path, &two).ok());
  CHECK((one.lock(os::Lock::shared, &got).ok() && got));
  CHECK((two.lock(os::Lock::shared, &got).ok() && got));
  CHECK((one.lock(os::Lock::exclusive, &got).ok() && !got));
  one = os::File(), two = os::File();
  const auto taken = [&] {
    os::File file;
    bool locked = false;
    return os::File::open_read(path, &file).ok() && file.lock(os::Lock::exclusive, &locked).ok() &&
           !locked;
  };
  CHECK(!taken());
  const WithFault fault("lock", ENOLCK);
  REQUIRE(os::File::open_lock(path, &one).ok());
  CHECK(one.lock(os::Lock::shared, &got).code() == Code::io);
}

TEST_CASE(
    "a temporary file is locked as long as its File lives, and made where locks do not work") {
  TempFolder folder;
  {
    os::File file = temporary(folder, "abc");
    const std::string path = file.path();
    CHECK(os::is_temporary_name(path.substr(path.rfind('/') + 1)));
    const auto locked = [&] {
      os::File other;
      bool got = true;
      return os::File::open_read(path, &other).ok() && other.lock(os::Lock::shared, &got).ok() &&
             !got;
    };
    CHECK(locked());
    CHECK(file.close().ok());
    CHECK(locked());
    os::File moved = std::move(file);
    CHECK(locked());
    moved = os::File();
    CHECK(!locked());
  }
  const WithFault fault("lock", ENOLCK);
  CHECK(temporary(folder, "abc").is_open());
}

TEST_CASE("names of temporary files are recognised") {
  for (const char* name : {"a.kv.kvasir-0123456789abcdef.tmp", ".kvasir-0123456789abcdef.tmp"})
    CHECK(os::is_temporary_name(name));
  for (const char* name :
       {"", "a.kv", "a.tmp", "a.kv.0123456789abcdef.tmp", "a.kvasir-0123456789abcde.tmp",
        "a.kvasir-0123456789abcdeg.tmp", "a-kvasir-0123456789abcdef.tmp",
        "kvasir-0123456789abcdef.tmp", "a.kvasir-0123456789abcdef.tmp.txt"})
    CHECK(!os::is_temporary_name(name));
}

TEST_CASE(
    "a folder is made, listed with its files' sizes and times, and refused where there is none") {
  TempFolder folder;
  const std::string inner = folder.file("inner");
  std::vector<os::FolderEntry> entries;
  CHECK(os::list_folder(inner, &entries).code() == Code::not_found);
  CHECK(os::make_folder(inner + "/deeper").code() == Code::not_found);
  CHECK(os::make_folder(inner).ok());
  CHECK(os::make_folder(inner).ok());
  write_file(inner + "/file", {1, 2, 3});
  CHECK(os::make_folder(inner + "/file").code() == Code::bad_argument);
  CHECK(os::make_folder(inner + "/folder").ok());
  REQUIRE(os::list_folder(inner, &entries).ok());
  REQUIRE(entries.size() == 1);
  CHECK(entries[0].name == "file");
  CHECK(entries[0].bytes == 3);
  const uint64_t before = entries[0].modified_ns;
  CHECK(before > 1'600'000'000'000'000'000u);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(os::touch(inner + "/file").ok());
  REQUIRE(os::list_folder(inner, &entries).ok());
  CHECK(entries[0].modified_ns > before);
  CHECK(os::touch(inner + "/none").code() == Code::not_found);
  const Status s = os::list_folder(inner + "/file", &entries);
  CHECK_MESSAGE(s.code() == Code::not_found, std::string(s.message()));
}

TEST_CASE("a file is written, read and mapped beyond 4 GiB") {
  TempFolder folder;
  os::File file = temporary(folder);
  constexpr uint64_t far = (uint64_t{5} << 30) + (64 << 10);
  const std::string text = "beyond";
  REQUIRE(file.write(far, text.data(), text.size()).ok());
  uint64_t size = 0;
  REQUIRE(file.size(&size).ok());
  CHECK(size == far + text.size());
  std::string back(text.size(), '-');
  REQUIRE(file.read(far, back.data(), back.size()).ok());
  CHECK(back == text);
  os::Mapping mapping;
  REQUIRE(os::Mapping::map(file, far, text.size(), &mapping).ok());
  CHECK(std::memcmp(mapping.data(), text.data(), text.size()) == 0);
}

TEST_CASE("a nameless file is written, read and mapped, and gone at its end") {
  TempFolder folder;
  {
    os::File file;
    REQUIRE(os::File::create_nameless(folder.path(), &file).ok());
    REQUIRE(file.write(64 << 10, "abc", 3).ok());
    os::Mapping mapping;
    REQUIRE(os::Mapping::map(file, 64 << 10, 3, &mapping).ok());
    CHECK(std::memcmp(mapping.data(), "abc", 3) == 0);
    file = os::File();
  }
  CHECK(folder.entries() == 0);
  os::File file;
  CHECK(os::File::create_nameless("", &file).ok());
  file = os::File();
  CHECK(os::File::create_nameless(folder.file("absent"), &file).code() == Code::not_found);
}

TEST_CASE("a path from the root leads to the same file from another current folder") {
  TempFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(in_utf8(folder.path()));
  std::string path, same;
  const Status s = os::absolute_path("a", &path);
  std::filesystem::current_path(before);
  REQUIRE(s.ok());
  write_file(folder.file("a"), {1});
  CHECK(read_file(path) == std::vector<uint8_t>{1});
  REQUIRE(os::absolute_path(path, &same).ok());
  CHECK(same == path);
  CHECK(os::exists(path));
  CHECK(os::exists(folder.path()));
  CHECK_FALSE(os::exists(folder.file("b")));
}

TEST_CASE("names of any language lead to their files") {
  TempFolder folder;
  const std::string inner = folder.file(
                        "B\xC3\xBC"
                        "cher \xE4\xB9\xA6"),
                    path = inner + "/\xD0\xBA\xD0\xBD\xD0\xB8\xD0\xB3\xD0\xB0 \xF0\x9F\x93\x96.kv";
  REQUIRE(os::make_folder(inner).ok());
  os::File file;
  REQUIRE(os::File::create_temporary(path, &file).ok());
  REQUIRE(file.write(0, "abc", 3).ok());
  REQUIRE(file.close().ok());
  REQUIRE(os::rename_replace(file.path(), path).ok());
  std::vector<os::FolderEntry> entries;
  REQUIRE(os::list_folder(inner, &entries).ok());
  REQUIRE(entries.size() == 1);
  CHECK(inner + "/" + entries[0].name == path);
  CHECK(entries[0].bytes == 3);
  file = os::File();
  CHECK(os::File::open_read(path, &file).ok());
  CHECK(os::touch(path).ok());
  file = os::File();
  CHECK(os::remove_file(path).ok());
}
