// Saving in processes of their own, which are limited and killed.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "fault_count.h"
#include "store/cache_file.h"
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
