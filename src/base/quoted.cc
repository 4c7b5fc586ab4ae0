#include "base/quoted.h"

#include <cstdio>
#include <cstring>

#include "base/utf8.h"

namespace kvasir {
namespace {

// The output for one character: itself, or its escape.
struct Unit {
  std::size_t taken;  // bytes of the text
  std::size_t size;   // bytes in `bytes`
  char bytes[16];
};

char32_t decode(std::string_view character) {
  const auto at = [&](std::size_t i) {
    return static_cast<char32_t>(static_cast<unsigned char>(character[i]));
  };
  switch (character.size()) {
    case 1:
      return at(0);
    case 2:
      return (at(0) & 0x1F) << 6 | (at(1) & 0x3F);
    case 3:
      return (at(0) & 0x0F) << 12 | (at(1) & 0x3F) << 6 | (at(2) & 0x3F);
    default:
      return (at(0) & 0x07) << 18 | (at(1) & 0x3F) << 12 | (at(2) & 0x3F) << 6 | (at(3) & 0x3F);
  }
}

bool is_printable(char32_t c) {
  static constexpr struct {
    char32_t first, last;
  } hidden[] = {
      {0x00, 0x1F},       {0x7F, 0x9F},         {0xAD, 0xAD},     {0x61C, 0x61C},
      {0x115F, 0x1160},   {0x180B, 0x180F},     {0x200B, 0x200F}, {0x2028, 0x202E},
      {0x2060, 0x206F},   {0x3164, 0x3164},     {0xFDD0, 0xFDEF}, {0xFEFF, 0xFEFF},
      {0xFFA0, 0xFFA0},   {0xFFF0, 0xFFFB},     {0xFFFE, 0xFFFF}, {0x1D173, 0x1D17A},
      {0xE0000, 0xE0FFF}, {0x10FFFE, 0x10FFFF},
  };
  for (const auto& range : hidden)
    if (c >= range.first && c <= range.last) return false;
  return true;
}

Unit next_unit(std::string_view text) {
  Unit unit{};
  const Utf8 step = utf8_step(text, &unit.taken);
  if (step != Utf8::valid) {
    unit.taken = 1;
    unit.size = static_cast<std::size_t>(
        std::snprintf(unit.bytes, sizeof unit.bytes, "\\x%02X",
                      static_cast<unsigned>(static_cast<unsigned char>(text[0]))));
    return unit;
  }
  const char32_t c = decode(text.substr(0, unit.taken));
  if (is_printable(c)) {
    unit.size = unit.taken;
    std::memcpy(unit.bytes, text.data(), unit.taken);
  } else {
    const char* format = c < 0x80 ? "\\x%02X" : "\\u{%X}";
    unit.size = static_cast<std::size_t>(
        std::snprintf(unit.bytes, sizeof unit.bytes, format, static_cast<unsigned>(c)));
  }
  return unit;
}

}  // namespace

void quote(std::string_view text, char* out, std::size_t capacity) noexcept {
  constexpr std::string_view gap = "...";
  std::size_t all = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const Unit unit = next_unit(rest);
    all += unit.size;
    rest.remove_prefix(unit.taken);
  }
  const std::size_t room = capacity - 1;
  const bool fits = all <= room;
  const std::size_t head = fits ? all : (room - gap.size()) / 2,
                    tail = fits ? 0 : room - gap.size() - head;
  std::size_t before = 0, written = 0;  // bytes of all units so far, and of those written
  bool skipped = false;
  for (std::string_view rest = text; !rest.empty();) {
    const Unit unit = next_unit(rest);
    rest.remove_prefix(unit.taken);
    const bool in_head = !skipped && before + unit.size <= head, in_tail = before >= all - tail;
    before += unit.size;
    if (!in_head && !skipped) {
      skipped = true;
      std::memcpy(out + written, gap.data(), gap.size());
      written += gap.size();
    }
    if (!in_head && !in_tail) continue;
    std::memcpy(out + written, unit.bytes, unit.size);
    written += unit.size;
  }
  out[written] = 0;
}

void quote_head(std::string_view text, std::string_view gap, char* out,
                std::size_t capacity) noexcept {
  std::size_t written = 0, before_gap = 0;  // before_gap: whole units that leave room for it
  while (!text.empty()) {
    const Unit unit = next_unit(text);
    if (written + unit.size >= capacity) {
      std::memcpy(out + before_gap, gap.data(), gap.size());
      written = before_gap + gap.size();
      break;
    }
    std::memcpy(out + written, unit.bytes, unit.size);
    written += unit.size;
    if (written + gap.size() < capacity) before_gap = written;
    text.remove_prefix(unit.taken);
  }
  out[written] = 0;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const Unit unit = next_unit(text);
    for (const char c : std::string_view(unit.bytes, unit.size)) {
      if (c == '"' || c == '\\') out.push_back('\\');
      out.push_back(c);
    }
    text.remove_prefix(unit.taken);
  }
  return out + "\"";
}

}  // namespace kvasir
