// Recurrent layers on devices whose calls fail or whose memory ends, and on several of them.
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "../gguf/gguf_builder.h"
#include "../session/device_helpers.h"
#include "../text/test_vocabulary.h"
#include "emulated.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr std::size_t state_length = 200;
constexpr double state_tolerance = 1e-3;

SessionOptions one_thread() {
  SessionOptions o;
  o.threads = 1;
  o.select.strategy = "full";
  o.full_precision = true;
  o.prefill_chunk = 64;
  return o;
}

std::string path_of(const char* name) { return FIXTURES "/models/" + std::string(name) + ".gguf"; }

std::unique_ptr<Session> open_states(const char* name, const char* device) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path_of(name), "", &model, {device, 0});
  REQUIRE_MESSAGE(s.ok(), s.message());
  auto session = open_session(model, one_thread());
  read(session.get(), some_tokens(state_length));
  return session;
}

// A model of nemotron_h: layers with attention alone, or with states of `rows` rows where rows > 0.
class SingleBlocks {
 public:
  explicit SingleBlocks(uint32_t rows) : file_(bpe_file(byte_vocabulary())) {
    file_.key("general.architecture", "nemotron_h").key("general.name", "blocks");
    key("block_count", layers), key("embedding_length", width), key("context_length", 4096u);
    key("feed_forward_length", std::vector<int32_t>(layers, 0));
    key("attention.head_count", 2u), key("attention.layer_norm_rms_epsilon", 1e-5f);
    key("attention.head_count_kv", std::vector<int32_t>{rows > 0 ? 0 : 2, 2});
    key("attention.key_length", 32u), key("attention.value_length", 32u);
    key("ssm.conv_kernel", 4u), key("ssm.state_size", rows > 0 ? rows : 16u);
    key("ssm.group_count", 1u), key("ssm.inner_size", inner), key("ssm.time_step_rank", 2u);
    tensor("token_embd.weight", {width, 256}), tensor("output_norm.weight", {width}, 1);
    for (uint32_t l = 0; l < layers; ++l) {
      const std::string at = "blk." + std::to_string(l) + ".";
      tensor(at + "attn_norm.weight", {width}, 1);
      if (l == 0 && rows > 0) {
        states(at, rows);
        continue;
      }
      for (const char* name : {"attn_q.weight", "attn_k.weight", "attn_v.weight"})
        tensor(at + name, {width, 64});
      tensor(at + "attn_output.weight", {64, width});
    }
  }
  std::string save(const TempFolder& folder) const {
    std::string path = folder.file("blocks.gguf");
    const std::vector<std::byte> bytes = file_.build();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path;
  }

 private:
  static constexpr uint32_t layers = 2, width = 64, inner = 32;

  template <class T>
  void key(const std::string& name, const T& value) {
    file_.key("nemotron_h." + name, value);
  }
  void states(const std::string& at, uint32_t rows) {
    const uint64_t channels = inner + 2 * rows;
    tensor(at + "ssm_in.weight", {width, inner + channels + 2});
    tensor(at + "ssm_conv1d.weight", {4, channels}), tensor(at + "ssm_conv1d.bias", {channels});
    tensor(at + "ssm_dt.bias", {2}), tensor(at + "ssm_a", {1, 2}, -1);
    tensor(at + "ssm_d", {1, 2}), tensor(at + "ssm_norm.weight", {inner, 1}, 1);
    tensor(at + "ssm_out.weight", {inner, width});
  }
  void tensor(const std::string& name, std::vector<uint64_t> dims, float mean = 0) {
    uint64_t count = 1;
    for (const uint64_t n : dims) count *= n;
    const float scale = mean != 0 ? 0.2f : 1 / std::sqrt(static_cast<float>(dims[0]));
    std::vector<std::byte> contents;
    for (uint64_t i = 0; i < count; ++i) {
      state_ = state_ * 1664525u + 1013904223u;
      append(&contents, mean + scale * (static_cast<float>(state_ >> 16) / 32768.0f - 1.0f));
    }
    file_.tensor(name, std::move(dims), TensorType::f32, std::move(contents));
  }

  GgufBuilder file_;
  uint32_t state_ = 3;
};

}  // namespace

TEST_CASE("a step that fails or is cancelled on a device leaves the states as they were") {
  const auto tokens = some_tokens(state_length + 90);
  for (const char* name : {"qwen35", "lfm2", "falcon-h1"}) {
    CAPTURE(std::string(name));
    const auto gpu = open_states(name, "cuda");
    std::unique_ptr<Session> control;
    REQUIRE(gpu->fork(&control).ok());
    const std::vector<float> expected = logits_after(control.get(), 9);
    uint32_t failures = 0;
    for (const int error : {emulated::refused, emulated::out_of_memory, 0})
      for (const std::size_t n : {1u, 90u}) {
        bool reached = true;
        for (uint64_t call = 1; reached; call += 1 + call / 6) {
          std::unique_ptr<Session> fork;
          REQUIRE(gpu->fork(&fork).ok());
          emulated::Machine& machine = emulated::machine();
          Cancel cancel;
          emulated::Changed fired(machine.fires, &cancel);
          emulated::Changed with(machine.fails_with, error);
          emulated::Changed at(machine.fails_at, machine.calls + call);
          uint64_t done = 0;
          const bool fails =
              !fork->prefill_tokens({tokens.data() + state_length, n}, nullptr, &cancel, {}, &done)
                   .ok();
          reached = machine.calls >= machine.fails_at;
          machine.fails_at = 0;
          failures += fails;
          if (!fails) continue;
          // From where it stopped, as if nothing had failed.
          REQUIRE(fork->tokens().size() == state_length + done);
          std::unique_ptr<Session> undisturbed;
          REQUIRE(gpu->fork(&undisturbed).ok());
          if (done > 0) read(undisturbed.get(), {tokens.data() + state_length, done});
          CHECK(logits_after(fork.get(), 9) == logits_after(undisturbed.get(), 9));
        }
      }
    CHECK(failures > 12);
    CHECK(logits_after(gpu.get(), 9) == expected);
  }
}

