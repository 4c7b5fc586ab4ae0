// Vocabularies that do not fit together are refused by name; roles have the right defaults.
#include <cmath>
#include <numeric>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

void check_refused(GgufBuilder builder, Code code, const std::string& word) {
  const Status status = refusal_of(builder);
  CAPTURE(status.message());
  CHECK(status.code() == code);
  CHECK(std::string(status.message()).find(word) != std::string::npos);
}

}  // namespace

TEST_CASE("a tokenizer that is not supported is taken for another") {
  check_refused(GgufBuilder().key("general.architecture", "llama"), Code::unsupported,
                "tokenizer.ggml.model");
  for (const char* name : {"bert", "t5", "rwkv", "plamo2", "none", "something"})
    check_refused(GgufBuilder().key("tokenizer.ggml.model", name), Code::unsupported, name);
  check_refused(bpe_file(byte_vocabulary(), "no-such-family"), Code::unsupported, "no-such-family");
  GgufBuilder number;
  number.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", uint32_t{3});
  check_refused(number, Code::corrupt, "tokenizer.ggml.pre");
}

TEST_CASE("arrays of other lengths than the vocabulary's are read past their ends") {
  TestVocabulary vocabulary = byte_vocabulary();
  vocabulary.types.pop_back();
  check_refused(bpe_file(vocabulary), Code::corrupt, "token_type");
  vocabulary = spm_vocabulary();
  vocabulary.types.push_back(1);
  check_refused(spm_file(vocabulary), Code::corrupt, "token_type");
  vocabulary = spm_vocabulary();
  vocabulary.scores.pop_back();
  check_refused(spm_file(vocabulary), Code::corrupt, "scores");
  vocabulary = spm_vocabulary();
  vocabulary.scores[5] = std::nanf("");
  check_refused(spm_file(vocabulary), Code::corrupt, "scores");
}

TEST_CASE("missing or empty arrays, and invalid kinds, get through") {
  GgufBuilder builder;
  builder.key("tokenizer.ggml.model", "llama");
  check_refused(builder, Code::corrupt, "tokenizer.ggml.tokens");
  check_refused(spm_file({}), Code::corrupt, "tokenizer.ggml.tokens");
  builder.key("tokenizer.ggml.tokens", std::vector<std::string>{"a"});
  check_refused(builder, Code::corrupt, "scores");
  GgufBuilder bpe;
  bpe.key("tokenizer.ggml.model", "gpt2")
      .key("tokenizer.ggml.tokens", std::vector<std::string>{"a"});
  check_refused(bpe, Code::corrupt, "merges");
  TestVocabulary vocabulary = byte_vocabulary();
  vocabulary.types[9] = 7;
  check_refused(bpe_file(vocabulary), Code::corrupt, "token 9");
}

TEST_CASE("a malformed merge is skipped in silence") {
  for (const char* merge : {"", "a", " ", "a ", " b"}) {
    TestVocabulary vocabulary = byte_vocabulary();
    vocabulary.merges = {"a b", merge};
    check_refused(bpe_file(vocabulary), Code::corrupt, "merge 1");
  }
}

TEST_CASE("a role names an id outside the vocabulary") {
  for (const char* key : {"bos", "eos", "eot", "eom", "unknown"}) {
    const std::string name = std::string("tokenizer.ggml.") + key + "_token_id";
    check_refused(bpe_file(byte_vocabulary()).key(name, uint32_t{256}), Code::corrupt, name);
    check_refused(bpe_file(byte_vocabulary()).key(name, int32_t{-1}), Code::corrupt, name);
    check_refused(bpe_file(byte_vocabulary()).key(name, "one"), Code::corrupt, name);
  }
}

TEST_CASE("suppressed tokens are lost, or name ids outside the vocabulary") {
  constexpr const char* key = "tokenizer.ggml.suppress_tokens";
  auto file = bpe_file(byte_vocabulary()).key(key, std::vector<int32_t>{9, 3, 9});
  const auto tokenizer = tokenizer_of(file);
  const auto suppressed = tokenizer->suppressed();
  CHECK(std::vector<Token>(suppressed.begin(), suppressed.end()) == std::vector<Token>{3, 9});
  auto without = bpe_file(byte_vocabulary());
  CHECK(tokenizer_of(without)->suppressed().empty());
  for (const int32_t id : {-1, 256})
    check_refused(bpe_file(byte_vocabulary()).key(key, std::vector<int32_t>{3, id}), Code::corrupt,
                  key);
  check_refused(bpe_file(byte_vocabulary()).key(key, uint32_t{3}), Code::corrupt, key);
  std::vector<int32_t> all(256);
  std::iota(all.begin(), all.end(), 0);
  check_refused(bpe_file(byte_vocabulary()).key(key, all), Code::corrupt, "every token");
}

TEST_CASE("a long piece makes loading quadratic") {
  TestVocabulary vocabulary = spm_vocabulary();
  vocabulary.add(std::string(100000, 'x'));
  check_refused(spm_file(vocabulary), Code::limit, "100000 bytes");
}

TEST_CASE(
    "special tokens so long that texts could be made that are slow to search for them are "
    "refused") {
  for (const int32_t type : {2, 3, 4}) {
    TestVocabulary vocabulary = byte_vocabulary();
    vocabulary.add(std::string(513, 'x'), type);
    check_refused(bpe_file(vocabulary), Code::limit, "token 256 is special and has 513 bytes");
    vocabulary.tokens.back().pop_back();
    auto file = bpe_file(vocabulary);
    tokenizer_of(file);
  }
}

