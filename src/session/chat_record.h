// Turns of a saved sequence: section `chat` of a cache file. Fields have names, so that a library
// can name a field that it does not support.
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
  std::string format;        // a name of text/chat.h, perhaps of a later library; empty: no record
  std::string instructions;  // the system text; empty: none
  std::string marks;         // text of a custom format (Chat::text); empty: of another format
  std::string unknown;       // the first unsupported field; empty: none
};

Array<std::byte> encode_chat_record(std::string_view format, std::string_view instructions = {},
                                    std::string_view marks = {});

// `path` is for messages. Code::corrupt.
Status decode_chat_record(std::span<const std::byte> section, const char* path, ChatRecord* out);

}  // namespace kvasir
