// The seam where Windows is: its names, its locks, files that are in use.
#include <doctest/doctest.h>

#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "os/os.h"
#include "temp_folder.h"

using namespace kvasir;

namespace {

constexpr const char* path_variable = "KVASIR_TEST_LOCKED";

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

TEST_CASE(
    "paths longer than 260 units lead to their files, from the name of the folder's first file to "
    "the last's removal") {
  TempFolder folder;
  std::string deep = folder.path();
  for (int i = 0; i < 8; ++i) {
    deep += (i % 2 ? "/" : "\\") + std::string(60, static_cast<char>('a' + i));
    REQUIRE(os::make_folder(deep).ok());
  }
  REQUIRE(deep.size() > 480);
  const std::string path = deep + "/document.kv";
  for (int i = 0; i < 2; ++i) {
    os::File file;
    const Status s = os::File::create_temporary(path, &file);
    REQUIRE_MESSAGE(s.ok(), s.message());
    REQUIRE(file.write(0, "abc", 3).ok());
    REQUIRE(file.preallocate(1000).ok());
    REQUIRE(file.close().ok());
    REQUIRE(os::rename_replace(file.path(), path).ok());
  }
  CHECK(os::sync_folder_of(path).ok());
  std::vector<os::FolderEntry> entries;
  REQUIRE(os::list_folder(deep, &entries).ok());
  REQUIRE(entries.size() == 1);
  CHECK(entries[0].bytes == 1000);
  os::File file;
  REQUIRE(os::File::open_read(path, &file).ok());
  CHECK(file.is_at(path));
  file = os::File();
  CHECK(os::remove_file(path).ok());
}

TEST_CASE(
    "a path that is not UTF-8, and names that Windows does not allow, are refused with a reason") {
  TempFolder folder;
  os::File file;
  CHECK(os::File::open_read(folder.file("\xFF"), &file).code() == Code::bad_argument);
  const Status s = os::File::create_temporary(folder.file("what?.kv"), &file);
  CHECK(s.code() == Code::bad_argument);
  CHECK(std::string(s.message()).find("what?") != std::string::npos);
  CHECK_FALSE(file.is_open());
}

// Wine 8 knows only the way that refuses; then nothing has changed.
TEST_CASE(
    "a file that is open and mapped is replaced while it is read as it was, or the refusal says "
    "that it is in use") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  write_file(path, bytes_of("old"));
  write_file(other, bytes_of("new"));
  os::File file;
  os::Mapping mapping;
  REQUIRE(os::File::open_read(path, &file).ok());
  REQUIRE(os::Mapping::map(file, &mapping).ok());
  const Status s = os::rename_replace(other, path);
  CHECK(std::memcmp(mapping.data(), "old", 3) == 0);
  if (s.ok()) {
    CHECK(read_file(path) == bytes_of("new"));
    CHECK(folder.entries() == 1);
  } else {
    MESSAGE(std::string(s.message()));
    CHECK(s.sys_errno() == EBUSY);
    CHECK(std::string(s.message()).find("In use") != std::string::npos);
    CHECK(read_file(path) == bytes_of("old"));
    CHECK(read_file(other) == bytes_of("new"));
  }
  mapping = os::Mapping();
  file = os::File();
  if (!s.ok()) CHECK(os::rename_replace(other, path).ok());
  CHECK(read_file(path) == bytes_of("new"));
}

TEST_CASE("a file that is open is removed, at the latest when it is closed") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  write_file(path, bytes_of("abc"));
  os::File file;
  REQUIRE(os::File::open_read(path, &file).ok());
  CHECK(os::remove_file(path).ok());
  char text[3];
  REQUIRE(file.read(0, text, 3).ok());
  CHECK(std::memcmp(text, "abc", 3) == 0);
  file = os::File();
  CHECK(folder.entries() == 0);
}

TEST_CASE("a mapped file is not cut under its reader") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  write_file(path, std::vector<uint8_t>(100'000, 7));
  os::File file;
  os::Mapping mapping;
  REQUIRE(os::File::open_read(path, &file).ok());
  REQUIRE(os::Mapping::map(file, &mapping).ok());
  std::error_code refused;
  std::filesystem::resize_file(path, 10, refused);
  CHECK(refused);
  CHECK(mapping.data()[99'999] == std::byte{7});
}

TEST_CASE("a spill file has a name by which nobody can open it, and goes with its handle") {
  TempFolder folder;
  os::File file, other;
  REQUIRE(os::File::create_nameless(folder.path(), &file).ok());
  REQUIRE(file.write(0, "abc", 3).ok());
  CHECK(folder.entries() == 1);
  CHECK(os::File::open_read(file.path(), &other).sys_errno() == EBUSY);
  CHECK_FALSE(os::remove_file(file.path()).ok());
  char text[3];
  REQUIRE(file.read(0, text, 3).ok());
  CHECK(std::memcmp(text, "abc", 3) == 0);
  file = os::File();
  CHECK(folder.entries() == 0);
}

TEST_CASE("holds a lock until it is killed" * doctest::skip()) {
  const char* path = std::getenv(path_variable);
  REQUIRE(path);
  os::File file;
  bool got = false;
  REQUIRE(
      (os::File::open_lock(path, &file).ok() && file.lock(os::Lock::exclusive, &got).ok() && got));
  Sleep(60'000);
}

TEST_CASE("a lock is seen by other processes, and ends with its process") {
  TempFolder folder;
  const std::string path = folder.file("a");
  write_file(path, {});
  const auto taken = [&] {
    os::File file;
    bool locked = false;
    return os::File::open_read(path, &file).ok() && file.lock(os::Lock::exclusive, &locked).ok() &&
           !locked;
  };
  wchar_t program[MAX_PATH] = L"";
  REQUIRE(GetModuleFileNameW(nullptr, program, MAX_PATH) > 0);
  std::wstring command =
      L"\"" + std::wstring(program) + L"\" --no-skip \"-tc=holds a lock until it is killed\"";
  SetEnvironmentVariableA(path_variable, path.c_str());
  STARTUPINFOW start{};
  start.cb = sizeof start;
  PROCESS_INFORMATION child{};
  REQUIRE(CreateProcessW(program, command.data(), nullptr, nullptr, FALSE, 0, nullptr, nullptr,
                         &start, &child));
  bool seen = false;
  for (int i = 0; i < 1000 && !seen; ++i) {
    Sleep(20);
    seen = taken();
  }
  CHECK(seen);
  TerminateProcess(child.hProcess, 1);
  WaitForSingleObject(child.hProcess, INFINITE);
  CloseHandle(child.hThread);
  CloseHandle(child.hProcess);
  // the system says itself that this may take a moment
  for (int i = 0; i < 100 && taken(); ++i) Sleep(20);
  CHECK(!taken());
}
