// Texts and vocabularies made to be slow: eight times the size may cost eight times the time, never
// its square.
#include <bit>
#include <chrono>
#include <ctime>
#include <functional>
#include <random>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "base/checksum.h"
#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::string repeat(std::string_view unit, std::size_t size) {
  std::string text;
  while (text.size() < size) text += unit;
  text.resize(size);
  return text;
}

std::vector<std::string> hostile_texts(std::size_t size) {
  std::vector<std::string> texts;
  for (const char* unit : {"a",        "A",    " ",        "\n",           "\t ",
                           " \n",      "7",    "7777777b", "a b ",         "a7",
                           "aA",       "!",    "'",        "\xE4\xB8\xAD", "\xCC\x81",
                           "\xC2\xA0", "\xFF", "\xE4",     "\xE2\x96\x81", "<|im_end|",
                           "<0x0A>"})
    texts.push_back(repeat(unit, size));
  for (const char* end : {"x", "5", "\xE4\xB8\xAD", "\x01", "!"})
    texts.push_back(repeat(" ", size) + end);
  std::mt19937 random(5);
  std::string bytes(size, '\0'), letters(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  for (char& c : letters) c = static_cast<char>('a' + random() % 26);
  texts.push_back(bytes);
  texts.push_back(letters);
  return texts;
}

double seconds_of(const Tokenizer& tokenizer, const std::string& text) {
  double best = 1e9;
  for (int round = 0; round < 2; ++round) {
    Array<Token> ids;
    const auto begin = std::chrono::steady_clock::now();
    const Status status = tokenizer.encode(text, true, true, &ids);
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    REQUIRE_MESSAGE(status.ok(), status.message());
    REQUIRE(ids.size() <= text.size() + 3);
  }
  return best;
}

// At 64 KiB a quadratic algorithm of one nanosecond a step takes 4 seconds; a linear one a few
// milliseconds.
void check_linear(const Tokenizer& tokenizer) {
  CAPTURE(tokenizer.name());
  const auto small = hostile_texts(8 << 10), large = hostile_texts(64 << 10);
  for (std::size_t i = 0; i < small.size(); ++i) {
    CAPTURE(i);
    CHECK(seconds_of(tokenizer, large[i]) < 24 * seconds_of(tokenizer, small[i]) + 0.5);
  }
}

// Merges of every length of runs, so that long rows merge all the way.
TestVocabulary run_vocabulary() {
  TestVocabulary vocabulary = byte_vocabulary();
  for (const char* c : {"a", " ", "\n", "!", "7", "\xFF"}) {
    std::string run = c;
    for (int i = 0; i < 5; ++i, run += run) vocabulary.merge(run, run);
  }
  vocabulary.add("<|im_end|>", 3);
  return vocabulary;
}

// Seconds to load byte-level BPE with `add`'s changes.
double seconds_to_load(const std::function<void(TestVocabulary*)>& add) {
  TestVocabulary vocabulary = byte_vocabulary();
  add(&vocabulary);
  const std::vector<std::byte> file = bpe_file(vocabulary).build();
  std::unique_ptr<const Tokenizer> tokenizer;
  const auto begin = std::chrono::steady_clock::now();
  const Status status = load_tokenizer(file, &tokenizer);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  REQUIRE_MESSAGE(status.ok(), status.message());
  return seconds;
}

// Whether a hash, of which a table of twice `entries` places takes so many bits, lands in one
// sixty-fourth of it.
bool crowds(uint64_t hash, std::size_t entries) {
  return (hash & (std::bit_ceil(2 * entries) - 1)) < 2 * entries / 64;
}

// Tokens that share a few places of a table that hashes them by XXH3 without a seed.
void add_crowded_tokens(TestVocabulary* vocabulary, std::size_t count) {
  for (std::size_t number = 0; vocabulary->tokens.size() < count; ++number) {
    const std::string text = std::to_string(number);
    if (text.size() > 1 && crowds(checksum(text.data(), text.size(), 0), count))
      vocabulary->add(text);
  }
}

// Merges whose pairs of symbols do so in one that multiplies by the golden ratio.
void add_crowded_merges(TestVocabulary* vocabulary, std::size_t count) {
  const std::size_t first = vocabulary->tokens.size(), symbols = first + 16000;
  while (vocabulary->tokens.size() < symbols)
    vocabulary->add("t" + std::to_string(vocabulary->tokens.size()));
  for (uint64_t left = first; left < symbols; ++left) {
    for (uint64_t right = first; right < symbols && vocabulary->merges.size() < count; ++right) {
      const uint64_t pair = left << 32 | right;
      if (crowds((pair ^ pair >> 29) * 0x9E3779B97F4A7C15u >> 32, count))
        vocabulary->merges.push_back(vocabulary->tokens[left] + " " + vocabulary->tokens[right]);
    }
  }
  REQUIRE(vocabulary->merges.size() == count);
}

}  // namespace

