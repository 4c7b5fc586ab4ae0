// Counts the faults that the tests make, by kind. Where KVASIR_FAULT_COUNTS names a file, a program
// adds its counts to it at its end, a line "cases<TAB>kind" each; tools/scripts/count-faults makes
// a table of them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace fault_count {

class Counts {
 public:
  ~Counts() {
    const char* path = std::getenv("KVASIR_FAULT_COUNTS");
    std::FILE* out = path && *path ? std::fopen(path, "a") : nullptr;
    if (!out) return;
    std::string lines;
    for (const auto& [kind, cases] : cases_) lines += std::to_string(cases) + "\t" + kind + "\n";
    // one write: programs that end together do not mix
    std::fwrite(lines.data(), 1, lines.size(), out);
    std::fclose(out);
  }
  void add(const char* kind, long cases) {
    const std::lock_guard lock(mutex_);
    cases_[kind] += cases;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, long> cases_;
};

inline Counts counts;

}  // namespace fault_count

inline void count_faults(const char* kind, long cases = 1) { fault_count::counts.add(kind, cases); }
