#include "output.h"

#include <cerrno>
#include <cstring>

#include "failure.h"
#include "system.h"

namespace tool {

namespace fs = std::filesystem;

bool exists(const std::string& path) {
  std::error_code unknown;
  return fs::symlink_status(system::path(path), unknown).type() != fs::file_type::not_found;
}

FileState::FileState(const std::string& path) : exists_(tool::exists(path)) {
  std::error_code failed;
  if (const uint64_t bytes = fs::file_size(system::path(path), failed); !failed) bytes_ = bytes;
  if (const auto written = fs::last_write_time(system::path(path), failed); !failed)
    written_ = written;
}

void expect_writable_folder(const std::string& folder) {
  if (system::may_write_in(folder)) return;
  throw Failure(exit_file, "cannot write in the folder " + folder + ": " + std::strerror(errno));
}

void expect_writable(const std::string& path) {
  const fs::path file = system::path(path);
  std::error_code unknown;
  const fs::file_type type = fs::status(file, unknown).type();
  if (type == fs::file_type::directory)
    throw Failure(exit_file, path + " is a folder; name a file in it");
  if (!file.has_filename()) throw Failure(exit_file, "'" + path + "' does not name a file");
  if (type != fs::file_type::regular && type != fs::file_type::not_found &&
      type != fs::file_type::none)
    throw Failure(exit_file, path + " is not a plain file");
  const std::string folder = system::text(file.parent_path());
  expect_writable_folder(folder.empty() ? "." : folder);
}

void expect_force(const std::string& path, const std::string& reason, bool force) {
  if (!force)
    throw Failure(exit_file,
                  path + " " + reason + "; name another file, or add --force to replace it");
}

void expect_unused(const std::string& path, bool force) {
  expect_writable(path);
  if (exists(path)) expect_force(path, "exists already", force);
}

}  // namespace tool
