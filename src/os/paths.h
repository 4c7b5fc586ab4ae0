// Paths relative to a file. Lexical: no file is opened.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::os {

// Windows: drives (C:\a), shares (\\server\share\a), and both behind \\?\.
enum class PathRules { posix, windows };
#ifdef _WIN32
inline constexpr PathRules own_path_rules = PathRules::windows;
#else
inline constexpr PathRules own_path_rules = PathRules::posix;
#endif

// The path that leads from the folder of `file` to `to`, both absolute, with slashes. Empty: none
// does, as between two drives.
std::string relative_path(std::string_view file, std::string_view to,
                          PathRules rules = own_path_rules);

// The reverse: the absolute path of `relative`, from the folder of an absolute `file`. It does not
// leave the file's drive or share. Empty: `relative` is not relative, or names a drive.
std::string path_from(std::string_view file, std::string_view relative,
                      PathRules rules = own_path_rules);

}  // namespace kvasir::os
