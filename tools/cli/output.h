// Rules for the files that commands write.
//
// A command replaces an existing file only if nothing is lost, such as a file with the beginning of
// the new one, or with --force. A file that cannot be written is refused before the work.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tool {

// Throws Failure unless a file can be made at `path`, in place of a file or of nothing.
void expect_writable(const std::string& path);
void expect_writable_folder(const std::string& folder);

// Throws Failure with the reason, such as "holds another document", unless forced.
void expect_force(const std::string& path, const std::string& reason, bool force);

// expect_writable(), and no existing file unless forced. Throws Failure.
void expect_unused(const std::string& path, bool force);

// True also for a link to no file.
bool exists(const std::string& path);

// Size and time of a file, to detect later that another program has written it.
class FileState {
 public:
  explicit FileState(const std::string& path);
  bool operator==(const FileState&) const = default;

 private:
  bool exists_ = false;
  uint64_t bytes_ = 0;
  std::filesystem::file_time_type written_{};
};

}  // namespace tool
