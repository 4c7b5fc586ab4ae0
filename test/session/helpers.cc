#include "helpers.h"

#include <fstream>
#include <iterator>

namespace kvasir::test {

std::vector<Token> book_tokens(std::size_t n) {
  static const std::string text = [] {
    std::ifstream in(EXAMPLES "/demo.txt", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  Array<Token> ids;
  const Status s = mini_model()->tokenizer().encode(std::string_view(text).substr(0, 8 * n), false, true, &ids);
  REQUIRE(s.ok());
  REQUIRE(ids.size() >= n);
  return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n)};
}

}  // namespace kvasir::test
