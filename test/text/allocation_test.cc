// Every allocation of loading and encoding fails once: it is reported as an allocation that failed,
// and nothing is left behind.
#include <new>

#include "base/memory.h"
#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::size_t countdown = 0;  // allocations that succeed before one fails
bool fired = false;

bool fail_at_zero(std::size_t) {
  if (countdown-- != 0) return false;
  return fired = true;
}

void check_every_failure(GgufBuilder builder) {
  const std::vector<std::byte> file = builder.build();
  const auto load_and_encode = [&] {
    std::unique_ptr<const Tokenizer> tokenizer;
    Status status = load_tokenizer(file, &tokenizer);
    REQUIRE_MESSAGE(status.ok(), status.message());
    Array<Token> ids;
    const Tokenizer::Part parts[] = {{"<s>ab a", true}, {"b \xFF\n12  ", false}};
    status = tokenizer->encode(parts, true, &ids);
    REQUIRE_MESSAGE(status.ok(), status.message());
    return std::vector<Token>(ids.begin(), ids.end());
  };
  const std::vector<Token> expected = load_and_encode();
  std::size_t failures = 0;
  do {
    countdown = failures;
    fired = false;
    allocation_fault = fail_at_zero;
    try {
      const std::vector<Token> ids = load_and_encode();
      // without memory for machine code the interpreter cuts the same words
      CHECK(ids == expected);
    } catch (const std::bad_alloc&) {
    }
    allocation_fault = nullptr;
    REQUIRE(++failures < 10000);
  } while (fired);
  CHECK(failures > 20);
}

}  // namespace

TEST_CASE("an allocation that fails is taken for something else") {
  check_every_failure(bpe_file(byte_vocabulary(), "deepseek-v3"));
  check_every_failure(spm_file(spm_vocabulary()));
  check_every_failure(gemma4_file(spm_vocabulary()));
}
