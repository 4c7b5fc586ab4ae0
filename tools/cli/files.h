// Whole files: read, written completely or not at all, hashed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace tool {

// The whole file, or standard input for "-". Throws Failure.
std::string read_file(const std::string& path);

// A file that replaces `path` when it is complete. Functions throw Failure.
class NewFile {
 public:
  explicit NewFile(const std::string& path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t bytes);
  void finish();

 private:
  void expect(bool good) const;

  std::string path_, temporary_;
  std::ofstream file_;
  bool opened_ = false, done_ = false;
};

// The complete file or none. Throws Failure.
void write_file(const std::string& path, const std::string& text);

// Hash of a file's size and of samples: weights are too large to read whole. Throws Failure.
uint64_t sampled_hash(const std::string& path);

// The texts of several files, one after the other. Throws Failure.
std::string joined_texts(const std::vector<std::string>& paths);

}  // namespace tool