TEST_CASE(
    "tokens or merges that a file's author made to collide do not take the square of their number "
    "to load") {
  for (const auto add : {add_crowded_tokens, add_crowded_merges}) {
    const double small = seconds_to_load([&](TestVocabulary* v) { add(v, 15000); });
    const double large = seconds_to_load([&](TestVocabulary* v) { add(v, 120000); });
    CHECK(large < 24 * small + 0.5);
  }
}

TEST_CASE("a pre-tokenizer is quadratic in a hostile text") {
  // One of each set of expressions.
  for (const char* pre :
       {"default",        "gpt-2",       "smollm",     "falcon",     "llama-bpe",
        "qwen2",          "qwen35",      "seed-coder", "bailingmoe", "minicpm5",
        "tekken",         "gpt-4o",      "bloom",      "viking",     "deepseek-llm",
        "deepseek-coder", "deepseek-v3", "afmoe",      "tiny_aya",   "kimi-k2",
        "exaone-moe",     "youtu",       "superbpe",   "jais-2",     "laguna"}) {
    auto file = bpe_file(run_vocabulary(), pre);
    check_linear(*tokenizer_of(file));
  }
}

TEST_CASE("SentencePiece is quadratic in a hostile text") {
  check_linear(*tokenizer_of_file(FIXTURES "/tokenizers/ggml-vocab-llama-spm.gguf"));
  // one with a token across a space: a text is one word
  TestVocabulary vocabulary = spm_vocabulary();
  for (const char* c : {"a", "\xE2\x96\x81", "b"}) vocabulary.add(c, 1, -9);
  vocabulary.add("a\xE2\x96\x81", 1, -1);
  vocabulary.add("aa", 1, -2);
  vocabulary.add("aaaa", 1, -3);
  auto file = spm_file(vocabulary);
  check_linear(*tokenizer_of(file));
}

TEST_CASE("Gemma 4's BPE is quadratic in a hostile text") {
  check_linear(*tokenizer_of_file(FIXTURES "/tokenizers/gemma4.gguf"));
  TestVocabulary vocabulary = spm_vocabulary();
  std::string run = "a", spaces = "\xE2\x96\x81";
  for (std::string* text : {&run, &spaces}) {
    vocabulary.add(*text);
    for (int i = 0; i < 5; ++i, *text += *text) {
      vocabulary.add(*text + *text);
      vocabulary.merges.push_back(*text + " " + *text);
    }
  }
  auto file = gemma4_file(vocabulary);
  check_linear(*tokenizer_of(file));
}

