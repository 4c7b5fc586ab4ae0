// Saves in processes of their own, with limits and kills.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "cachefile/atomic_file.h"
#include "cachefile/cache_file.h"
#include "fault_count.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace kvasir;
using samples::Part;

TEST_CASE("a save past the process's file size limit fails without its signal") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  REQUIRE(samples::save(path, samples::parts(1), 1).ok());
  count_faults("limit of the process");
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {  // SIGXFSZ has its default action: it would end this process
    const struct rlimit limit = {100'000, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    _exit(samples::save(path, samples::parts(2), 2).code() == Code::no_space ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(samples::holds(path, samples::parts(1), 1));
  CHECK(folder.entries() == 1);
}

namespace {

mode_t mode_of(const std::string& path) {
  struct stat info {};
  REQUIRE(lstat(path.c_str(), &info) == 0);
  return info.st_mode;
}

}  // namespace

TEST_CASE(
    "a new file is its owner's alone, and one that replaces another has its mode, owner and "
    "group") {
  TempFolder folder;
  const std::string path = folder.file("a");
  const mode_t mask = umask(0);
  const auto replace = [&](const std::string& target) {
    AtomicFile file;
    REQUIRE(file.create(target).ok());
    REQUIRE(file.file().write(0, "new", 3).ok());
    const Status s = file.finish();
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  };
  replace(path);
  CHECK((mode_of(path) & 07777) == 0600);
  for (mode_t mode : {0644u, 0600u, 0640u, 0400u}) {
    REQUIRE(chmod(path.c_str(), mode) == 0);
    replace(path);
    CHECK((mode_of(path) & 07777) == mode);
  }
  if (geteuid() == 0) {
    REQUIRE(chown(path.c_str(), 65534, 65533) == 0);
    REQUIRE(chmod(path.c_str(), 0640) == 0);
    replace(path);
    struct stat info {};
    REQUIRE(stat(path.c_str(), &info) == 0);
    CHECK(info.st_uid == 65534);
    CHECK(info.st_gid == 65533);
    CHECK((info.st_mode & 07777) == 0640);
  }
  REQUIRE(chmod(path.c_str(), 0604) == 0);
  std::filesystem::create_symlink("a", folder.file("link"));
  replace(folder.file("link"));
  CHECK(S_ISLNK(mode_of(folder.file("link"))));
  CHECK((mode_of(path) & 07777) == 0604);
  umask(mask);
  CHECK(folder.entries() == 2);
}

TEST_CASE(
    "who replaces another's file without being able to give it away gives its group no more than "
    "everybody") {
  TempFolder folder;
  if (geteuid() != 0) return;
  const std::string path = folder.file("a");
  write_file(path, {1});
  REQUIRE(chmod(folder.path().c_str(), 0777) == 0);
  REQUIRE(chmod(path.c_str(), 0660) == 0);
  const pid_t child = fork();
  if (child == 0) {
    AtomicFile file;
    const bool done =
        setgid(65533) == 0 && setuid(65534) == 0 && file.create(path).ok() && file.finish().ok();
    _exit(done ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  struct stat info {};
  REQUIRE(stat(path.c_str(), &info) == 0);
  CHECK(info.st_uid == 65534);
  CHECK((info.st_mode & 07777) == 0600);
}

TEST_CASE(
    "a file is replaced in the folder where it was begun, whatever the current folder is later") {
  TempFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  {
    AtomicFile file;
    CHECK(file.create("a").ok());
    std::filesystem::current_path(before);
    CHECK(file.finish().ok());
  }
  CHECK(std::filesystem::exists(folder.file("a")));
  CHECK(folder.entries() == 1);
}

TEST_CASE("a process killed while it saves leaves a whole file under the path") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  std::vector<std::vector<Part>> versions;
  for (uint64_t v = 0; v < 4; ++v) versions.push_back(samples::parts(100 * v));
  REQUIRE(samples::save(path, versions[0], 0).ok());
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      for (uint64_t v = 0;; v = (v + 1) % 4) {
        if (!samples::save(path, versions[v], v, 50'000).ok()) _exit(1);
      }
    }
    usleep(static_cast<useconds_t>(1000 + random() % 20'000));
    REQUIRE(kill(child, SIGKILL) == 0);
    count_faults("process killed");
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    std::shared_ptr<const CacheFile> file;
    const Status s = CacheFile::open(path, &file);
    REQUIRE_MESSAGE(s.ok(), s.message());
    const uint64_t version = file->identity().tokens;
    REQUIRE(version < 4);
    CHECK(samples::holds(path, versions[version], version));
  }
}
