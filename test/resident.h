// What this process has in is_named memory of mapped files.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

// Bytes of the mappings of files whose path contains `part`, also of files without a name.
inline uint64_t resident_of(const std::string& part) {
  std::ifstream maps("/proc/self/smaps");
  uint64_t sum = 0;
  bool is_named = false;
  for (std::string line; std::getline(maps, line);) {
    // a mapping; what is said of it follows
    if (line.find(' ') < line.find(':')) is_named = line.find(part) != std::string::npos;
    else if (is_named && line.starts_with("Rss:")) sum += std::stoull(line.substr(4));
  }
  return sum * 1024;
}
