// Well-formed UTF-8 as the Unicode Standard's table 3-7 lists it.
#include "base/utf8.h"

namespace kvasir {
namespace {

struct Lead {
  std::size_t length;       // bytes of the character; 0 when the byte begins none
  unsigned char low, high;  // bounds of the second byte; later ones are 80..BF
};

Lead lead_of(unsigned char byte) {
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};  // shorter forms exist below A0
  if (byte == 0xED) return {3, 0x80, 0x9F};  // surrogates above 9F
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};  // U+10FFFF is the last
  return {0, 0, 0};
}

}  // namespace

Utf8 utf8_step(std::string_view text, std::size_t* length) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  *length = 1;
  if (byte(0) < 0x80) return Utf8::valid;
  const Lead lead = lead_of(byte(0));
  if (lead.length == 0) return Utf8::invalid;
  for (std::size_t i = 1; i < lead.length; ++i) {
    *length = i;
    if (i == text.size()) return Utf8::incomplete;
    const unsigned char low = i == 1 ? lead.low : 0x80;
    const unsigned char high = i == 1 ? lead.high : 0xBF;
    if (byte(i) < low || byte(i) > high) return Utf8::invalid;
  }
  *length = lead.length;
  return Utf8::valid;
}

}  // namespace kvasir
