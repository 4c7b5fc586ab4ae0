// A model file opened for its vocabulary alone, and files that have nothing else.
#include <fstream>

#include "gguf/gguf_builder.h"
#include "helpers.h"
#include "temp_folder.h"
#include "text/test_vocabulary.h"

using namespace api_test;

namespace {

const std::string gemma4_path = FIXTURES "/tokenizers/gemma4.gguf";

kv_status try_open(const char* path, kv_model_options options, Model* out = nullptr) {
  kv_model* model = nullptr;
  const kv_status status = kv_open(path, &options, nullptr, &model, nullptr);
  CHECK((model != nullptr) == (status == KV_OK));
  Model owned(model);
  if (out) *out = std::move(owned);
  return status;
}

kv_model_options vocabulary_only() {
  kv_model_options o;
  kv_init(&o, sizeof o);
  o.flags = KV_VOCABULARY_ONLY;
  return o;
}

kv_model_info info_of(kv_model* model) {
  kv_model_info info;
  kv_init(&info, sizeof info);
  REQUIRE_OK(kv_model_get_info(model, &info, error));
  return info;
}

std::vector<int32_t> ids_of(const kv_model* model, const std::string& text) {
  std::vector<int32_t> ids(text.size() + 1);
  std::size_t count = 0;
  REQUIRE_OK(kv_tokenize(model, text.data(), text.size(), KV_TOKENIZE_SPECIAL, nullptr, ids.data(),
                         ids.size(), &count, error));
  ids.resize(count);
  return ids;
}

}  // namespace

TEST_CASE("a vocabulary without tensors is opened, described and tokenizes") {
  Model model;
  REQUIRE(try_open(gemma4_path.c_str(), vocabulary_only(), &model) == KV_OK);
  const std::vector<int32_t> ids = ids_of(model.get(), "a few words\n");
  std::string text(64, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_detokenize(model.get(), ids.data(), ids.size(), 0, text.data(), text.size(), &size,
                           error));
  CHECK(text.substr(0, size) == "a few words\n");
  const kv_model_info info = info_of(model.get());
  CHECK(std::string(info.architecture) == "gemma4");
  CHECK(std::string(info.tokenizer) == "gemma4");
  CHECK(info.vocabulary == 2200);
  CHECK(info.layers == 0);
  CHECK(info.kv_bytes_per_token == 0);
  kv_model_info inspected;
  kv_init(&inspected, sizeof inspected);
  REQUIRE_OK(kv_model_inspect(gemma4_path.c_str(), &inspected, error));
  CHECK(inspected.vocabulary == 2200);
  CHECK(std::string(inspected.fingerprint) == info.fingerprint);
}

TEST_CASE("a vocabulary without tensors is no model without the flag") {
  kv_model_options o;
  kv_init(&o, sizeof o);
  CHECK(try_open(gemma4_path.c_str(), o) != KV_OK);
}

TEST_CASE("an unknown architecture and missing hyper-parameters do not matter to a vocabulary") {
  const TempFolder folder;
  const std::string path = folder.file("a.gguf");
  const std::vector<std::byte> bytes = kvasir::test::bpe_file(kvasir::test::byte_vocabulary())
                                           .key("general.architecture", "x")
                                           .build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  Model model;
  REQUIRE(try_open(path.c_str(), vocabulary_only(), &model) == KV_OK);
  CHECK(ids_of(model.get(), "ab") == std::vector<int32_t>{'a', 'b'});
  CHECK(std::string(info_of(model.get()).architecture) == "x");
}

TEST_CASE(
    "a model opened for its vocabulary tokenizes as the whole model, and refuses other work") {
  Model model;
  REQUIRE(try_open(mini_path, vocabulary_only(), &model) == KV_OK);
  const std::string text = "Who is Irene Adler?<|im_end|>";
  CHECK(ids_of(model.get(), text) == ids_of(mini_model(), text));
  CHECK(std::string(info_of(model.get()).chat_format) == "chatml");
  CHECK(std::string(info_of(model.get()).fingerprint) == info_of(mini_model()).fingerprint);
  kv_session* session = nullptr;
  CHECK(kv_session_open(model.get(), nullptr, &session, nullptr) == KV_BAD_STATE);
  CHECK(kv_load(model.get(), "none.kv", nullptr, nullptr, &session, nullptr) == KV_BAD_STATE);
  CHECK(kv_model_hash(model.get(), nullptr, nullptr) == KV_BAD_STATE);
  CHECK(session == nullptr);
}

TEST_CASE("devices, hashes and room for drafts are no options of a vocabulary") {
  kv_model_options o = vocabulary_only();
  o.device = "cpu";
  CHECK(try_open(mini_path, o) == KV_BAD_ARGUMENT);
  o = vocabulary_only();
  o.hash_directory = ".";
  CHECK(try_open(mini_path, o) == KV_BAD_ARGUMENT);
  o = vocabulary_only();
  o.flags |= KV_PLAN_DRAFTS;
  CHECK(try_open(mini_path, o) == KV_BAD_ARGUMENT);
  o = vocabulary_only();
  o.chat_format = "llama3";
  Model model;
  REQUIRE(try_open(mini_path, o, &model) == KV_OK);
  CHECK(std::string(info_of(model.get()).chat_format) == "llama3");
}