TEST_CASE("cutting a long text into tokens cannot be stopped") {
  TestVocabulary spm = spm_vocabulary();
  for (const char* c : {"a", "b"}) spm.add(c, 1, -9);
  spm.add("aa", 1, -2);
  TestVocabulary gemma4 = spm;
  gemma4.merges = {"a a"};
  auto bpe_model = bpe_file(run_vocabulary()), spm_model = spm_file(spm),
       gemma4_model = gemma4_file(gemma4);
  const auto bpe_tokenizer = tokenizer_of(bpe_model), spm_tokenizer = tokenizer_of(spm_model),
             gemma4_tokenizer = tokenizer_of(gemma4_model);
  for (const Tokenizer* tokenizer :
       {bpe_tokenizer.get(), spm_tokenizer.get(), gemma4_tokenizer.get()}) {
    // many words, a long one, one that is not UTF-8
    for (const std::string& unit : std::vector<std::string>{"ab ", "a", "\xFF"}) {
      CAPTURE(tokenizer->name());
      CAPTURE(unit);
      std::string text = repeat(unit, 1 << 20);
      const Tokenizer::Part part = {text, true};
      Array<Token> ids = {1, 2, 3};
      Cancel cancel;
      cancel.fire();
      CHECK(tokenizer->encode({&part, 1}, true, &ids, {nullptr, &cancel}).code() ==
            Code::cancelled);
      CHECK(ids.size() == 3);
      // And once it runs: a text that is longer each time, so that some run is long enough for the
      // thread that fires.
      Status status;
      double seconds = 0;
      for (int round = 0; round < 6 && status.ok(); ++round, text += text) {
        cancel.reset();
        std::chrono::steady_clock::time_point fired;
        std::thread fire([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          fired = std::chrono::steady_clock::now();
          cancel.fire();
        });
        const Tokenizer::Part longer = {text, true};
        status = tokenizer->encode({&longer, 1}, true, &ids, {nullptr, &cancel});
        const auto end = std::chrono::steady_clock::now();
        fire.join();
        seconds = std::chrono::duration<double>(end - fired).count();
        ids.resize(3);
      }
      CHECK(status.code() == Code::cancelled);
      CHECK(seconds < 2);  // 0.1 are promised, on a machine that is not overloaded
    }
  }
}

namespace {

// CPU time of this thread, which a loaded machine does not lengthen.
double cpu_seconds() {
#ifdef _WIN32
  return 0;
#else
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
#endif
}

// A byte that no other place of the chain has as its next one, so that its siblings are in a list
// before it.
constexpr std::size_t chain_length = 60;
char chain_byte(std::size_t depth) { return static_cast<char>('!' + depth % 7); }

// A chain of bytes, and at each place of it 200 other bytes that go on: siblings, which a list has
// to pass on every step.
void add_siblings(TestVocabulary* vocabulary) {
  std::string chain = "<";
  vocabulary->add(chain, 4);
  for (std::size_t depth = 0; depth < chain_length; ++depth) {
    vocabulary->add(chain + chain_byte(depth), 4);
    for (unsigned byte = 40; byte < 240; ++byte)
      vocabulary->add(chain + static_cast<char>(byte) + "x", 4);
    chain += chain_byte(depth);
  }
}

// As many tokens of the same sizes that share no more than their first bytes.
void add_strangers(TestVocabulary* vocabulary) {
  for (std::size_t depth = 0; depth < chain_length; ++depth) {
    for (unsigned i = 0; i < 200; ++i) {
      std::string text = std::to_string(i * 977 + depth * 199999);
      text.resize(depth + 3, 'y');
      vocabulary->add(text, 4);
    }
  }
}

double cpu_seconds_to_load(const std::function<void(TestVocabulary*)>& add) {
  TestVocabulary vocabulary = byte_vocabulary();
  add(&vocabulary);
  const std::vector<std::byte> file = bpe_file(vocabulary).build();
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    std::unique_ptr<const Tokenizer> tokenizer;
    const double begin = cpu_seconds();
    const Status status = load_tokenizer(file, &tokenizer);
    best = std::min(best, cpu_seconds() - begin);
    REQUIRE_MESSAGE(status.ok(), status.message());
  }
  return best;
}

}  // namespace

