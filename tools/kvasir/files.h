// Files as wholes: written completely or not at all, known again by what is in them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tool {

// The complete file or none. Throws Failure.
void write_file(const std::string& path, const std::string& text);

// Of a file's size and of parts all over it: weights are too large to read whole. Throws Failure.
uint64_t sampled_hash(const std::string& path);

// Several texts as one.
std::string joined_texts(const std::vector<std::string>& paths);

}  // namespace tool
