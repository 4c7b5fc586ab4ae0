// The seam where POSIX is: signals, limits and processes, pipes, modes.
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
#include <functional>
#include <string_view>
#include <utility>

#include "failing_allocations.h"
#include "os/cgroup_memory.h"
#include "os/file_reaper.h"
#include "os/os.h"
#include "temp_folder.h"
#include "temporary_file.h"

using namespace kvasir;

namespace {

// Runs in a process of its own, which may be disturbed; whether it returned true.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

std::size_t open_files() {
  std::size_t n = 0;
  for (int fd = 0; fd < 1024; ++fd) n += fcntl(fd, F_GETFD) >= 0 ? 1u : 0u;
  return n;
}

}  // namespace

TEST_CASE("pipes are refused at once, and are no files of a folder") {
  TempFolder folder;
  os::File file;
  REQUIRE(mkfifo(folder.file("pipe").c_str(), 0600) == 0);
  CHECK(os::File::open_read(folder.file("pipe"), &file).code() == Code::bad_argument);
  CHECK(os::File::create_temporary(folder.file("pipe"), &file).code() == Code::bad_argument);
  CHECK_FALSE(file.is_open());
  std::vector<os::FolderEntry> entries;
  REQUIRE(os::list_folder(folder.path(), &entries).ok());
  CHECK(entries.empty());
}

TEST_CASE("a quota and a server's lost file become their codes") {
  TempFolder folder;
  os::File file = temporary(folder);
  static int error = 0;
  for (const auto& [number, code] :
       {std::pair{EDQUOT, Code::no_space}, std::pair{ESTALE, Code::io}}) {
    error = number;
    os::fault = [](const char*, const char*) { return error; };
    const Status s = file.write(0, "y", 1);
    os::fault = nullptr;
    CHECK(s.code() == code);
    CHECK(s.sys_errno() == number);
  }
}

TEST_CASE("a temporary file is private to this process and never a standard stream") {
  TempFolder folder;
  const mode_t mask = umask(0);
  struct stat info;
  const int known = stat(temporary(folder).path().c_str(), &info);
  umask(mask);
  REQUIRE(known == 0);
  CHECK((info.st_mode & 0777) == 0600);
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

namespace {

std::string watched;       // a folder
int refused;               // how the system answers the next opening; 0: as it does
std::vector<mode_t> seen;  // modes of all that had a name there, at any operation

// Of what is in the folder, and in the folders in it.
int look(const char* operation, const char*) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(watched)) {
    struct stat info;
    if (stat(entry.path().c_str(), &info) == 0) seen.push_back(info.st_mode & 0777);
  }
  return std::string_view(operation) == "open" ? std::exchange(refused, 0) : 0;
}

}  // namespace

TEST_CASE("a spill file has no name, or one that no other user can reach, at any moment") {
  TempFolder folder;
  watched = folder.path();
  const mode_t mask = umask(0);
  for (int error : {0, EOPNOTSUPP}) {  // a file system without nameless files
    CAPTURE(error);
    seen.clear();
    refused = error;
    os::File file;
    os::fault = look;
    const Status s = os::File::create_nameless(folder.path(), &file);
    os::fault = nullptr;
    CHECK_MESSAGE(s.ok(), std::string(s.message()));
    CHECK(file.write(0, "abc", 3).ok());
    CHECK(seen.empty() == (error == 0));
    for (mode_t mode : seen) CHECK((mode & 0077) == 0);
    CHECK(folder.entries() == 0);
  }
  umask(mask);
}

TEST_CASE("a spill file that fails midway leaves nothing") {
  static long left;
  static bool hit;
  const std::size_t descriptors = open_descriptors();
  for (long n = 1; n < 8; ++n) {
    TempFolder folder;
    CAPTURE(n);
    left = n, hit = false;
    os::fault = [](const char* operation,
                   const char*) {  // the first one sends it to the way with a name
      if (left-- > 0)
        return std::string_view(operation) == "open" && !std::exchange(hit, true) ? EOPNOTSUPP : 0;
      return left == -1 ? EIO : 0;
    };
    os::File file;
    const Status s = os::File::create_nameless(folder.path(), &file);
    os::fault = nullptr;
    CHECK(s.ok() == (n > 3));
    if (!s.ok()) CHECK(std::string(s.message()).find(folder.path()) != std::string::npos);
    file = os::File();
    if (n != 3) CHECK(folder.entries() == 0);  // what cannot be removed stays
    CHECK(open_descriptors() == descriptors);
  }
}

