// Parsers of the values on the command line. Each throws CLI::ValidationError with the expected
// form.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "arguments.h"

namespace tool {

constexpr uint64_t max_tokens = 1ull << 40;

// The whole text as a number from min to max.
template <typename Number>
Number number(const std::string& text, Number min, Number max) {
  Number value{};
  bool whole = false;
  // early versions of libc++ have no from_chars for floating point
  if constexpr (std::is_floating_point_v<Number>) {
    std::istringstream in(text);
    in.imbue(std::locale::classic());
    whole = in >> std::noskipws >> value && in.peek() == std::char_traits<char>::eof();
  } else {
    const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    whole = failed == std::errc() && end == text.data() + text.size();
  }
  if (!whole || !(value >= min && value <= max))
    throw CLI::ValidationError("'" + text + "' is not a number from " +
                               CLI::detail::to_string(min) + " to " + CLI::detail::to_string(max));
  return value;
}

Budget budget_of(const std::string& text);  // "512" or "2%"
kv_budget_schedule schedule_of(const std::string& name);

// Lists have commas between their parts, and no empty part.
std::vector<std::string> parts_of(const std::string& list);
uint64_t size_of(const std::string& text);                  // bytes: "300M", "1.5G"
uint64_t length_of(const std::string& text);                // "8192" or "8K", at least 1
std::vector<uint64_t> lengths_of(const std::string& list);  // "8192,32K", without repetitions
std::vector<uint64_t> depths_of(const std::string& list);   // the same, from 0
std::vector<NamedBudget> budgets_of(const std::string& list);
uint32_t filter_window_of(const std::string& name);
// "all" stands for all tasks of single documents, "collection" for all of a collection
std::vector<Task> tasks_of(const std::string& list);

}  // namespace tool