TEST_CASE("equal and empty tokens confuse the vocabulary") {
  TestVocabulary vocabulary = byte_vocabulary();
  const Token first = vocabulary.add("<x>", 3);
  vocabulary.add("<x>", 3);
  vocabulary.add("", 3);
  vocabulary.add("", 4);
  vocabulary.add("a");
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(tokenizer->find("<x>") == first);
  CHECK(tokenizer->find("") == -1);
  CHECK(tokenizer->find("nothing") == -1);
  CHECK(ids_of(*tokenizer, "a<x>", true) == std::vector<Token>{'a', first});
}

TEST_CASE(
    "begin-of-text is added where the family or the file has none, or missing where it is wanted") {
  const auto with_ids = [](const char* pre) {
    return bpe_file(byte_vocabulary(), pre)
        .key("tokenizer.ggml.bos_token_id", uint32_t{1})
        .key("tokenizer.ggml.eos_token_id", uint32_t{2});
  };
  for (const char* pre : {"llama-bpe", "llama3", "falcon3", "tekken"}) {
    auto file = with_ids(pre);
    CHECK(tokenizer_of(file)->add_bos());
    auto against = with_ids(pre).key("tokenizer.ggml.add_bos_token", false);
    CHECK(!tokenizer_of(against)->add_bos());
    auto none = bpe_file(byte_vocabulary(), pre);
    CHECK(tokenizer_of(none)->bos() == -1);
    CHECK(!tokenizer_of(none)->add_bos());
  }
  for (const char* pre : {"gpt-2", "qwen2", "smollm", "deepseek-v3", "gpt-4o"}) {
    auto file = with_ids(pre);
    CHECK(!tokenizer_of(file)->add_bos());
    CHECK(!tokenizer_of(file)->add_eos());
    CHECK(tokenizer_of(file)->bos() == 1);
    auto wanted = with_ids(pre)
                      .key("tokenizer.ggml.add_bos_token", true)
                      .key("tokenizer.ggml.add_eos_token", true);
    CHECK(tokenizer_of(wanted)->add_bos());
    CHECK(tokenizer_of(wanted)->add_eos());
  }
  auto spm = spm_file(spm_vocabulary());
  const auto tokenizer = tokenizer_of(spm);
  CHECK(tokenizer->bos() == 1);
  CHECK(tokenizer->eos() == 2);
  CHECK(tokenizer->add_bos());
  CHECK(!tokenizer->add_eos());
}

TEST_CASE("a turn does not end at one of the model's tokens for it") {
  TestVocabulary vocabulary = byte_vocabulary();
  std::vector<Token> ends;
  for (const char* name : {"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
                           "</s>", "<|end_of_text|>",
                           "<\xEF\xBD\x9C"
                           "end\xE2\x96\x81of\xE2\x96\x81sentence\xEF\xBD\x9C>"})
    ends.push_back(vocabulary.add(name, 1));  // marked as text, as some files do
  auto file = bpe_file(vocabulary)
                  .key("tokenizer.ggml.eos_token_id", uint32_t{7})
                  .key("tokenizer.ggml.eot_token_id", uint32_t{8});
  const auto tokenizer = tokenizer_of(file);
  for (const Token token : ends) {
    CHECK(tokenizer->ends_turn(token));
    CHECK(tokenizer->kind(token) == TokenKind::control);
  }
  CHECK(tokenizer->ends_turn(7));
  CHECK(tokenizer->ends_turn(8));
  CHECK(!tokenizer->ends_turn(9));
  CHECK(!tokenizer->ends_turn(-1));

  vocabulary.add("<|return|>", 3);
  vocabulary.add("<|call|>", 3);
  auto channels = bpe_file(vocabulary);
  CHECK(!tokenizer_of(channels)->ends_turn(ends[2]));  // <|end|> only ends a message there
}

TEST_CASE(
    "a newer family's turn does not end at its tokens, or ends where they mean other things") {
  const auto ends = [](std::vector<const char*> names, const char* name) {
    TestVocabulary vocabulary = byte_vocabulary();
    for (const char* each : names) vocabulary.add(each, 4);
    auto file = bpe_file(vocabulary);
    const auto tokenizer = tokenizer_of(file);
    const Token token = tokenizer->find(name);
    CHECK((tokenizer->kind(token) == TokenKind::control) == tokenizer->ends_turn(token));
    return tokenizer->ends_turn(token);
  };
  for (const char* name : {"<turn|>", "<eos>", "<|tool_response>", "<|flush|>", "<|calls|>", "[e~[",
                           "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<seed:eos>",
                           "<｜hy_place▁holder▁no▁2｜>", "<|role_end|>", "<|endofresponse|>"})
    CHECK(ends({name}, name));
  CHECK(ends({"</s>"}, "</s>"));
  CHECK(!ends({"</s>", "<|tool_response>"}, "</s>"));  // Gemma 4: HTML
  CHECK(ends({"<|end|>", "<|return|>"}, "<|end|>"));
  CHECK(!ends({"<|end|>", "<|return|>", "<|call|>"}, "<|end|>"));
  for (const char* role : {"<|user|>", "<|observation|>"}) {  // GLM
    CHECK(ends({role, "[gMASK]"}, role));
    CHECK(!ends({role}, role));
  }
}

TEST_CASE("the mini model's vocabulary is misread") {
  const auto tokenizer = tokenizer_of_file(FIXTURES "/../../examples/mini-reader-q8_0.gguf");
  CHECK(std::string(tokenizer->name()) == "bpe/qwen2");
  CHECK(tokenizer->size() == 6144);
  CHECK(tokenizer->find("<|im_end|>") == 2);
  CHECK(tokenizer->ends_turn(2));
  CHECK(!tokenizer->add_bos());
  CHECK(!tokenizer->strips_leading_space());
}