TEST_CASE(
    "a lock's name that is a link is refused, and what it leads to is neither made nor opened") {
  TempFolder folder;
  os::File file;
  std::filesystem::create_symlink("elsewhere", folder.file(".lock"));
  const Status s = os::File::open_lock(folder.file(".lock"), &file);
  CHECK(s.code() == Code::bad_argument);
  CHECK(std::string(s.message()).find("symbolic link") != std::string::npos);
  CHECK_FALSE(os::exists(folder.file("elsewhere")));
  CHECK(os::exists(folder.file(".lock")));
  CHECK(os::File::open_to_lock(folder.file(".lock"), &file).code() == Code::bad_argument);
  REQUIRE(mkfifo(folder.file("pipe").c_str(), 0600) == 0);
  CHECK(os::File::open_lock(folder.file("pipe"), &file).code() == Code::bad_argument);
  const mode_t mask = umask(0);
  CHECK(os::File::open_lock(folder.file("lock"), &file).ok());
  umask(mask);
  struct stat info;
  REQUIRE(stat(folder.file("lock").c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  std::vector<os::FolderEntry> entries;
  REQUIRE(os::list_folder(folder.path(), &entries).ok());
  CHECK(entries.size() == 1);  // no links, no pipes
}

TEST_CASE(
    "a new file's place is what a link leads to, not the link, and links of others are refused") {
  TempFolder folder;
  std::string target;
  write_file(folder.file("a"), {1});
  std::filesystem::create_symlink("a", folder.file("one"));
  std::filesystem::create_symlink("one", folder.file("two"));
  std::filesystem::create_symlink("none", folder.file("nowhere"));
  std::filesystem::create_symlink("nowhere", folder.file("also nowhere"));
  std::filesystem::create_symlink(".", folder.file("here"));
  for (const char* name : {"a", "one", "two", "here/a", "here/two"}) {
    REQUIRE(os::find_target(folder.file(name), &target).ok());
    os::File file;
    REQUIRE(os::File::open_read(target, &file).ok());
    CHECK(file.is_at(folder.file("a")));
    CHECK(std::filesystem::is_regular_file(std::filesystem::symlink_status(target)));
  }
  CHECK(os::find_target(folder.file("new"), &target).ok());
  CHECK(target == folder.file("new"));
  for (const char* name : {"nowhere", "also nowhere", "here", ""}) {
    CAPTURE(std::string(name));
    CHECK(os::find_target(folder.file(name), &target).code() == Code::bad_argument);
  }
  if (geteuid() != 0) return;
  REQUIRE(lchown(folder.file("one").c_str(), 65534, 65534) == 0);
  CHECK(os::find_target(folder.file("one"), &target).code() == Code::permission);
  REQUIRE(chown(folder.path().c_str(), 65534, 65534) ==
          0);  // whose folder it is may make links in it
  CHECK(os::find_target(folder.file("one"), &target).ok());
}

TEST_CASE("the process's limit on file sizes is an error, not a signal") {
  TempFolder folder;
  CHECK(in_child([&] {
    os::File file;
    if (!os::File::create_temporary(folder.file("a"), &file).ok()) return false;
    const struct rlimit limit = {1000, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string data(1001, 'x');
    return file.write(0, data.data(), 1000).ok() &&
           file.write(0, data.data(), 1001).code() == Code::no_space &&
           file.write(1000, data.data(), 1).sys_errno() == EFBIG &&
           file.preallocate(1001).code() == Code::no_space;
  }));
}

TEST_CASE(
    "a temporary file whose lock could not outlast it is refused, and nothing is left of it") {
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

TEST_CASE("a thread's name is cut, not refused") {
  CHECK(in_child([] {
    os::name_this_thread("kvasir-worker-with-a-long-name");
    char name[64] = {};
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
           std::string(name).find("kvasir-worker") == 0;
  }));
}

TEST_CASE("what a file gives back is free on the disk, and reads as zeros") {
  TempFolder folder;
  os::File file = temporary(folder, "abc");
  constexpr std::size_t size = 1 << 20;
  const std::vector<char> bytes(size, 'x');
  REQUIRE(file.write(0, bytes.data(), size).ok());
  REQUIRE(file.sync().ok());
  const auto blocks = [&] {
    struct stat info {};
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

TEST_CASE("CPUs are those that this process may use") {
  CHECK(os::cpu_count() <= static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_CONF)));
#ifdef __linux__
  CHECK(in_child([] {
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return true;
    std::size_t cpu = 0;
    while (!CPU_ISSET(cpu, &all)) ++cpu;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0 && os::cpu_count() == 1;
  }));
#endif
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
}

TEST_CASE("a file reaper has closed every file when it is destroyed") {
  TempFolder folder;
  const std::size_t before = open_files();
  {
    os::FileReaper reaper;
    for (uint64_t bytes :
         {uint64_t{0}, uint64_t{1} << 20, uint64_t{64} << 20, uint64_t{64} << 20}) {
      os::File file;
      REQUIRE(os::File::create_nameless(folder.path(), &file).ok());
      REQUIRE(file.preallocate(bytes).ok());
      reaper.close(std::move(file));
      CHECK_FALSE(file.is_open());
    }
    reaper.close({});
  }
  CHECK(open_files() == before);
}

TEST_CASE("a file reaper closes every file where memory is short") {
  TempFolder folder;
  const std::size_t before = open_files();
  for (const bool once : {true, false})
    for (long first = 0; first < 4; ++first) {
      CAPTURE(once);
      CAPTURE(first);
      {
        os::FileReaper reaper;
        os::File file;
        REQUIRE(os::File::create_nameless(folder.path(), &file).ok());
        REQUIRE(file.preallocate(uint64_t{64} << 20).ok());
        const FailingAllocations failing(first, once);
        reaper.close(std::move(file));
      }
      CHECK(open_files() == before);
    }
}

TEST_CASE("a file reaper closes at once where no thread can start") {
  TempFolder folder;
  CHECK(in_child([&] {
    rlimit none{0, 0};
    os::File file;
    if (!os::File::create_nameless(folder.path(), &file).ok() ||
        !file.preallocate(uint64_t{64} << 20).ok())
      return false;
    if (setgid(65534) != 0 || setuid(65534) != 0) return true;  // root has no limit of processes
    setrlimit(RLIMIT_NPROC, &none);
    const int fd = dup(0);  // the lowest free number
    close(fd);
    os::FileReaper reaper;
    reaper.close(std::move(file));
    const int after = dup(0);
    return after < fd;
  }));
}

TEST_CASE("available memory is what the limits of control groups leave") {
  const TempFolder folder;
  const auto put = [&](const std::string& name, const std::string& text) {
    const std::filesystem::path path = folder.file(name);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  };
  const auto left = [&] { return os::cgroup_memory_left(folder.path(), folder.file("groups")); };
  CHECK(left() == UINT64_MAX);
  put("groups", "0::/user/app\n");
  CHECK(left() == UINT64_MAX);
  put("user/app/memory.max", "max\n");
  put("user/app/memory.current", "700\n");
  CHECK(left() == UINT64_MAX);
  put("user/app/memory.max", "1000\n");
  CHECK(left() == 300);
  put("user/app/memory.stat", "anon 100\ninactive_file 150\nactive_file 50\n");
  CHECK(left() == 500);
  put("user/app/memory.high", "800\n");
  CHECK(left() == 300);
  put("user/memory.max", "5000\n");  // a group above, with other groups in it
  put("user/memory.current", "4900\n");
  CHECK(left() == 100);
  put("user/memory.current", "6000\n");
  CHECK(left() == 0);

  put("memory.max", "64\n");  // the mount of a container is its group
  put("memory.current", "16\n");
  put("groups", "0::/not/shown/here\n");
  CHECK(left() == 48);
  put("groups", "0::/../outside\n");
  CHECK(left() == UINT64_MAX);

  put("groups", "4:cpu,memory:/old\n2:devices:/old\nno line\n");
  put("memory/old/memory.limit_in_bytes", "9223372036854771712\n");
  put("memory/old/memory.usage_in_bytes", "16\n");
  CHECK(left() == 9223372036854771712u - 16);
  put("memory/old/memory.limit_in_bytes", "100\n");
  put("memory/old/memory.stat", "inactive_file 1\ntotal_inactive_file 6\ntotal_active_file 4\n");
  CHECK(left() == 94);
  put("memory/old/memory.usage_in_bytes", "99999999999999999999999\n");
  CHECK(left() == UINT64_MAX);
  CHECK(os::available_memory() <= os::physical_memory());
}
