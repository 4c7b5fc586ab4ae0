// The files that commands write: one rule for all of them.
//
// A file that is there is replaced only where nothing is lost by that, as where it holds the
// beginning of what is written, or with --force. What cannot be written is refused before the work,
// not after it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace tool {

// That a file can be made at `path`, in place of a file or of nothing. Throws Failure.
void expect_writable(const std::string& path);
void expect_writable_folder(const std::string& folder);

// What a file is lost by: "holds another document". Throws Failure unless forced.
void expect_force(const std::string& path, const std::string& what, bool force);

// expect_writable(), and that nothing is there unless forced. Throws Failure.
void expect_unused(const std::string& path, bool force);

// Whether there is something, also a link that leads nowhere.
bool is_there(const std::string& path);

// What is at a path now, to see later whether another program has written there.
class Glimpse {
 public:
  explicit Glimpse(const std::string& path);
  bool operator==(const Glimpse&) const = default;

 private:
  bool is_there_ = false;
  uint64_t bytes_ = 0;
  std::filesystem::file_time_type written_{};
};

}  // namespace tool
