// Makes file operations fail, be interrupted, or transfer only a part: the hooks for os::fault.
#pragma once

#include <cerrno>
#include <string_view>

#include "fault_count.h"
#include "os/os.h"

namespace failing_files {

// Operation number `first` (from 0) fails with `error`, and with `once` false all that follow; none
// while `first` is negative.
struct Plan {
  long first = -1;
  bool once = true;
  int error = 0;
  long seen = 0;  // counted by `planned`

  bool reached() const { return first >= 0 && seen > first; }
};

inline Plan plan;

// Fails the operations of `plan`. Removing and locking are neither counted nor failed: no program
// can handle a failed removal, and a file system without locks is good enough for a file.
inline int planned(const char* operation, const char*) {
  const std::string_view name(operation);
  if (name == "remove" || name == "lock") return 0;
  const long now = plan.seen++;
  const bool hits = plan.first >= 0 && (plan.once ? now == plan.first : now >= plan.first);
  if (hits && now == plan.first)
    count_faults(plan.once ? "file operation fails, once"
                           : "file operation fails, and all after it");
  return hits ? plan.error : 0;
}

inline int interrupt_every_second(const char*, const char*) {
  static int count = 0;
  return ++count % 2 ? EINTR : 0;
}

inline int transfer_in_parts(const char*, const char*) { return -1; }

// The hook is installed while this object lives.
class WithFault {
 public:
  explicit WithFault(kvasir::os::Fault hook) { kvasir::os::fault = hook; }
  ~WithFault() { kvasir::os::fault = nullptr; }
  WithFault(const WithFault&) = delete;
  WithFault& operator=(const WithFault&) = delete;
};

}  // namespace failing_files
