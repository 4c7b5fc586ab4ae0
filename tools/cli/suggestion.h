// The known name that a mistyped one most likely means.
#pragma once

#include <string>
#include <vector>

namespace tool {

// " (did you mean 'NAME'?)" for the name with the fewest edits (insert, delete, replace, swap of
// neighbours), at most a third of the letters; otherwise "".
std::string suggestion(const std::string& given, const std::vector<std::string>& names);

}  // namespace tool
