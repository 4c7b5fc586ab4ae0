// What the states of recurrent layers take of a device's memory and of host memory, and what a
// prefill checks of them.
#include <fstream>
#include <string>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"
#include "made_model.h"
#include "model/gpu_expert_workspace.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::shared_ptr<const Model> on_device(const std::string& path, uint64_t budget = 0) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path, "", &model, {"cuda", budget});
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  REQUIRE(model->device_weights().back().has_output());
  return model;
}

std::shared_ptr<const Model> fixture_on_device(const char* name) {
  return on_device(FIXTURES "/models/" + std::string(name) + ".gguf");
}

// 300 tokens. In full precision the CPU attends, and a device's memory is the workspace's and the
// states'.
SessionOptions by_cpu() {
  SessionOptions o;
  o.threads = 1;
  o.select.strategy = "full";
  o.full_precision = true;
  o.prefill_chunk = 256;
  return o;
}

std::string saved(const MadeModel& model, const TempFolder& folder) {
  std::string path = folder.file("made.gguf");
  const std::vector<std::byte> bytes = model.build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

// 27 layers whose states take more than a workspace, and one that attends.
ModelRecipe large_states() {
  ModelRecipe recipe;
  recipe.architecture = "qwen35";
  recipe.layers = 28;
  recipe.width = 128, recipe.heads = 2, recipe.kv_heads = 1, recipe.head_dim = 64;
  recipe.context = 4096;
  recipe.more_keys = [](GgufBuilder* b, const std::string& at) {
    b->key(at + "ssm.conv_kernel", uint32_t{4}).key(at + "ssm.inner_size", uint32_t{256});
    b->key(at + "ssm.state_size", uint32_t{128}).key(at + "ssm.time_step_rank", uint32_t{2});
    b->key(at + "ssm.group_count", uint32_t{1}).key(at + "full_attention_interval", uint32_t{28});
  };
  return recipe;
}

// An attention layer, then a short convolution.
ModelRecipe convolution_last() {
  ModelRecipe recipe;
  recipe.architecture = "lfm2";
  recipe.width = 128, recipe.heads = 2, recipe.layer_kv_heads = {1, 0}, recipe.head_dim = 64;
  recipe.more_keys = [](GgufBuilder* b, const std::string& at) {
    b->key(at + "shortconv.l_cache", uint32_t{3});
  };
  return recipe;
}

}  // namespace

TEST_CASE("a prefill finds NaN in a convolution that is its last layer, in every chunk") {
  const TempFolder folder;
  MadeModel made = make_model(convolution_last());
  const std::vector<Token> tokens = some_tokens(256);
  for (const bool bad : {false, true}) {
    CAPTURE(bad);
    MadeTensor* weights = made.find("blk.1.shortconv.conv.weight");
    REQUIRE(weights);
    const float value = 3e38f;
    for (std::size_t at = 0; bad && at < weights->bytes.size(); at += sizeof value)
      std::memcpy(&weights->bytes[at], &value, sizeof value);
    SessionOptions options;
    options.threads = 1, options.prefill_chunk = 128, options.select.strategy = "full";
    const auto session = open_session(on_device(saved(made, folder)), options);
    uint64_t done = 7;
    const Status s = session->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
    CHECK_MESSAGE(s.code() == (bad ? Code::corrupt : Code::ok), std::string(s.message()));
    CHECK(done == (bad ? 0 : 256));
    if (bad) CHECK(std::string(s.message()).find("layer 1 made NaN") == 0);
    else CHECK(says(*session, "GPU copy"));
  }
}

TEST_CASE("a fork's state costs the sequence one more state, whichever of the two it is") {
  const auto model = fixture_on_device("qwen35");
  const auto calls_of_steps = [&](int before, bool forks) {
    const auto session = open_session(model, by_cpu());
    read(session.get(), some_tokens(300));
    (void)continue_with(session.get(), 2 + before);
    std::unique_ptr<Session> fork;
    if (forks) REQUIRE(session->fork(&fork).ok());
    const uint64_t first = emulated::machine().calls;
    (void)continue_with(session.get(), 8);
    return emulated::machine().calls - first;
  };
  for (const int before : {0, 1})
    CHECK(calls_of_steps(before, true) == calls_of_steps(before, false) + 1);  // an allocation
}

