// Files as wholes: written completely or not at all, known again by what is in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace tool {

// A file that gets its name when it is complete; until then what was there stays. Functions throw
// Failure.
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

// Of a file's size and of parts all over it: weights are too large to read whole. Throws Failure.
uint64_t sampled_hash(const std::string& path);

// Several texts as one.
std::string joined_texts(const std::vector<std::string>& paths);

}  // namespace tool
