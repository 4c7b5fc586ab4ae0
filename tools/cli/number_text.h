// Numbers as text for people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tool {

// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string string_printf(const char* format, ...);

std::string grouped(uint64_t number);                       // 154,012
std::string byte_count(uint64_t bytes);                     // 19.5 MB
std::string duration(double seconds);                       // 3 ms, 4.2 s, 1:05 min, 2:10:07 h
std::string clock_time(double seconds);                     // 1:05, 2:10:07
std::string rate(double per_second);                        // 2,362 from 100 on, else 35.2
std::string percent(double part, double whole);             // 2.1%
std::string listed(const std::vector<std::string>& names);  // full, quest, window

}  // namespace tool
