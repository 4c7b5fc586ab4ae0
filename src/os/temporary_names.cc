// Names of temporary files, on every system.
#include <algorithm>
#include <cstdio>

#include "os/calls.h"

namespace kvasir::os {

namespace {

constexpr std::string_view beginning = ".kvasir-", ending = ".tmp";
constexpr std::size_t digits = 16;
// Bytes of a folder entry; Windows counts UTF-16 units, of which there are never more.
constexpr std::size_t max_name = 255;

}  // namespace

std::string temporary_name(const std::string& target, uint64_t random) {
  char added[beginning.size() + digits + ending.size() + 1];
  std::snprintf(added, sizeof added, ".kvasir-%016llx.tmp",
                static_cast<unsigned long long>(random));
  const std::size_t name = name_begin(target);
  std::size_t end = std::min(target.size(), name + max_name + 1 - sizeof added);
  if (end < target.size()) {
    while (end > name && (static_cast<unsigned char>(target[end]) & 0xC0) == 0x80) --end;
  }
  return target.substr(0, end) + added;
}

bool is_temporary_name(std::string_view name) {
  if (name.size() < beginning.size() + digits + ending.size() || !name.ends_with(ending))
    return false;
  name.remove_suffix(ending.size());
  const std::string_view random = name.substr(name.size() - digits);
  name.remove_suffix(digits);
  return name.ends_with(beginning) &&
         random.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace kvasir::os
