#include "files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "eval_random.h"
#include "failure.h"
#include "system.h"

namespace tool {

static bool read_input(std::string* text) {
  std::vector<char> buffer(1 << 16);
  ptrdiff_t size = 0;
  while ((size = system::read(buffer.data(), buffer.size())) > 0 &&
         text->size() <= system::max_text_bytes)
    text->append(buffer.data(), static_cast<size_t>(size));
  if (size > 0) errno = EFBIG;
  return size == 0;
}

std::string read_file(const std::string& path) {
  const bool from_input = path == "-";
  std::string text;
  if (from_input ? read_input(&text) : system::read_file(path, &text)) return text;
  if (errno == EINTR) throw Failure(exit_cancelled, "stopped; nothing was read");
  throw Failure(exit_file, (from_input ? "standard input" : path) + ": " + std::strerror(errno));
}

NewFile::NewFile(const std::string& path)
    : path_(path), temporary_(path + "." + std::to_string(system::process_number()) + ".part"),
      file_(system::path(temporary_), std::ios::binary | std::ios::trunc) {
  expect(file_.good());
  opened_ = true;
}

NewFile::~NewFile() {
  if (done_ || !opened_) return;
  file_.close();  // Windows cannot remove an open file
  std::error_code failed;
  std::filesystem::remove(system::path(temporary_), failed);
}

void NewFile::expect(bool good) const {
  if (!good) throw Failure(exit_file, "cannot write " + path_);
}

void NewFile::write(const void* data, size_t bytes) {
  file_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  expect(file_.good());
}

void NewFile::finish() {
  file_.close();
  expect(file_.good());
  std::error_code failed;
  std::filesystem::rename(system::path(temporary_), system::path(path_), failed);
  expect(!failed);
  done_ = true;
}

void write_file(const std::string& path, const std::string& text) {
  NewFile file(path);
  file.write(text.data(), text.size());
  file.finish();
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
