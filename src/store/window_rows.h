// Room of the rows of a KvStore in full precision, for its source files.
#pragma once

#include <cstdint>

namespace kvasir {

constexpr uint32_t capacity_step = 64;  // rows, so that decode seldom grows the window
// Room beyond a page of a window that is moved or loaded: for a question and a short answer.
constexpr uint32_t spare_rows = 96;

}  // namespace kvasir
