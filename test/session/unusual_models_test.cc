// Files that no converter writes, but whose metadata is legal: they run, or are refused by name.
#include <fstream>
#include <string>

#include "kvasir.h"
#include "made_model.h"
#include "sequence_helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::string saved(const MadeModel& model, const TempFolder& folder) {
  std::string path = folder.file("a.gguf");
  const std::vector<std::byte> bytes = model.build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

ModelRecipe qwen35(uint32_t interval) {
  ModelRecipe recipe;
  recipe.architecture = "qwen35";
  recipe.context = 2048;
  recipe.more_keys = [interval](GgufBuilder* b, const std::string& at) {
    b->key(at + "ssm.conv_kernel", uint32_t{4}).key(at + "ssm.inner_size", uint32_t{64});
    b->key(at + "ssm.state_size", uint32_t{16}).key(at + "ssm.time_step_rank", uint32_t{4});
    b->key(at + "ssm.group_count", uint32_t{2}).key(at + "full_attention_interval", interval);
  };
  return recipe;
}

}  // namespace

TEST_CASE(
    "a model of recurrent layers may have none: it has no states, and goes back for nothing") {
  TempFolder folder;
  const auto model = open_model(saved(make_model(qwen35(1)), folder));
  CHECK(model->config().recurrent_layers == 0);
  CHECK(make_model(qwen35(2)).config.recurrent_layers == 1);
  SessionOptions options;
  options.prefill_chunk = 64, options.checkpoint_interval = 64;
  const auto session = open_session(model, options);
  read(session.get(), some_tokens(300));
  (void)continue_with(session.get(), 3);
  CHECK(session->stats().states_bytes == 0);
  CHECK(session->stats().checkpoints == 0);
  save(session.get(), folder.file("a.kv"));
  std::unique_ptr<Session> other;
  const Status s = Session::load(model, folder.file("a.kv"), options, true, nullptr, {}, &other);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  check_same(*session, *other);
  for (Session* each : {session.get(), other.get()}) REQUIRE(each->rewind(150).ok());
  check_same(*session, *other);
  CHECK(again(*session) == 0);
  kv_file_info info;
  kv_init(&info, sizeof info);
  REQUIRE(kv_file_inspect(folder.file("a.kv").c_str(), &info, nullptr) == KV_OK);
  CHECK(info.recurrent_layers == 0);
  CHECK(info.states == 0);
}

TEST_CASE("a window of an architecture without windows is refused by name, unless all fits in it") {
  TempFolder folder;
  ModelRecipe recipe;
  recipe.architecture = "lfm2";
  recipe.layer_kv_heads = {2, 0};
  recipe.more_keys = [&](GgufBuilder* b, const std::string& at) {
    b->key(at + "shortconv.l_cache", uint32_t{3});
  };
  for (const uint32_t window : {16u, 511u, 512u}) {
    CAPTURE(window);
    MadeModel made = make_model(recipe);  // of 512 tokens
    made.keys.key("lfm2.attention.sliding_window", window);
    std::shared_ptr<const Model> model;
    const Status s = Model::open(saved(made, folder), "", &model);
    const std::string message = s.message();
    CHECK_MESSAGE(s.code() == (window < 512 ? Code::unsupported : Code::ok), message);
    const std::string named = "sliding window of " + std::to_string(window) + " tokens";
    if (window == 512) continue;
    CHECK_MESSAGE(message.find(named) != std::string::npos, message);
    CHECK_MESSAGE(message.find("use a file without it") != std::string::npos, message);
  }
}
