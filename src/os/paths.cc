#include "os/paths.h"

#include <algorithm>
#include <cinttypes>
#include <vector>

namespace kvasir::os {

namespace {

#ifdef _WIN32
constexpr std::string_view separators = "/\\";
constexpr std::size_t drive_parts = 1;  // parts at the beginning that no ".." removes
#else
constexpr std::string_view separators = "/";
constexpr std::size_t drive_parts = 0;
#endif

std::string_view root_of(std::string_view path) {
  return path.substr(0, std::min(path.find_first_not_of(separators), path.size()));
}

// Appends the parts of a path. "." and ".." are resolved.
void add_parts(std::string_view path, std::vector<std::string_view>* parts) {
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t end = std::min(path.find_first_of(separators, at), path.size());
    const std::string_view part = path.substr(at, end - at);
    if (part == "..") {
      if (parts->size() > drive_parts) parts->pop_back();
    } else if (!part.empty() && part != ".") {
      parts->push_back(part);
    }
    at = end + 1;
  }
}

std::vector<std::string_view> folder_of(std::string_view file) {
  std::vector<std::string_view> parts;
  add_parts(file, &parts);
  if (!parts.empty()) parts.pop_back();
  return parts;
}

std::string joined(std::string text, const std::vector<std::string_view>& parts) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += '/';
    text += parts[i];
  }
  return text;
}

}  // namespace

Status File::check_size(uint64_t bytes) const {
  uint64_t now = 0;
  RETURN_IF_ERROR(size(&now));
  if (now >= bytes) return {};
  return Status::error(Code::corrupt,
                       "%s was cut from %" PRIu64 " to %" PRIu64 " bytes while it was in use",
                       path_.c_str(), bytes, now)
      .with_offset(now);
}

std::string relative_path(std::string_view file, std::string_view to) {
  const std::vector<std::string_view> from = folder_of(file);
  std::vector<std::string_view> parts;
  add_parts(to, &parts);
  const auto common =
      std::mismatch(from.begin(), from.end(), parts.begin(), parts.end()).first - from.begin();
  if (static_cast<std::size_t>(common) < drive_parts || root_of(file).size() != root_of(to).size())
    return {};
  std::string text;
  for (std::size_t i = static_cast<std::size_t>(common); i < from.size(); ++i) text += "../";
  parts.erase(parts.begin(), parts.begin() + common);
  return joined(std::move(text), parts);
}

std::string path_from(std::string_view file, std::string_view relative) {
  std::vector<std::string_view> parts = folder_of(file);
  add_parts(relative, &parts);
  std::string root;
  for (std::size_t i = 0; i < root_of(file).size(); ++i) root += '/';
  return joined(std::move(root), parts);
}

}  // namespace kvasir::os
