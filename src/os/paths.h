// Paths relative to a file. Lexical: no file is opened.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::os {

// The path that leads from the folder of `file` to `to`, both absolute, with slashes. Empty: none
// does, as between two drives.
std::string relative_path(std::string_view file, std::string_view to);

// The reverse: the absolute path of `relative`, from the folder of an absolute `file`. It does not
// leave the file's drive.
std::string path_from(std::string_view file, std::string_view relative);

}  // namespace kvasir::os
