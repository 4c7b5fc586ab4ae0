// Writes the golden document of the current format: write-golden MODEL FOLDER, with MODEL
// test/fixtures/models/llama-q8_0.gguf, writes FOLDER/format-N.kvz and prints what belongs into
// test/api/golden_test.cc. Run it once for each new format version, and never again: the files show
// that what older libraries wrote is still read.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../api/golden_tokens.h"
#include "kvasir.h"

namespace {

kv_error error;

void check(kv_status status) {
  if (status == KV_OK) return;
  std::fprintf(stderr, "%s\n", error.message);
  std::exit(1);
}

}  // namespace

int main(int count, char** values) {
  if (count != 3) return 2;
  kv_model* model = nullptr;
  check(kv_open(values[1], nullptr, nullptr, &model, &error));
  kv_session* session = nullptr;
  const kv_session_options options = golden::options("quest");
  check(kv_session_open(model, &options, &session, &error));
  const std::vector<int32_t> tokens = golden::tokens();
  check(kv_prefill_tokens(session, tokens.data(), tokens.size(), nullptr, nullptr, &error));
  // the file also holds the data of this strategy
  check(kv_session_set_strategy(session, strategies::strategy("bounded"), &error));
  check(kv_session_prepare(session, nullptr, &error));
  check(kv_session_set_strategy(session, strategies::budgeted("quest", golden::budget_tokens),
                                &error));
  const std::string plain = values[2] + std::string("/golden.kv");
  check(kv_save(session, plain.c_str(), nullptr, &error));
  kv_file_info info{};
  info.struct_size = sizeof info;
  check(kv_file_inspect(plain.c_str(), &info, &error));
  const std::string packed =
      values[2] + std::string("/format-") + std::to_string(info.format_version) + ".kvz";
  check(kv_pack(plain.c_str(), packed.c_str(), 19, nullptr, &error));
  std::remove(plain.c_str());
  const std::vector<int32_t> next = golden::tokens(golden::continued_tokens, 12);
  std::vector<float> log_probabilities(next.size());
  check(kv_session_score(session, next.data(), next.size(), log_probabilities.data(), nullptr,
                         &error));
  std::printf("    {\"format-%u.kvz\", %u, {", info.format_version, info.format_version);
  for (std::size_t i = 0; i < next.size(); ++i)
    std::printf("%s%.4ff", i > 0 ? ", " : "", static_cast<double>(log_probabilities[i]));
  std::printf("}},\n");
  kv_session_close(session);
  kv_close(model);
  return 0;
}
