// The seam to the operating system: what it refuses, how it names failures, and that nothing of the host's is disturbed.
#include "os/os.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <set>

#include "temp_folder.h"

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

// Runs in a process of its own, which may be disturbed; whether it returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A new file of these bytes, open for writing under a name of its own.
os::File temporary(const TempFolder& folder, const std::string& bytes = {}) {
  os::File file;
  const Status s = os::File::create_temporary(folder.file("target"), &file);
  REQUIRE_MESSAGE(s.ok(), s.message());
  REQUIRE(file.write(0, bytes.data(), bytes.size()).ok());
  return file;
}

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

TEST_CASE("folders, pipes, devices and absent files are refused at once") {
  TempFolder folder;
  os::File file;
  CHECK(os::File::open_read(folder.path(), &file).code() == Code::bad_argument);
  CHECK(os::File::open_read("/dev/zero", &file).code() == Code::bad_argument);
  REQUIRE(mkfifo(folder.file("pipe").c_str(), 0600) == 0);
  CHECK(os::File::open_read(folder.file("pipe"), &file).code() == Code::bad_argument);
  CHECK(os::File::create_temporary(folder.file("pipe"), &file).code() == Code::bad_argument);
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
  CHECK(std::string(s.message()).find(std::strerror(ENAMETOOLONG)) != std::string::npos);
}

