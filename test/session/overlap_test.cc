// How much of a question stands in blocks of text.
#include <algorithm>
#include <string>

#include "helpers.h"
#include "pool.h"
#include "session/overlap.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct Text {
  Array<Token> tokens;
  explicit Text(const std::string& text) {
    REQUIRE(mini_model()->tokenizer().encode(text, false, true, &tokens).ok());
  }
};

constexpr uint32_t block_tokens = 8;

std::vector<float> overlap_of(const std::string& question, const std::string& text,
                              uint64_t window = 0, uint64_t first = 0) {
  const Text asked(question), document(text);
  const uint64_t sealed = document.tokens.size() - window;
  const auto blocks =
      static_cast<uint32_t>(std::max<uint64_t>(1, (sealed + block_tokens - 1) / block_tokens));
  const BlockText texts[] = {{document.tokens, first, sealed, blocks, block_tokens}};
  std::vector<std::vector<float>> c;
  REQUIRE(find_overlap(mini_model()->tokenizer(), asked.tokens, texts, nullptr, &pool(2), &c).ok());
  return c[0];
}

const std::string filler = " It was a long way to go, and he went there by himself.";

}  // namespace

TEST_CASE("a block that has all of a question, alone or with the next one, covers it") {
  const std::string question = " castle locker",
                    text = filler + filler + " the castle locker" + filler + filler;
  const std::vector<float> c = overlap_of(question, text);
  const Text before(filler + filler);
  const std::size_t at = (before.tokens.size() + 1) / block_tokens;
  for (std::size_t b = 0; b < c.size(); ++b) {
    CHECK((c[b] >= 0 && c[b] <= 1.0001f));
    if (b + 1 < at || b > at + 1) CHECK(c[b] < 0.01f);
  }
  CHECK(*std::max_element(c.begin(), c.end()) > 0.99f);
  // words apart are worth less than the pair, and one of them less than both
  const auto best = [&](const std::string& words) {
    const std::vector<float> of = overlap_of(question, filler + words + filler);
    return *std::max_element(of.begin(), of.end());
  };
  CHECK(best(" castle locker") > best(" castle and locker"));
  CHECK(best(" castle and locker") > best(" castle and gate"));
  CHECK(best(" castle and gate") > best(" tower and gate"));
}

TEST_CASE(
    "spaces and the case of letters make no difference, and words that blocks share count "
    "little") {
  const auto best = [&](const std::string& question, const std::string& text) {
    const std::vector<float> of = overlap_of(question, text);
    return *std::max_element(of.begin(), of.end());
  };
  CHECK(best(" street", filler + " Street" + filler) > 0.99f);
  CHECK(best(" House", filler + "\nhouse" + filler) > 0.99f);
  CHECK(best("", filler) == 0);
  CHECK(best(" he castle", filler + filler + filler) < 0.4f);
}

TEST_CASE("tokens of the window belong to the first block, and count once") {
  const Text last(" castle locker");
  const std::string text = filler + filler + " castle locker";
  const std::vector<float> c = overlap_of(" castle locker", text, last.tokens.size());
  CHECK(c[0] > 0.99f);
  for (std::size_t b = 1; b < c.size(); ++b) CHECK(c[b] < 0.01f);
  for (float x : overlap_of(" castle", " castle castle" + filler + " castle", 1))
    CHECK(x <= 1.0001f);
}

TEST_CASE("tokens before the text do not count, a long question ends, and a fired token stops it") {
  const std::vector<float> c = overlap_of(" castle locker", " castle locker" + filler + filler, 0,
                                          Text(" castle locker").tokens.size());
  for (float x : c) CHECK(x < 0.01f);
  // of many tokens the last ones count
  std::string question = " castle locker";
  for (int i = 0; i < 100; ++i) question += filler;
  CHECK(overlap_of(question, " castle locker" + std::string(200, 'x'))[0] < 0.01f);
  Cancel cancel;
  cancel.fire();
  const Text asked(" castle"), document(filler);
  const BlockText texts[] = {{document.tokens, 0, document.tokens.size(), 2, 64}};
  std::vector<std::vector<float>> none;
  CHECK(find_overlap(mini_model()->tokenizer(), asked.tokens, texts, &cancel, &pool(2), &none)
            .code() == Code::cancelled);
  // tokens that no vocabulary has
  const std::vector<Token> odd = {-1, 1 << 30, 5};
  const BlockText hostile[] = {{odd, 0, 3, 1, 64}};
  CHECK(find_overlap(mini_model()->tokenizer(), asked.tokens, hostile, nullptr, &pool(2), &none)
            .ok());
}
