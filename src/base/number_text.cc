#include "base/number_text.h"

#include <charconv>
#include <cmath>

namespace kvasir {

static NumberText written(double value, std::chars_format format, int precision) noexcept {
  NumberText out;
  const auto [end, error] =
      std::to_chars(out.text, out.text + sizeof out.text - 1, value, format, precision);
  *end = '\0';
  return out;
}

NumberText number_text(double value, int digits) noexcept {
  return written(value, std::chars_format::general, digits);
}

NumberText fixed_text(double value, int decimals) noexcept {
  return std::fabs(value) < 1e15 ? written(value, std::chars_format::fixed, decimals)
                                 : number_text(value);
}

}  // namespace kvasir
