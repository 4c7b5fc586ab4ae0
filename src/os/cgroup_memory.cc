#include "os/cgroup_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

namespace kvasir::os {
namespace {

// Calls f(line) for the lines of a small file, without their ends; nothing for one that is missing.
template <class F>
void for_lines(const std::string& path, F&& f) {
  const auto close = [](std::FILE* opened) { (void)std::fclose(opened); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "re"), close);
  if (!file) return;
  char line[4096 + 64];  // a path and more
  while (std::fgets(line, sizeof line, file.get())) {
    line[std::strcspn(line, "\n")] = 0;
    f(std::string(line));
  }
}

// The number at the beginning of a text; UINT64_MAX for "max", for none and for one too large.
uint64_t number_of(const std::string& text) {
  uint64_t n = 0;
  std::size_t digits = 0;
  for (; digits < text.size() && text[digits] >= '0' && text[digits] <= '9'; ++digits) {
    const auto digit = static_cast<uint64_t>(text[digits] - '0');
    if (n > (UINT64_MAX - digit) / 10) return UINT64_MAX;
    n = n * 10 + digit;
  }
  return digits > 0 ? n : UINT64_MAX;
}

uint64_t number_in(const std::string& path) {
  uint64_t n = UINT64_MAX;
  for_lines(path, [&](const std::string& line) { n = std::min(n, number_of(line)); });
  return n;
}

// The names of a version's files, and of the lines of memory.stat that count pages of files.
struct Names {
  const char *limit, *soft_limit, *used;
  const char* files[2];
};
constexpr Names version_1 = {"/memory.limit_in_bytes",
                             nullptr,
                             "/memory.usage_in_bytes",
                             {"total_inactive_file ", "total_active_file "}};
constexpr Names version_2 = {
    "/memory.max", "/memory.high", "/memory.current", {"inactive_file ", "active_file "}};

// What a group leaves; the groups above it are not looked at.
uint64_t left_in(const std::string& folder, const Names& names) {
  uint64_t limit = number_in(folder + names.limit);
  if (names.soft_limit) limit = std::min(limit, number_in(folder + names.soft_limit));
  if (limit == UINT64_MAX) return UINT64_MAX;
  uint64_t used = number_in(folder + names.used);
  if (used == UINT64_MAX) return UINT64_MAX;
  for_lines(folder + "/memory.stat", [&](const std::string& line) {
    for (const char* name : names.files) {
      const std::size_t size = std::strlen(name);
      if (line.compare(0, size, name) != 0) continue;
      if (const uint64_t n = number_of(line.substr(size)); n != UINT64_MAX)
        used -= std::min(used, n);
    }
  });
  return limit - std::min(limit, used);
}

// The least of what a group and those above it leave. path: "/a/b" below the mount.
uint64_t left_from(const std::string& mount, std::string path, const Names& names) {
  uint64_t left = UINT64_MAX;
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    left = std::min(left, left_in(mount + path, names));
    if (path.empty()) return left;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

// A line is "number:controllers:path"; version 2 has the number 0 and no controllers.
uint64_t cgroup_memory_left(const std::string& mount, const std::string& groups) {
  uint64_t left = UINT64_MAX;
  for_lines(groups, [&](const std::string& line) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) return;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",",
                      path = line.substr(second + 1);
    if (path.find("/..") != std::string::npos) return;  // outside of what the mount shows
    if (controllers == ",,") left = std::min(left, left_from(mount, path, version_2));
    else if (controllers.find(",memory,") != std::string::npos)
      left = std::min(left, left_from(mount + "/memory", path, version_1));
  });
  return left;
}

}  // namespace kvasir::os
