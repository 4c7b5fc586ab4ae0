// Names and values to hide in a text, all different from each other and from the text.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "eval_random.h"

namespace tool {

std::string any_number(Random* random);     // 4821907
std::string any_code(Random* random);       // XK-2210
std::string any_date(Random* random);       // 14 June 1887
std::string any_two_words(Random* random);  // amber walnut
std::string any_uuid(Random* random);
constexpr size_t two_word_pairs = 14'000;  // approximate number

// The subject of a fact: "access code" of the "north gate".
std::string any_attribute(Random* random);
std::string any_entity(Random* random);
// a date for a date, otherwise a value of any kind
std::string value_for(const std::string& attribute, Random* random);
std::string any_word(Random* random);

// Calls `make` until its result is new.
class Fresh {
 public:
  explicit Fresh(std::string_view text) : text_(text) {}

  template <typename Make>
  std::string operator()(Make make) {
    for (;;) {
      std::string made = make();
      if (text_.find(made) == std::string_view::npos && used_.insert(made).second) return made;
    }
  }

 private:
  std::string_view text_;
  std::set<std::string> used_;
};

}  // namespace tool
