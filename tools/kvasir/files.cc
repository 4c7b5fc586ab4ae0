#include "files.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "context.h"
#include "eval_random.h"
#include "failure.h"
#include "system.h"

namespace tool {

void write_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".part";
  std::ofstream file(system::path(temporary), std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  std::error_code failed;
  if (file) std::filesystem::rename(system::path(temporary), system::path(path), failed);
  if (!file || failed) {
    std::filesystem::remove(system::path(temporary), failed);
    throw Failure(exit_file, "cannot write " + path);
  }
}

uint64_t sampled_hash(const std::string& path) {
  constexpr uint64_t parts = 256, part_bytes = 16384;
  std::ifstream file(system::path(path), std::ios::binary | std::ios::ate);
  const auto size = static_cast<uint64_t>(std::max<std::streamoff>(file.tellg(), 0));
  uint64_t hash = hash_of(std::to_string(size));
  std::string part(part_bytes, '\0');
  for (uint64_t i = 0; i < parts; ++i) {
    const uint64_t at = std::max(i * part_bytes, size / parts * i);  // all of a small file
    if (at >= size) break;
    file.seekg(static_cast<std::streamoff>(at));
    file.read(part.data(), static_cast<std::streamsize>(part.size()));
    hash = hash_of(std::string_view(part).substr(0, static_cast<size_t>(file.gcount())), hash);
    file.clear();
  }
  if (size == 0 || !file) throw Failure(exit_file, "cannot read " + path);
  return hash;
}

std::string joined_texts(const std::vector<std::string>& paths) {
  std::string text;
  for (const std::string& path : paths) text += (text.empty() ? "" : "\n\n") + read_file(path);
  return text;
}

}  // namespace tool