TEST_CASE("recurrent layers are on several devices, or on one and the CPU") {
  const auto tokens = some_tokens(state_length);
  for (const char* name : {"qwen35", "granitehybrid", "falcon-h1", "nemotron_h_moe"}) {
    CAPTURE(std::string(name));
    const auto cpu = open_states(name, "cpu");
    const std::vector<float> expected = logits_after(cpu.get(), 9);
    const TempFolder folder;
    std::size_t splits = 0;
    for (const char* devices : {"cuda:0,cuda:1,cuda:2", "cuda:0"}) {
      const auto open = [&](uint64_t budget, std::shared_ptr<const Model>* model) {
        const Status s = Model::open(path_of(name), "", model, {devices, budget});
        CHECK((s.ok() || s.code() == Code::no_memory));
        return s.ok();
      };
      // From the smallest budget with which a device has a layer on.
      uint64_t little = 0, enough = uint64_t{1} << 28;
      for (std::shared_ptr<const Model> model; enough - little > 4096;)
        (open((little + enough) / 2, &model) ? enough : little) = (little + enough) / 2;
      std::vector<uint32_t> seen;
      for (uint64_t budget = enough; budget < enough + (uint64_t{2} << 20); budget += 32768) {
        std::shared_ptr<const Model> model;
        if (!open(budget, &model)) continue;
        std::vector<uint32_t> layers;
        for (const DeviceWeights& weights : model->device_weights())
          layers.push_back(weights.end_layer());
        if (layers == seen) continue;
        seen = layers;
        auto session = open_session(model, one_thread());
        uint64_t done = 0;
        const Status s = session->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
        if (s.code() == Code::no_memory) continue;  // only the weights had room
        REQUIRE_MESSAGE(s.ok(), s.message());
        std::unique_ptr<Session> fork;
        REQUIRE(session->fork(&fork).ok());
        CHECK(difference(logits_after(session.get(), 9), expected) < state_tolerance);
        CHECK(logits_after(fork.get(), 9).size() == expected.size());
        REQUIRE(session->rewind(state_length).ok());
        REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
        const auto loaded = load(model, folder.file("a.kv"), one_thread());
        CHECK(difference(logits_after(loaded.get(), 9), expected) < state_tolerance);
        ++splits;
      }
    }
    CHECK(splits > 2);
  }
}

TEST_CASE("decode copies no state over the bus") {
  const auto gpu = open_states("qwen35", "cuda");
  const std::size_t state = gpu->model().config().state_size() * sizeof(float);
  (void)logits_after(gpu.get(), 9);
  const uint64_t before = emulated::machine().uploaded[0] + emulated::machine().uploaded_beside[0];
  for (int i = 0; i < 8; ++i) (void)logits_after(gpu.get(), 9);
  const uint64_t after = emulated::machine().uploaded[0] + emulated::machine().uploaded_beside[0];
  CHECK(after - before < state);
}

TEST_CASE("what GPUs do not compute is refused by name") {
  for (const auto& [name, part] :
       {std::pair("deepseek2-lite", "latent attention"), std::pair("minicpm3", "latent attention"),
        std::pair("gemma3n", "several streams of a token")}) {
    CAPTURE(std::string(name));
    std::shared_ptr<const Model> model;
    const Status s = Model::open(path_of(name), "", &model, {"cuda", 0});
    CHECK(s.code() == Code::unsupported);
    CHECK(std::string(s.message()).find(part) != std::string::npos);
    REQUIRE(Model::open(path_of(name), "", &model, {"auto", 0}).ok());
    CHECK(model->device_weights().empty());
  }
}

TEST_CASE("layers of attention alone, and states of up to 256 rows, are on a GPU") {
  const TempFolder folder;
  const auto tokens = some_tokens(state_length);
  for (const uint32_t rows : {0u, 1u, 100u, 256u}) {
    CAPTURE(rows);
    const std::string path = SingleBlocks(rows).save(folder);
    std::vector<float> logits[2];
    for (const bool on_gpu : {false, true}) {
      std::shared_ptr<const Model> model;
      const Status s = Model::open(path, "", &model, {on_gpu ? "cuda" : "cpu", 0});
      REQUIRE_MESSAGE(s.ok(), s.message());
      CHECK(model->device_weights().empty() != on_gpu);
      auto session = open_session(model, one_thread());
      read(session.get(), tokens);
      logits[on_gpu] = logits_after(session.get(), 9);
    }
    CHECK(difference(logits[1], logits[0]) < state_tolerance);
  }
  std::shared_ptr<const Model> model;
  const std::string path = SingleBlocks(257).save(folder);
  const Status s = Model::open(path, "", &model, {"cuda", 0});
  CHECK(s.code() == Code::unsupported);
  CHECK(std::string(s.message()).find("states of more than 256 rows") != std::string::npos);
  CHECK(std::string(s.message()).find("use the device 'auto' or 'cpu'") != std::string::npos);
  for (const char* device : {"auto", "cpu"}) {
    REQUIRE(Model::open(path, "", &model, {device, 0}).ok());
    CHECK(model->device_weights().empty());
  }
}