TEST_CASE("a large workspace gives way to a state that a step needs") {
  const auto session = open_session(fixture_on_device("qwen35"), by_cpu());
  read(session.get(), some_tokens(300));
  emulated::Machine& machine = emulated::machine();
  GenerateOptions options;
  options.max_tokens = 4;
  const emulated::Changed most(machine.max_bytes[0], machine.bytes[0].load());
  std::string text;
  Answer answer;
  const Status s = session->generate(
      "?", options, [&](std::string_view t) { return text += t, 0; }, &answer);
  CHECK_MESSAGE(s.ok(), std::string(s.message()));
  CHECK(session->tokens().size() == 300);
}

TEST_CASE("hot quads use no memory that the states of a fork need") {
  constexpr uint64_t spare = uint64_t{1} << 27, step = uint64_t{1} << 19;
  const TempFolder folder;
  const std::string path = saved(make_model(large_states()), folder), file = folder.file("a.kv");
  SessionOptions options = bounded_options(200);
  {
    const auto session = open_session(on_device(path), options);
    read(session.get(), some_tokens(2000));
    REQUIRE(session->save(file, nullptr, {}).ok());
  }
  const auto model = on_device(path, on_device(path)->device_weights().front().bytes() + spare);
  const std::shared_ptr<Device>& device = model->device_weights().front().device();
  const auto attended = [](Session* of) {
    for (int i = 0; i < 3; ++i) {
      Token token = -1;
      bool end = false;
      const Status s = of->next({}, nullptr, &token, &end);
      if (s.code() == Code::no_memory) return false;
      REQUIRE(s.ok());
    }
    return attends(*of);
  };
  bool stays = false;
  for (uint64_t room = step; !stays; room += step) {
    CAPTURE(room);
    REQUIRE(room < spare);
    DeviceBuffer<std::byte> others;
    REQUIRE(others.allocate(device, device->left() - room, "others").ok());
    const auto session = load(model, file, options);
    if (!attended(session.get())) continue;
    stays = stat_of(*session, "last_tokens_on_gpu") > 0;
    if (!stays) continue;
    const ModelConfig& config = model->config();
    const uint64_t workspace =
        device_workspace_bytes(workspace_widths_of(config, model->weights()),
                               expert_widths_of(config, model->weights(), false), usual_step);
    CHECK(device->left() >=
          2 * workspace + 2 * Device::allocated_size(config.state_size() * sizeof(float)));
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    CHECK(attended(fork.get()));
    CHECK(attended(session.get()));
    CHECK(stat_of(*session, "last_tokens_on_gpu") > 0);
  }
}

TEST_CASE("states of a device take host memory where a checkpoint has them, and nowhere else") {
  SessionOptions options = by_cpu();
  options.checkpoint_interval = 1 << 20;
  const TempFolder folder;
  for (const char* name : {"qwen35", "lfm2"}) {
    CAPTURE(std::string(name));
    const auto session = open_session(fixture_on_device(name), options);
    const uint64_t state = session->model().config().state_size() * sizeof(float);
    read(session.get(), some_tokens(300));
    CHECK(session->stats().states_bytes == 0);
    (void)continue_with(session.get(), 3);  // behind a checkpoint at the document's end
    CHECK(session->stats().states_bytes == state);
    const std::vector<Token> text(session->tokens().begin(), session->tokens().end());
    const std::vector<float> expected = logits_after(session.get(), 9);
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    REQUIRE(session->rewind(300).ok());
    read(session.get(), std::span<const Token>(text).subspan(300));
    CHECK(logits_after(session.get(), 9) == expected);
    const auto other = load(fixture_on_device(name), folder.file("a.kv"), options);
    REQUIRE(other->rewind(300).ok());
    read(other.get(), std::span<const Token>(text).subspan(300));
    CHECK(logits_after(other.get(), 9) == expected);
  }
}
