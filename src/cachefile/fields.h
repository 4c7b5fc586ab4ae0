// Tables of fields: the bytes that a file, an entry or a section begins with. A table is the only
// place that has the offsets of its fields. Tests lie about every field of every table, so a new
// field is tested because it is in one.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvasir::format {

enum class FieldIs : uint8_t {
  data,      // opaque bytes, or text
  revision,  // a number that says how to read the rest
  size,      // a length, a count or an offset: what is allocated, read or repeated by
  choice,    // one of a few numbers
  checksum,  // of other bytes
  reserved,  // zero
};

struct Field {
  const char* name;
  uint64_t bytes;
  FieldIs is;
  uint64_t offset = 0;  // set by lay_out()
};

// Places the fields one after another.
template <std::size_t count>
constexpr std::array<Field, count> lay_out(const Field (&fields)[count]) {
  std::array<Field, count> out{};
  uint64_t offset = 0;
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = fields[i];
    out[i].offset = offset;
    offset += fields[i].bytes;
  }
  return out;
}

constexpr uint64_t end_of(std::span<const Field> fields) {
  return fields.back().offset + fields.back().bytes;
}

// The offset of a field. A name that the table does not have is an error of the compiler.
consteval uint64_t offset_in(std::span<const Field> fields, std::string_view name) {
  for (const Field& field : fields)
    if (field.name == name) return field.offset;
  throw "no such field";
}

// The first reserved field with bytes that are not zero; null: none.
inline const Field* find_used_reserve(std::span<const Field> fields, const uint8_t* begin) {
  for (const Field& field : fields)
    if (field.is == FieldIs::reserved &&
        std::any_of(begin + field.offset, begin + field.offset + field.bytes,
                    [](uint8_t byte) { return byte != 0; }))
      return &field;
  return nullptr;
}

}  // namespace kvasir::format
