// Resident memory as Linux tells it.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bench_measure.h"

namespace tool {
namespace {

// "Rss:    123 kB" after its name; nothing if the line is another.
std::optional<uint64_t> kilobytes(const std::string& line, const char* name) {
  if (!line.starts_with(name)) return {};
  uint64_t value = 0;
  std::istringstream(line.substr(std::string(name).size())) >> value;
  return value * 1024;
}

}  // namespace

// In smaps a line "from-to rights offset device inode  path" opens each mapping, and its figures
//                                                      follow.
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
