// Experts on emulated GPUs: every architecture that has them, the graphs of a step, memory that is
// less than planned, and calls that fail.
#include <algorithm>
#include <fstream>
#include <set>

#include "../session/device_helpers.h"
#include "emulated.h"
#include "made_model.h"

using namespace kvasir;
using namespace kvasir::test;
using emulated::Changed;
using emulated::machine;

namespace {

constexpr const char* qwen3moe = FIXTURES "/models/qwen3moe.gguf";

std::string write_model(const TempFolder& folder, const ModelRecipe& recipe) {
  std::string path = folder.file(recipe.architecture + ".gguf");
  const std::vector<std::byte> bytes = make_model(recipe).build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

std::vector<Token> counted_tokens(std::size_t n) {
  std::vector<Token> out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<Token>(i * 37 % 251);
  return out;
}

// Of a prefill, and of tokens one at a time after it.
std::vector<std::vector<float>> logits_of(const std::shared_ptr<const Model>& model) {
  std::vector<std::vector<float>> out;
  auto session = open_session(model, bounded_options(128));
  read(session.get(), counted_tokens(90));
  for (Token t = 5; t < 9; ++t) out.push_back(logits_after(session.get(), t));
  return out;
}

// The model on a GPU, null where it computes no such model. least: with as little memory as all
// layers and the output need.
std::shared_ptr<const Model> experts_on_gpu(const std::string& path, bool least) {
  std::shared_ptr<const Model> model;
  Status s = Model::open(path, "", &model, {.name = "cuda"});
  if (s.code() == Code::unsupported) return nullptr;
  REQUIRE_MESSAGE(s.ok(), s.message());
  if (!least) return model;
  const uint64_t all = model->device_weights()[0].bytes();
  constexpr uint64_t step = uint64_t{1} << 16;
  for (uint64_t budget = step;; budget += std::max(step, all / 64)) {
    s = Model::open(path, "", &model, {.name = "cuda", .budget = budget});
    if (s.ok() && model->device_weights()[0].has_output()) return model;
    REQUIRE((s.ok() || s.code() == Code::no_memory));
  }
}

uint32_t layers_with_experts(const Model& model) {
  uint32_t n = 0;
  for (const LayerConfig& c : model.config().layer_configs) n += c.has_experts();
  return n;
}

}  // namespace

TEST_CASE("a GPU computes the experts of every architecture as the CPU does, where it runs it") {
  TempFolder folder;
  uint32_t compared = 0;
  for (const ModelRecipe& recipe : recipes_of_all_architectures()) {
    ModelRecipe r = recipe;
    if (r.architecture == "llama") r.experts = 8, r.used = 2, r.expert_width = 64;  // Mixtral
    if (r.experts == 0) continue;
    CAPTURE(r.architecture);
    const std::string path = write_model(folder, r);
    const auto expected = logits_of(open_model(path));
    for (const bool least : {false, true}) {
      CAPTURE(least);
      const auto gpu = experts_on_gpu(path, least);
      if (!gpu) continue;
      if (!least) CHECK(gpu->device_weights()[0].expert_layers() == layers_with_experts(*gpu));
      const auto made = logits_of(gpu);
      for (std::size_t i = 0; i < made.size(); ++i) CHECK(difference(made[i], expected[i]) < 1e-2);
      ++compared;
    }
  }
  CHECK(compared >= 12);
}

TEST_CASE("a token of a mixture of experts is two graphs of a GPU that has the experts") {
  TempFolder folder;
  ModelRecipe recipe;
  recipe.architecture = "qwen2moe", recipe.experts = 8, recipe.used = 2, recipe.expert_width = 64;
  recipe.shared_width = 96, recipe.head_dim = 64, recipe.heads = 2, recipe.kv_heads = 1;
  const std::string path = write_model(folder, recipe);
  auto cpu = open_session(open_model(path), bounded_options(128));
  read(cpu.get(), counted_tokens(300));
  (void)continue_with(cpu.get(), 5);
  const std::vector<float> expected = logits_after(cpu.get(), 9);
  for (const bool here : {true, false}) {
    CAPTURE(here);
    const auto model = experts_on_gpu(path, !here);
    REQUIRE(model);
    if (!here && model->device_weights()[0].expert_layers() > 0) continue;
    auto session = open_session(model, bounded_options(128));
    read(session.get(), counted_tokens(300));
    const uint64_t before = machine().graphs;
    const auto uploaded = [] { return machine().uploaded[0] + machine().uploaded_beside[0]; };
    uint64_t fewest = UINT64_MAX;  // bytes outside the graph; a token that seals a page has more
    for (int i = 0; i < 5; ++i) {
      const uint64_t uploaded_before = uploaded();
      (void)continue_with(session.get(), 1);
      fewest = std::min(fewest, uploaded() - uploaded_before);
      CHECK(attends(*session));
      CHECK(machine().graphs - before == (here ? 2 : 0));  // layers, output
    }
    CHECK((fewest == 0) == here);
    CHECK(difference(logits_after(session.get(), 9), expected) < 1e-2);
  }
}

TEST_CASE(
    "with less memory than planned, the experts of fewer layers are on a GPU, which is said") {
  const auto expected = logits_of(open_model(qwen3moe));
  uint64_t held = 0;
  {
    const auto all = experts_on_gpu(qwen3moe, false);
    REQUIRE(all->device_weights()[0].expert_layers() == layers_with_experts(*all));
    held = machine().bytes[0];
  }
  const uint64_t weights = held - machine().bytes[0];
  held += uint64_t{32} << 20;  // what weights come through
  std::set<uint32_t> seen;
  for (uint64_t less = 0; less < weights; less += uint64_t{1} << 14) {
    std::shared_ptr<const Model> model;
    {
      const Changed limit(machine().max_bytes[0], held - less);
      if (!Model::open(qwen3moe, "", &model, {.name = "cuda"}).ok()) break;
    }
    const DeviceWeights& d = model->device_weights()[0];
    if (d.layers().size() < model->config().depth()) break;
    if (!seen.insert(d.expert_layers()).second) continue;
    CAPTURE(d.expert_layers());
    auto session = open_session(model, bounded_options(128));
    read(session.get(), counted_tokens(3));
    const bool on_cpu = session->stats_json().find(", experts cpu") != std::string::npos;
    CHECK(on_cpu == (d.expert_layers() < layers_with_experts(*model)));
    CHECK(difference(logits_of(model)[3], expected[3]) < 1e-2);
  }
  CHECK(seen.size() >= 2);
}

TEST_CASE("any call that fails while a mixture of experts is opened or run is an error") {
  const auto run = [](std::shared_ptr<const Model>* model) {
    RETURN_IF_ERROR(Model::open(qwen3moe, "", model, {.name = "cuda"}));
    std::unique_ptr<Session> session;
    RETURN_IF_ERROR(Session::open(*model, bounded_options(128), &session));
    uint64_t done = 0;
    RETURN_IF_ERROR(session->prefill_tokens(counted_tokens(80), nullptr, nullptr, {}, &done));
    Token token = 0;
    bool end = false;
    return session->next({}, nullptr, &token, &end);
  };
  const uint64_t held = machine().held;
  uint64_t calls = machine().calls;
  {
    std::shared_ptr<const Model> model;
    REQUIRE(run(&model).ok());
  }
  calls = machine().calls - calls;
  uint32_t failed = 0;
  for (const int error : {emulated::out_of_memory, emulated::lost})
    for (uint64_t at = 2; at <= calls; at += emulated::fault_step(calls, 60)) {
      CAPTURE(error);
      CAPTURE(at);
      std::shared_ptr<const Model> model;
      machine().fails_with = error;
      machine().fails_at = machine().calls + at;
      const Status s = run(&model);
      machine().fails_at = 0;
      CHECK((s.ok() || s.code() == Code::device || s.code() == Code::no_memory));
      failed += !s.ok();
      model.reset();
      CHECK(machine().held == held);
    }
  CHECK(failed > 60);
}
