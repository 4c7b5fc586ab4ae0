// Names and formats from a file appear in messages, so their characters are restricted.
#include "session/chat_record.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/little_endian.h"
#include "text/chat.h"

namespace kvasir {
namespace {

constexpr std::size_t head_bytes = 8;  // u32 of the name's size, u32 of the value's
constexpr std::size_t max_name = 31;   // of a field and of a format
constexpr std::string_view format_field = "format", instructions_field = "instructions",
                           marks_field = "marks";

bool is_name(std::string_view text) {
  const auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  };
  return !text.empty() && text.size() <= max_name && std::all_of(text.begin(), text.end(), good);
}

}  // namespace

// A custom format has its text, and no other has one.
static bool fits_marks(std::string_view format, std::string_view marks) {
  if (format != chat_format_name(ChatFormat::custom)) return marks.empty();
  Chat chat;
  return Chat::parse(marks, &chat).ok() && chat.format() == ChatFormat::custom;
}

static void append_field(std::string_view name, std::string_view value, Array<std::byte>* record) {
  const std::size_t at = record->size();
  std::array<uint8_t, head_bytes> head;
  store32(head.data(), static_cast<uint32_t>(name.size()));
  store32(head.data() + 4, static_cast<uint32_t>(value.size()));
  record->resize(at + head_bytes + name.size() + value.size());
  std::memcpy(record->data() + at, head.data(), head_bytes);
  std::memcpy(record->data() + at + head_bytes, name.data(), name.size());
  std::memcpy(record->data() + at + head_bytes + name.size(), value.data(), value.size());
}

Array<std::byte> encode_chat_record(std::string_view format, std::string_view instructions,
                                    std::string_view marks) {
  Array<std::byte> record;
  append_field(format_field, format, &record);
  if (!instructions.empty()) append_field(instructions_field, instructions, &record);
  if (!marks.empty()) append_field(marks_field, marks, &record);
  return record;
}

Status decode_chat_record(std::span<const std::byte> section, const char* path, ChatRecord* out) {
  const auto corrupt = [&](const char* what) {
    return Status::error(Code::corrupt, "%s: section 'chat': %s; nothing was loaded", path, what);
  };
  if (section.size() > max_chat_record) return corrupt("it is too large");
  ChatRecord record;
  std::vector<std::string_view> names;
  std::string_view rest(reinterpret_cast<const char*>(section.data()), section.size());
  while (!rest.empty()) {
    if (rest.size() < head_bytes) return corrupt("its last field is cut");
    const auto* head = reinterpret_cast<const uint8_t*>(rest.data());
    const uint64_t name_bytes = load32(head), value_bytes = load32(head + 4);
    rest.remove_prefix(head_bytes);
    if (name_bytes + value_bytes > rest.size()) return corrupt("its last field is cut");
    const std::string_view name = rest.substr(0, name_bytes),
                           value = rest.substr(name_bytes, value_bytes);
    rest.remove_prefix(name_bytes + value_bytes);
    if (!is_name(name))
      return corrupt("a field's name has other characters than a-z, 0-9 and '-', or more than 31");
    if (std::find(names.begin(), names.end(), name) != names.end())
      return corrupt("a field is there twice");
    names.push_back(name);
    if (name == format_field) {
      if (!is_name(value))
        return corrupt(
            "the format's name has other characters than a-z, 0-9 and '-', or more than 31");
      record.format = value;
    } else if (name == instructions_field) {
      if (value.empty() || value.size() > max_instructions)
        return corrupt("its instructions are empty or have more than 1000000 bytes");
      if (value.find('\0') != value.npos) return corrupt("its instructions have a NUL");
      record.instructions = value;
    } else if (name == marks_field) {
      record.marks = value;
    } else if (record.unknown.empty()) {
      record.unknown = name;
    }
  }
  if (record.format.empty()) return corrupt("it names no format");
  if (!fits_marks(record.format, record.marks))
    return corrupt("its marks are not those of a custom format");
  *out = std::move(record);
  return {};
}

}  // namespace kvasir
