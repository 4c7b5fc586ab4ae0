// What a saved sequence says of its turns: section `chat` of a cache file. Named fields, so that a
// reader that does not know one says which.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "base/memory.h"
#include "base/status.h"

namespace kvasir {

constexpr std::size_t max_chat_record = std::size_t{1} << 20;  // bytes
constexpr std::size_t max_instructions = 1'000'000;            // bytes, so that a record holds them

struct ChatRecord {
  std::string format;  // a name as text/chat.h has them, perhaps one that a later library knows;
                       // empty: there is no record
  std::string instructions;  // the system text; empty: there is none
  std::string unknown;  // the first field that this library does not know; empty: there is none
};

Array<std::byte> encode_chat_record(std::string_view format, std::string_view instructions = {});

// `path` is for messages. Code::corrupt.
Status decode_chat_record(std::span<const std::byte> section, const char* path, ChatRecord* out);

}  // namespace kvasir