TEST_CASE("errors of the system become the codes that callers act on") {
  TempFolder folder;
  const std::pair<int, Code> expected[] = {
      {ENOSPC, Code::no_space},   {EDQUOT, Code::no_space},    {EFBIG, Code::no_space}, {ENOENT, Code::not_found},
      {EACCES, Code::permission}, {EPERM, Code::permission},   {EROFS, Code::permission}, {ENOMEM, Code::no_memory},
      {EMFILE, Code::limit},      {ENFILE, Code::limit},       {EIO, Code::io},         {ESTALE, Code::io},
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
    CHECK(calls == 2);
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

TEST_CASE("space is reserved without changing what is there, also where the file system cannot reserve") {
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

TEST_CASE("the process's limit on file sizes is an error, not a signal") {
  TempFolder folder;
  CHECK(in_child([&] {
    os::File file;
    if (!os::File::create_temporary(folder.file("a"), &file).ok()) return false;
    const struct rlimit limit = {1000, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string data(1001, 'x');
    return file.write(0, data.data(), 1000).ok() && file.write(0, data.data(), 1001).code() == Code::no_space &&
           file.write(1000, data.data(), 1).sys_errno() == EFBIG && file.preallocate(1001).code() == Code::no_space;
  }));
}

TEST_CASE("a temporary file is new, in the target's folder, private to this process and never a standard stream") {
  TempFolder folder;
  std::set<std::string> names;
  for (int i = 0; i < 50; ++i) {
    const os::File file = temporary(folder);
    CHECK(file.path().find(folder.file("target.")) == 0);
    CHECK(names.insert(file.path()).second);
  }
  const mode_t mask = umask(0);
  umask(mask);
  struct stat info;
  REQUIRE(stat(names.begin()->c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == (0666 & ~mask));
  CHECK(in_child([&] {
    close(0);
    close(1);
    close(2);
    os::File file;
    if (!os::File::create_temporary(folder.file("b"), &file).ok()) return false;
    return fcntl(0, F_GETFD) == -1 && fcntl(1, F_GETFD) == -1 && fcntl(2, F_GETFD) == -1 &&
           fcntl(3, F_GETFD) == FD_CLOEXEC;
  }));
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
  for (auto advice : {os::Mapping::Advice::sequential, os::Mapping::Advice::random, os::Mapping::Advice::will_need,
                      os::Mapping::Advice::dont_need}) {
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
  std::filesystem::create_symlink("a", folder.file("link"));
  os::File file;
  REQUIRE(os::File::open_read(folder.file("a"), &file).ok());
  CHECK(file.is_at(folder.file("a")));
  CHECK(file.is_at(folder.path() + "/.//a"));
  CHECK(file.is_at(folder.file("link")));
  CHECK_FALSE(file.is_at(folder.file("b")));
  CHECK_FALSE(file.is_at(folder.file("c")));
  CHECK_FALSE(file.is_at(""));
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

TEST_CASE("processors and time are sensible") {
  CHECK(os::processor_count() >= 1);
  CHECK(os::processor_count() <= static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_CONF)));
#ifdef __linux__
  CHECK(in_child([] {
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return true;
    std::size_t cpu = 0;
    while (!CPU_ISSET(cpu, &all)) ++cpu;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0 && os::processor_count() == 1;
  }));
#endif
  const uint64_t before = os::now_ns();
  usleep(1000);
  CHECK(os::now_ns() - before >= 1'000'000);
}

TEST_CASE("a thread's name is cut, not refused") {
  CHECK(in_child([] {
    os::name_this_thread("kvasir-worker-with-a-long-name");
    char name[64] = {};
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 && std::string(name).find("kvasir-worker") == 0;
  }));
}

TEST_CASE("a lock is seen by other files and processes, and ends with its file or its process") {
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
    return os::File::open_read(path, &file).ok() && file.lock(os::Lock::exclusive, &locked).ok() && !locked;
  };
  CHECK(!taken());
  int ready[2], done[2];
  REQUIRE((pipe(ready) == 0 && pipe(done) == 0));
  const pid_t child = fork();
  if (child == 0) {
    os::File file;
    bool locked = false;
    (void)(os::File::open_lock(path, &file).ok() && file.lock(os::Lock::exclusive, &locked).ok());
    (void)!write(ready[1], "x", 1);
    char byte;
    (void)!read(done[0], &byte, 1);  // until it is killed
    _exit(0);
  }
  char byte = 0;
  REQUIRE(read(ready[0], &byte, 1) == 1);
  CHECK(taken());
  kill(child, SIGKILL);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(!taken());
  for (int fd : {ready[0], ready[1], done[0], done[1]}) close(fd);
  const WithFault fault("lock", ENOLCK);
  REQUIRE(os::File::open_lock(path, &one).ok());
  CHECK(one.lock(os::Lock::shared, &got).code() == Code::io);
}

TEST_CASE("a temporary file is locked as long as its File lives, and made where locks do not work") {
  TempFolder folder;
  {
    os::File file = temporary(folder, "abc");
    const std::string path = file.path();
    CHECK(os::is_temporary_name(path.substr(path.rfind('/') + 1)));
    const auto locked = [&] {
      os::File other;
      bool got = true;
      return os::File::open_read(path, &other).ok() && other.lock(os::Lock::shared, &got).ok() && !got;
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

TEST_CASE("a temporary file whose lock could not outlast it is refused, and nothing is left of it") {
  TempFolder folder;
  CHECK(in_child([&] {
    const int next = dup(STDERR_FILENO);  // the descriptor that the file gets: none comes after it
    struct rlimit limit;
    if (next < 0 || close(next) != 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
    limit.rlim_cur = static_cast<rlim_t>(next) + 1;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
    os::File file;
    const Status s = os::File::create_temporary(folder.file("abc"), &file);
    return !s.ok() && s.sys_errno() == EMFILE && !file.is_open();
  }));
  CHECK(folder.entries() == 0);
}

TEST_CASE("what a file gives back is free on the disk, and reads as zeros") {
  TempFolder folder;
  os::File file = temporary(folder, "abc");
  constexpr std::size_t size = 1 << 20;
  const std::vector<char> bytes(size, 'x');
  REQUIRE(file.write(0, bytes.data(), size).ok());
  REQUIRE(file.sync().ok());
  const auto blocks = [&] {
    struct stat info{};
    REQUIRE(stat(file.path().c_str(), &info) == 0);
    return uint64_t(info.st_blocks) * 512;
  };
  REQUIRE(blocks() >= size);
  file.discard(size / 4, size / 2);
  CHECK(blocks() <= size - size / 2 + (64 << 10));
  std::vector<char> read(size);
  REQUIRE(file.read(0, read.data(), size).ok());
  std::vector<char> expected(bytes);
  std::fill_n(expected.begin() + size / 4, size / 2, '\0');
  CHECK(read == expected);
}

TEST_CASE("names of temporary files are told from others") {
  for (const char* name : {"a.kv.0123456789abcdef.tmp", ".0123456789abcdef.tmp"}) CHECK(os::is_temporary_name(name));
  for (const char* name : {"", "a.kv", "a.tmp", "a.0123456789abcde.tmp", "a.0123456789abcdeg.tmp", "a-0123456789abcdef.tmp", "0123456789abcdef.tmp"})
    CHECK(!os::is_temporary_name(name));
}

TEST_CASE("a folder is made, listed with its files' sizes and times, and refused where there is none") {
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
  REQUIRE(mkfifo((inner + "/pipe").c_str(), 0600) == 0);
  REQUIRE(os::list_folder(inner, &entries).ok());
  REQUIRE(entries.size() == 1);
  CHECK(entries[0].name == "file");
  CHECK(entries[0].bytes == 3);
  const uint64_t before = entries[0].modified_ns;
  CHECK(before > 1'600'000'000'000'000'000u);
  usleep(20'000);
  CHECK(os::touch(inner + "/file").ok());
  REQUIRE(os::list_folder(inner, &entries).ok());
  CHECK(entries[0].modified_ns > before);
  CHECK(os::touch(inner + "/none").code() == Code::not_found);
  CHECK(os::list_folder(inner + "/file", &entries).code() == Code::not_found);
}
