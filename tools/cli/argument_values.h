// Values on the command line: from text, or a CLI error that says what was expected.
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

// Whole text to a number in a range.
template <typename Number>
Number number(const std::string& text, Number least, Number most) {
  Number value{};
  bool whole = false;
  // libc++ has had from_chars of these for a short time only
  if constexpr (std::is_floating_point_v<Number>) {
    std::istringstream in(text);
    in.imbue(std::locale::classic());
    whole = in >> std::noskipws >> value && in.peek() == std::char_traits<char>::eof();
  } else {
    const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
    whole = failed == std::errc() && end == text.data() + text.size();
  }
  if (!whole || !(value >= least && value <= most))
    throw CLI::ValidationError("'" + text + "' is not a number from " +
                               CLI::detail::to_string(least) + " to " +
                               CLI::detail::to_string(most));
  return value;
}

Budget budget_of(const std::string& text);  // "512" or "2%"
kv_budget_schedule schedule_of(const std::string& name);

// Of lists with commas between their parts, none of which is empty.
std::vector<std::string> parts_of(const std::string& list);
std::vector<uint64_t> numbers_of(const std::string& list);
uint64_t size_of(const std::string& text);                  // bytes: "300M", "1.5G"
uint64_t length_of(const std::string& text);                // "8192" or "8K"
std::vector<uint64_t> lengths_of(const std::string& list);  // "8192,32K", each once
std::vector<NamedBudget> budgets_of(const std::string& list);
uint32_t filter_window_of(const std::string& name);
std::vector<Task> tasks_of(const std::string& list);  // "all" among them

}  // namespace tool
