// kvasir tokenize and kvasir logits.
#include <algorithm>

#include "commands.h"
#include "failure.h"
#include "files.h"
#include "kvasir_experimental.h"
#include "number_text.h"
#include "output.h"
#include "sessions.h"

namespace tool {
namespace {

std::vector<int32_t> read_token_ids(const std::string& path) {
  const std::string text = read_file(path);
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    return json.get<std::vector<int32_t>>();
  } catch (const nlohmann::json::exception&) {
    throw Failure(exit_file, path + " is not a JSON array of token ids");
  }
}

}  // namespace

void run_tokenize(Console& console, const TokenizeArguments& arguments) {
  ModelFlags vocabulary = arguments.model;
  vocabulary.vocabulary_only = true;
  const Model model = open_model(console, vocabulary);
  const uint32_t flags =
      (arguments.special ? KV_TOKENIZE_SPECIAL : 0u) | (arguments.bos ? KV_TOKENIZE_BOS : 0u);
  const std::vector<int32_t> tokens = tokenize(model.get(), read_file(arguments.file), flags);
  console.result = {{"file", arguments.file}, {"tokens", tokens}};
  if (!console.json) console.terminal.print(Json(tokens).dump() + "\n");
}

void run_logits(Console& console, const LogitsArguments& arguments) {
  constexpr size_t slice = 512;  // tokens per call, which bounds the memory of their logits
  expect_unused(arguments.output, arguments.force);
  const std::vector<int32_t> tokens = read_token_ids(arguments.tokens);
  if (tokens.empty()) throw Failure(exit_file, arguments.tokens + " has no tokens");
  const Model model = open_model(console, arguments.model);
  kv_error error{};
  const kv_model_info info = info_of(model.get());
  const Session session = open_session(console, model.get(), arguments.session);
  NewFile output(arguments.output);
  // [slice][vocabulary]
  std::vector<float> logits(std::min(slice, tokens.size()) * info.vocabulary);
  Progress progress(console.terminal, "Prefilling " + arguments.tokens, Unit::tokens);
  const kv_control control = control_of(console);
  for (size_t at = 0; at < tokens.size(); at += slice) {
    const size_t count = std::min(slice, tokens.size() - at);
    check(kv_prefill_logits(session.get(), tokens.data() + at, count, logits.data(), &control,
                            &error),
          error);
    output.write(logits.data(), count * info.vocabulary * sizeof(float));
    Progress::callback(KV_PHASE_PREFILL, at + count, tokens.size(), &progress);
  }
  output.finish();
  console.result = {
      {"file", arguments.output}, {"tokens", tokens.size()}, {"vocabulary", info.vocabulary}};
  console.terminal.note(arguments.output + ": float32 [" + std::to_string(tokens.size()) + "][" +
                        std::to_string(info.vocabulary) + "], little endian");
}

}  // namespace tool