TEST_CASE(
    "special tokens with shared beginnings and hundreds of siblings take longer to load than "
    "others, or to be searched for") {
  const double siblings = cpu_seconds_to_load(add_siblings),
               strangers = cpu_seconds_to_load(add_strangers);
  MESSAGE("12,000 special tokens: ", siblings * 1e3, " ms of CPU time, of other spellings ",
          strangers * 1e3);
  CHECK(siblings < 4 * strangers + 0.01);

  TestVocabulary crowded = byte_vocabulary(), single = byte_vocabulary();
  add_siblings(&crowded);
  std::string chain = "<";
  for (std::size_t depth = 0; depth < chain_length; ++depth) chain += chain_byte(depth);
  single.add(chain, 4);
  chain.pop_back();  // a text that walks the whole chain and finds nothing at its end
  const std::string text = repeat(chain + "z", 200000);
  double seconds[2];
  for (const bool many : {false, true}) {
    auto file = bpe_file(many ? crowded : single);
    const auto tokenizer = tokenizer_of(file);
    const double begin = cpu_seconds();
    (void)ids_of(*tokenizer, text);
    seconds[many] = cpu_seconds() - begin;
  }
  MESSAGE("a text along them: ", seconds[1] * 1e3, " ms of CPU time, along one of them ",
          seconds[0] * 1e3);
  CHECK(seconds[1] < 4 * seconds[0] + 0.01);
}

#ifndef _WIN32
TEST_CASE("a search for special tokens goes on for milliseconds after it was cancelled") {
  // Each place of a text of "a" walks along 511 bytes, of which each has 15 siblings.
  TestVocabulary vocabulary = byte_vocabulary();
  for (std::size_t depth = 1; depth < 511; ++depth) {
    vocabulary.add(std::string(depth, 'a') + "b", 4);
    for (char c = 'c'; c < 'c' + 14; ++c) vocabulary.add(std::string(depth, 'a') + c, 4);
  }
  vocabulary.tokens[vocabulary.tokens.size() - 1] = std::string(511, 'a') + "!";
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  const std::string text(1 << 20, 'a');
  const Tokenizer::Part part = {text, false};
  clockid_t clock;
  REQUIRE(pthread_getcpuclockid(pthread_self(), &clock) == 0);
  double longest = 0;
  for (int round = 0; round < 8; ++round) {
    Cancel cancel;
    double fired = 0;
    std::thread fire([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      timespec t{};
      clock_gettime(clock, &t);
      fired = static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
      cancel.fire();
    });
    Array<Token> ids;
    CHECK(tokenizer->encode({&part, 1}, true, &ids, {nullptr, &cancel}).code() == Code::cancelled);
    const double end = cpu_seconds();
    fire.join();
    longest = std::max(longest, end - fired);
  }
  MESSAGE("cancelled: ", longest * 1e3, " ms of CPU time later");
  CHECK(longest < 0.01);
}
#endif

TEST_CASE("a vocabulary is larger than any model's, and its tables are made all the same") {
  for (const bool merges : {false, true}) {
    TestVocabulary vocabulary = byte_vocabulary();
    std::vector<std::string> many(merges ? 2100000 : 1100000);
    GgufBuilder b;
    b.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", "gpt-2");
    b.key("tokenizer.ggml.tokens", merges ? vocabulary.tokens : many)
        .key("tokenizer.ggml.merges", merges ? many : vocabulary.merges);
    CHECK(refusal_of(b).code() == Code::limit);
  }
  TestVocabulary vocabulary = byte_vocabulary();
  vocabulary.add(std::string(5000, 'x'));
  auto file = bpe_file(vocabulary);
  CHECK(refusal_of(file).code() == Code::limit);
  vocabulary = byte_vocabulary();
  for (int i = 0; i < 5000; ++i) vocabulary.add(std::string(500, 'x') + std::to_string(i), 3);
  file = bpe_file(vocabulary);
  CHECK(refusal_of(file).code() == Code::limit);
}
