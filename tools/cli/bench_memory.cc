// Resident memory, from /proc/self/smaps of Linux.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bench_measure.h"

namespace tool {
namespace {

// The value of a line such as "Rss:    123 kB".
std::optional<uint64_t> kilobytes(const std::string& line, const char* name) {
  if (!line.starts_with(name)) return {};
  uint64_t value = 0;
  std::istringstream(line.substr(std::string(name).size())) >> value;
  return value * 1024;
}

}  // namespace

// A line "from-to rights offset device inode  path" begins each mapping; its counts follow.
std::optional<uint64_t> resident_bytes_of(const std::string& path) {
  std::error_code failed;
  const std::string wanted = std::filesystem::canonical(path, failed).string();
  std::ifstream file("/proc/self/smaps");
  if (!file || failed) return {};
  uint64_t sum = 0;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    const bool figure = !line.empty() && line.front() >= 'A' && line.front() <= 'Z';
    if (!figure) {
      inside = line.ends_with(" " + wanted);
    } else if (inside) {
      sum += kilobytes(line, "Rss:").value_or(0);
    }
  }
  return sum;
}

}  // namespace tool
