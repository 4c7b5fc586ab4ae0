#include "number_text.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace tool {

std::string string_printf(const char* format, ...) {
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  const int size = std::vsnprintf(nullptr, 0, format, arguments);
  std::string text(size > 0 ? static_cast<size_t>(size) : 0, '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  va_end(arguments);
  return text;
}

std::string grouped(uint64_t number) {
  std::string digits = std::to_string(number);
  for (size_t at = digits.size(); at > 3;) digits.insert(at -= 3, 1, ',');
  return digits;
}

std::string byte_count(uint64_t bytes) {
  static constexpr const char* units[] = {"kB", "MB", "GB", "TB"};
  if (bytes < 1000) return std::to_string(bytes) + " bytes";
  double value = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  for (; value >= 999.5 && unit < 3; ++unit) value /= 1000;
  return string_printf(value < 99.95 ? "%.1f %s" : "%.0f %s", value, units[unit]);
}

std::string clock_time(double seconds) {
  const auto whole = static_cast<uint64_t>(std::llround(std::fmax(seconds, 0)));
  const auto h = static_cast<unsigned>(whole / 3600);
  const auto m = static_cast<unsigned>(whole / 60 % 60), s = static_cast<unsigned>(whole % 60);
  return h > 0 ? string_printf("%u:%02u:%02u", h, m, s) : string_printf("%u:%02u", m, s);
}

std::string duration(double seconds) {
  if (seconds < 0.00095) return string_printf("%.2f ms", seconds * 1e3);
  if (seconds < 0.0095) return string_printf("%.1f ms", seconds * 1e3);
  if (seconds < 0.9995) return string_printf("%.0f ms", seconds * 1e3);
  if (seconds < 59.95) return string_printf("%.1f s", seconds);
  return clock_time(seconds) + (seconds < 3599.5 ? " min" : " h");
}

std::string rate(double per_second) {
  if (per_second < 99.95) return string_printf("%.1f", per_second);
  return grouped(static_cast<uint64_t>(std::llround(per_second)));
}

std::string percent(double part, double whole) {
  const double value = whole > 0 ? 100 * part / whole : 0;
  return string_printf(value < 9.95 && value > 0 ? "%.1f%%" : "%.0f%%", value);
}

std::string listed(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list.append(list.empty() ? "" : ", ").append(name);
  return list;
}

}  // namespace tool
