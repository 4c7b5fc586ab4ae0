#include "os/paths.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/letters.h"

namespace kvasir::os {

namespace {

constexpr std::string_view separators_of(PathRules rules) {
  return rules == PathRules::windows ? "/\\" : "/";
}

bool is_same(std::string_view a, std::string_view b, PathRules rules) {
  if (rules == PathRules::posix) return a == b;
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](char x, char y) { return small_letter(x) == small_letter(y); });
}

struct Path {
  bool is_absolute = false;
  std::string root;                     // "", "C:" or "//server/share"; no ".." removes it
  std::vector<std::string_view> parts;  // after it; "." and ".." are resolved
};

// Removes the first `count` parts, or as many as there are. Returns them, each after a slash.
std::string take(std::size_t count, std::vector<std::string_view>* parts) {
  std::string text;
  count = std::min(count, parts->size());
  for (std::size_t i = 0; i < count; ++i) text += '/', text += (*parts)[i];
  parts->erase(parts->begin(), parts->begin() + static_cast<std::ptrdiff_t>(count));
  return text;
}

// slashes: before the first part.
void take_windows_root(std::size_t slashes, Path* path) {
  std::vector<std::string_view>* parts = &path->parts;
  if (slashes >= 2 && !parts->empty() && parts->front() == "?") {
    take(1, parts);
    slashes = 0;
    if (!parts->empty() && is_same(parts->front(), "UNC", PathRules::windows)) {
      take(1, parts);
      slashes = 2;
    }
  }
  path->is_absolute = slashes > 0;
  if (slashes >= 2) {
    path->root = "/" + take(2, parts);
  } else if (slashes == 0 && !parts->empty() && parts->front().ends_with(':')) {
    path->is_absolute = true;
    path->root = take(1, parts).substr(1);
  }
}

Path split(std::string_view text, PathRules rules) {
  const std::string_view separators = separators_of(rules);
  const std::size_t slashes = std::min(text.find_first_not_of(separators), text.size());
  Path path;
  for (std::size_t at = slashes; at < text.size();) {
    const std::size_t end = std::min(text.find_first_of(separators, at), text.size());
    if (end > at) path.parts.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  if (rules == PathRules::windows) take_windows_root(slashes, &path);
  else path.is_absolute = slashes > 0;
  return path;
}

void resolve(std::span<const std::string_view> parts, std::vector<std::string_view>* to) {
  for (const std::string_view part : parts)
    if (part == "..") {
      if (!to->empty()) to->pop_back();
    } else if (part != ".") {
      to->push_back(part);
    }
}

std::vector<std::string_view> folder_of(const Path& file) {
  std::vector<std::string_view> parts;
  resolve(file.parts, &parts);
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

std::string relative_path(std::string_view file, std::string_view to, PathRules rules) {
  const Path begin = split(file, rules), end = split(to, rules);
  if (!begin.is_absolute || !end.is_absolute || !is_same(begin.root, end.root, rules)) return {};
  const std::vector<std::string_view> from = folder_of(begin);
  std::vector<std::string_view> parts;
  resolve(end.parts, &parts);
  const auto common = std::mismatch(from.begin(), from.end(), parts.begin(), parts.end()).second;
  std::string text;
  for (auto i = common - parts.begin(); i < static_cast<std::ptrdiff_t>(from.size()); ++i)
    text += "../";
  parts.erase(parts.begin(), common);
  return joined(std::move(text), parts);
}

std::string path_from(std::string_view file, std::string_view relative, PathRules rules) {
  const Path begin = split(file, rules), end = split(relative, rules);
  const auto names_drive = [&](std::string_view part) {
    return rules == PathRules::windows && part.find(':') != std::string_view::npos;
  };
  if (end.is_absolute || std::any_of(end.parts.begin(), end.parts.end(), names_drive)) return {};
  std::vector<std::string_view> parts = folder_of(begin);
  resolve(end.parts, &parts);
  return joined(begin.root + "/", parts);
}

}  // namespace kvasir::os
