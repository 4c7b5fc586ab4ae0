// Damaged weights make NaN or infinity: the step that makes them fails, and they are never stored
// in a sequence or a file.
#include <cmath>
#include <cstring>

#include "helpers.h"
#include "temp_folder.h"
#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::shared_ptr<const Model> model_with(const std::map<std::string, float>& filled,
                                        const std::map<std::string, float>& scales = {}) {
  const TestVocabulary vocabulary = byte_vocabulary();
  GgufBuilder file = bpe_file(vocabulary);
  for (const auto& [name, value] : scales) {
    std::vector<std::byte> bytes(sizeof value);
    std::memcpy(bytes.data(), &value, sizeof value);
    file.tensor(name, {1}, TensorType::f32, std::move(bytes));
  }
  return model_over(std::move(file), static_cast<uint32_t>(vocabulary.tokens.size()), "raw",
                    filled);
}

}  // namespace

TEST_CASE(
    "a weight that is NaN or infinity fails the step that uses it, and the sequence stays as it "
    "was") {
  const float nan = std::nanf(""), infinity = INFINITY;
  const std::map<std::string, float> damages[] = {
      {{"token_embd.weight", nan}},
      {{"token_embd.weight", -infinity}},
      {{"blk.0.attn_q.weight", nan}},
      {{"blk.0.attn_k.weight", nan}},
      {{"blk.0.attn_v.weight", nan}},
      {{"blk.0.attn_output.weight", infinity}},
      {{"blk.0.ffn_gate.weight", nan}},
      {{"blk.0.ffn_up.weight", infinity}},
      {{"blk.0.ffn_down.weight", nan}},
      {{"output.weight", nan}},
      {{"output.weight", infinity}},
      // Finite, but what they make is not, or would not be once it is centred.
      {{"token_embd.weight", 1}, {"blk.0.attn_norm.weight", 1e30f}, {"blk.0.attn_v.weight", 1e30f}},
      {{"token_embd.weight", 1}, {"blk.0.attn_norm.weight", 1}, {"blk.0.attn_k.weight", 1e37f}}};
  for (const auto& damage : damages) {
    CAPTURE(damage.rbegin()->first);
    const auto session = open_session(model_with(damage));
    const std::vector<Token> tokens(200, 'a');
    uint64_t done = 7;
    const Status s = session->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
    CHECK(s.code() == Code::corrupt);
    CHECK(std::string(s.message()).find("NaN or infinity") != std::string::npos);
    CHECK(done == 0);
    CHECK(session->tokens().empty());
    Answer answer;
    CHECK(session->generate("a", {}, {}, &answer).code() == Code::corrupt);
    CHECK(session->tokens().empty());
  }
}

TEST_CASE("a second scale of a matrix multiplies its products") {
  const std::map<std::string, float> weights = {
      {"token_embd.weight", 1},        {"output_norm.weight", 1},
      {"output.weight", 0.5f},         {"blk.0.ffn_norm.weight", 1},
      {"blk.0.ffn_gate.weight", 0.1f}, {"blk.0.ffn_up.weight", 0.1f},
      {"blk.0.ffn_down.weight", 0.1f}};
  std::map<std::string, float> products = weights;
  for (const char* name : {"output.weight", "blk.0.ffn_down.weight"}) products[name] *= 0.25f;
  const auto session =
      open_session(model_with(weights, {{"output.scale", 0.25f}, {"blk.0.ffn_down.scale", 0.25f}}));
  const auto expected = open_session(model_with(products));
  CHECK(logits_after(session.get(), 'a') == logits_after(expected.get(), 'a'));
  const auto unscaled = open_session(model_with(weights));
  CHECK(logits_after(unscaled.get(), 'a') != logits_after(expected.get(), 'a'));
}

TEST_CASE("a sequence after a step that was refused can be saved and loaded") {
  // The output alone is damaged: prefill succeeds until logits are computed.
  const auto model = model_with({{"output.weight", std::nanf("")}});
  SessionOptions o;
  o.prefill_chunk = 100;
  const auto session = open_session(model, o);
  const std::vector<Token> tokens(250, 'a');
  uint64_t done = 0;
  CHECK(session->prefill_tokens(tokens, nullptr, nullptr, {}, &done).code() == Code::corrupt);
  CHECK(done == 200);
  TempFolder folder;
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  std::unique_ptr<Session> loaded;
  REQUIRE(Session::load(model, folder.file("a.kv"), o, true, nullptr, {}, &loaded).ok());
  CHECK(loaded->tokens().size() == 200);
}

TEST_CASE("a model of zeros is as good as any") {
  const auto session = open_session(model_with({}));
  read(session.get(), std::vector<Token>(200, 'a'));
  CHECK(continue_with(session.get(), 3) == std::vector<Token>{0, 0, 0});
}
