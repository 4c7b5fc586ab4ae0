// Saving and opening while the system fails: any operation, any allocation, the process itself. The
// path holds the old file or the new one, whole; no temporary file and no descriptor is left.
#include <doctest/doctest.h>

#include <cerrno>
#include <new>

#include "cachefile/cache_file.h"
#include "failing_allocations.h"
#include "failing_files.h"
#include "fault_count.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace failing_files;
using samples::Part;

namespace {

std::vector<std::string> trace;

int traced(const char* operation, const char*) {
  if (std::string_view(operation) != "lock") trace.push_back(operation);
  return 0;
}

Code code_for(int error) {
  return error == ENOSPC ? Code::no_space : error == EMFILE ? Code::limit : Code::io;
}

}  // namespace

TEST_CASE(
    "a save whose Nth file operation fails leaves the old file or the new one, and nothing else") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const std::vector<Part> before = samples::parts(1), after = samples::parts(50);
  REQUIRE(samples::save(path, before, 1).ok());
  const std::size_t descriptors = open_descriptors();
  WithFault fault(planned);
  for (int error : {EIO, ENOSPC, EMFILE}) {
    for (bool once : {true, false}) {
      long n = 0;
      for (;; ++n) {
        plan = {n, once, error};
        const Status s = samples::save(path, after, 2);
        const bool reached = plan.reached();
        plan = {};
        if (!reached) {
          CHECK(s.ok());
          break;
        }
        CHECK_MESSAGE(s.code() == code_for(error), "operation ", n, ": ", s.message());
        CHECK(s.sys_errno() == error);
        const bool is_new = samples::holds(path, after, 2);
        CHECK((is_new || samples::holds(path, before, 1)));
        CHECK(folder.entries() == 1);
        CHECK(open_descriptors() == descriptors);
        if (is_new) REQUIRE(samples::save(path, before, 1).ok());
      }
      CHECK(n > 8);
      REQUIRE(samples::save(path, before, 1).ok());
    }
  }
}

TEST_CASE("an open whose Nth file operation fails says so and keeps no descriptor") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  REQUIRE(samples::save(path, samples::parts(1), 1).ok());
  const std::size_t descriptors = open_descriptors();
  WithFault fault(planned);
  for (int error : {EIO, EMFILE, ENOMEM, EACCES}) {
    for (long n = 0;; ++n) {
      plan = {n, true, error};
      std::shared_ptr<const CacheFile> file;
      const Status s = CacheFile::open(path, &file);
      const bool reached = plan.reached();
      plan = {};
      if (!reached) {
        CHECK(n == 4);  // open, header, map, tables
        break;
      }
      CHECK(s.sys_errno() == error);
      CHECK(file == nullptr);
      CHECK(open_descriptors() == descriptors);
    }
  }
}

TEST_CASE("interrupted calls and short transfers are continued") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  for (os::Fault hook : {interrupt_every_second, transfer_in_parts}) {
    WithFault fault(hook);
    count_faults("interruptions or short transfers");
    const Status s = samples::save(path, samples::parts(3), 3);
    CHECK_MESSAGE(s.ok(), s.message());
    CHECK(samples::holds(path, samples::parts(3), 3));
  }
}

TEST_CASE("a file system that cannot reserve space is written to all the same") {
  TempFolder folder;
  WithFault fault(planned);
  plan = {1, true, EOPNOTSUPP};  // after "open"
  const Status s = samples::save(folder.file("a.kv"), samples::parts(3), 3);
  plan = {};
  CHECK_MESSAGE(s.ok(), s.message());
  CHECK(samples::holds(folder.file("a.kv"), samples::parts(3), 3));
}

// What survives a power cut is what was synced before it: the file's bytes before its name, its
// name before success is reported.
TEST_CASE("a rename before the sync, or a write after it, would lose the file in a power cut") {
  TempFolder folder;
  WithFault fault(traced);
  trace.clear();
  const Status s = samples::save(folder.file("a.kv"), samples::parts(3), 3);
  REQUIRE(s.ok());
  REQUIRE(trace.size() > 6);
  CHECK(trace[0] == "open");
  CHECK(trace[1] == "preallocate");
  for (std::size_t i = 2; i + 4 < trace.size(); ++i) CHECK(trace[i] == "write");
  const std::vector<std::string> end(trace.end() - 4, trace.end());
  CHECK(end == std::vector<std::string>{"sync", "close", "rename", "sync_folder"});
}

TEST_CASE(
    "a save whose Nth allocation fails leaves the old file or the new one, and nothing else") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const std::vector<Part> before = samples::parts(1), after = samples::parts(50);
  REQUIRE(samples::save(path, before, 1).ok());
  const std::size_t descriptors = open_descriptors();
  for (bool once : {true, false}) {
    for (long n = 0;; ++n) {
      bool failed = false, reached = false;
      try {
        FailingAllocations failing(n, once);
        failed = !samples::save(path, after, 2).ok();
        reached = failing.reached();
      } catch (const std::bad_alloc&) {
        failed = reached = true;
      }
      CHECK(failed == reached);
      const bool is_new = samples::holds(path, after, 2);
      CHECK((is_new || samples::holds(path, before, 1)));
      CHECK(folder.entries() == 1);
      CHECK(open_descriptors() == descriptors);
      if (is_new) REQUIRE(samples::save(path, before, 1).ok());
      if (!reached) break;
    }
  }
}

TEST_CASE("an open whose Nth allocation fails keeps nothing") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  REQUIRE(samples::save(path, samples::parts(1), 1).ok());
  const std::size_t descriptors = open_descriptors();
  for (bool once : {true, false}) {
    for (long n = 0;; ++n) {
      std::shared_ptr<const CacheFile> file;
      bool failed = false, reached = false;
      try {
        FailingAllocations failing(n, once);
        failed = !CacheFile::open(path, &file).ok();
        reached = failing.reached();
      } catch (const std::bad_alloc&) {
        failed = reached = true;
      }
      CHECK(failed == reached);
      CHECK((file == nullptr) == failed);
      file.reset();
      CHECK(open_descriptors() == descriptors);
      if (!reached) break;
    }
  }
}
