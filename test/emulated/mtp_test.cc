// MTP layers on emulated GPUs, of models whose heads GPUs have kernels for: what they draft is what
// they draft on the CPU.
#include <algorithm>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"
#include "made_model.h"
#include "session/drafter.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* made_names[] = {"qwen35", "qwen35moe", "glm4moe"};

// A small model of an architecture with heads of 64, and an MTP layer like its last layer with
// attention.
std::string make_mtp_model(const char* name, const TempFolder& folder, uint32_t layers = 0,
                           uint32_t expert_width = 0) {
  const auto recipes = recipes_of_all_architectures();
  const auto found = std::find_if(recipes.begin(), recipes.end(),
                                  [&](const auto& r) { return r.architecture == name; });
  REQUIRE(found != recipes.end());
  ModelRecipe recipe = *found;
  recipe.head_dim = 64, recipe.width = 128, recipe.context = 4096;
  if (layers > 0) recipe.layers = layers, recipe.expert_width = expert_width;
  const uint32_t layer = recipe.layers++;
  recipe.more_keys = [keys = recipe.more_keys](GgufBuilder* b, const std::string& prefix) {
    if (keys) keys(b, prefix);
    b->key(prefix + "nextn_predict_layers", 1u);
  };
  MadeModel model = make_model(recipe);
  std::string like;
  for (const MadeTensor& t : model.tensors)
    if (t.part() == "attn_q") like = "blk." + std::to_string(t.layer) + ".";
  REQUIRE(!like.empty());
  const std::string to = "blk." + std::to_string(layer) + ".";
  std::vector<MadeTensor> added;
  const auto add = [&](const MadeTensor& from, const std::string& as, uint64_t columns) {
    added.push_back(from);
    added.back().name = as;
    if (columns == 1) return;
    added.back().dims[0] *= columns;  // the numbers once more
    const std::vector<std::byte> bytes = from.bytes;
    added.back().bytes.insert(added.back().bytes.end(), bytes.begin(), bytes.end());
  };
  for (const MadeTensor& t : model.tensors) {
    if (t.name.rfind(like, 0) == 0) add(t, to + t.name.substr(like.size()), 1);
    if (t.name != "output_norm.weight") continue;
    for (const char* norm : {"nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"})
      add(t, to + norm + ".weight", 1);
  }
  MadeTensor projection{to + "nextn.eh_proj.weight", {256, 128}, TensorRole::matrix};
  std::vector<float> numbers(256 * 128);
  uint32_t state = 9;
  for (float& x : numbers) {
    state = state * 1664525u + 1013904223u;
    x = (static_cast<float>(state >> 16) / 32768.0f - 1.0f) / 12;
  }
  const auto* begin = reinterpret_cast<const std::byte*>(numbers.data());
  projection.bytes.assign(begin, begin + numbers.size() * sizeof(float));
  added.push_back(projection);
  model.tensors.insert(model.tensors.end(), added.begin(), added.end());
  const std::string path = folder.file(std::string(name) + ".gguf");
  const std::vector<std::byte> bytes = model.build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

std::shared_ptr<const Model> mtp_on(const std::string& path, const char* device) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path, "", &model, {device, 0});
  REQUIRE_MESSAGE(s.ok(), s.message());
  for (const DeviceWeights& d : model->device_weights()) d.device()->set_page_rates(2, {1, 1});
  return model;
}

// Logits of drafts after each chunk of a text.
std::vector<float> drafted_logits(const std::shared_ptr<const Model>& model, uint32_t chunk,
                                  ThreadPool* pool) {
  constexpr std::size_t length = 400;
  const auto tokens = some_tokens(length + 1);
  std::unique_ptr<Drafter> drafter;
  const Status opened = Drafter::create(model, 1024, true, pool, &drafter);
  REQUIRE_MESSAGE(opened.ok(), opened.message());
  CHECK(drafter->device_names() == model->device_names());
  drafter->choose_on_cpu();
  std::unique_ptr<Forward> forward;
  REQUIRE(Forward::create(model, 1024, pool, &forward).ok());
  KvStore store(model->store_shape(), 64);
  std::optional<RecurrentState> states;
  if (model->config().recurrent_layers > 0) states = make_states(model->config(), 0);
  DraftState drafts = drafter->make_state(0, 64);
  std::vector<float> out;
  for (std::size_t at = 0; at < length; at += chunk) {
    ForwardStep step;
    step.tokens = std::span(tokens).subspan(at, std::min<std::size_t>(chunk, length - at));
    REQUIRE(drafter->begin_step(at, &drafts, &step).ok());
    step.accept = [&](uint32_t* kept) { return drafter->end_step(step, *kept, &drafts); };
    const Status s = forward->run(step, {store, nullptr, states ? &*states : nullptr});
    REQUIRE_MESSAGE(s.ok(), s.message());
    const std::size_t end = at + step.size();
    if (end % 40 != 0) continue;
    Array<Token> drafted;
    DraftState copy(drafts);
    REQUIRE(drafter->draft(end, tokens[end], 1, nullptr, &copy, &drafted).ok());
    REQUIRE(drafted.size() == 1);
    out.insert(out.end(), drafter->logits().begin(), drafter->logits().end());
    REQUIRE(drafter->draft(end, tokens[end], 3, nullptr, &copy, &drafted).ok());
  }
  return out;
}

}  // namespace

TEST_CASE("an MTP layer on a GPU drafts by the CPU's logits, token by token and in chunks") {
  const TempFolder folder;
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  for (const char* name : made_names) {
    CAPTURE(std::string(name));
    const std::string path = make_mtp_model(name, folder);
    const auto cpu = mtp_on(path, "cpu"), gpu = mtp_on(path, "cuda");
    REQUIRE(gpu->device_weights().back().has_output());
    for (const uint32_t chunk : {1u, 4u, 40u, 200u}) {
      CAPTURE(chunk);
      const auto expected = drafted_logits(cpu, chunk, pool.get());
      CHECK(expected.size() > 0);
      CHECK(difference(drafted_logits(gpu, chunk, pool.get()), expected) < 3e-2);
    }
  }
}

TEST_CASE("answers drafted by an MTP layer that a GPU attends have the bits of those without") {
  const emulated::Changed differ(emulated::machine().several_differ, 1);
  const TempFolder folder;
  for (const char* name : made_names) {
    CAPTURE(std::string(name));
    const auto model = mtp_on(make_mtp_model(name, folder), "cuda");
    for (const char* strategy : {"full", "bounded"})
      for (const float temperature : {0.0f, 1.0f}) {
        CAPTURE(std::string(strategy));
        CAPTURE(temperature);
        std::string texts[2];
        for (const uint32_t drafts : {0u, 3u}) {
          SessionOptions o;
          o.threads = 2, o.prefill_chunk = 128;
          o.select.strategy = strategy;
          if (strategy != std::string("full")) o.select.budget_tokens = 64;
          o.draft_tokens = drafts, o.drafts_always = true, o.lookup_tokens = 0;
          const auto session = open_session(model, o);
          read(session.get(), some_tokens(500));
          REQUIRE(session->prepare(nullptr, {}).ok());
          REQUIRE(session->prepare_devices(nullptr, {}).ok());
          GenerateOptions asked;
          asked.max_tokens = 60, asked.sampling.temperature = temperature;
          texts[drafts > 0] = ask(session.get(), "", asked);
          CHECK(attends(*session));
          if (drafts > 0) CHECK(session->stats().drafts.drafted > 0);
        }
        CHECK(texts[0] == texts[1]);
      }
  }
}

TEST_CASE("a step and each draft wait for the GPU twice at most, and allocate nothing") {
  const TempFolder folder;
  for (const char* name : made_names)
    for (const uint32_t count : {1u, 3u}) {
      CAPTURE(std::string(name));
      CAPTURE(count);
      const auto model = mtp_on(make_mtp_model(name, folder), "cuda");
      SessionOptions o;
      o.threads = 2, o.prefill_chunk = 128;
      o.select.strategy = "bounded", o.select.budget_tokens = 64;
      o.draft_tokens = count, o.drafts_always = true, o.lookup_tokens = 0;
      const auto session = open_session(model, o);
      read(session.get(), some_tokens(1500));
      GenerateOptions asked;
      asked.max_tokens = 150;
      const std::string first = ask(session.get(), "", asked);
      const emulated::Machine& m = emulated::machine();
      const uint64_t waits = m.waits, allocations = m.allocations, enqueued = m.enqueued,
                     graphs = m.graphs;
      CHECK(ask(session.get(), "", asked) == first);
      const DraftCounts drafts = session->stats().drafts;
      REQUIRE(drafts.steps > 100);
      CHECK(m.allocations == allocations);
      CHECK(m.graphs == graphs);
      // A question is prefilled, and every sixteenth token seals a page.
      constexpr uint64_t of_question = 50;
      CHECK(m.waits - waits <=
            2 * (drafts.steps + drafts.drafted) + drafts.steps / 8 + of_question);
      CHECK(m.enqueued - enqueued <= 18 * (drafts.steps + drafts.drafted) + 4 * of_question);
    }
}

TEST_CASE("the upload of an MTP layer is cancelled, and the next one is complete") {
  const TempFolder folder;
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  const auto model = mtp_on(make_mtp_model("qwen35", folder), "cuda");
  std::unique_ptr<Drafter> drafter;
  Cancel cancel;
  cancel.fire();
  CHECK(Drafter::create(model, 1024, true, pool.get(), &drafter, &cancel).code() ==
        Code::cancelled);
  cancel.reset();
  REQUIRE(Drafter::create(model, 1024, true, pool.get(), &drafter, &cancel).ok());
  CHECK(drafter->device_names() == "cuda:0");
}

// KV_PLAN_DRAFTS. Without it experts take the room.
TEST_CASE("a model that is opened for drafts leaves room for its MTP layer next to the output") {
  const TempFolder folder;
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  const std::string path = make_mtp_model("qwen35moe", folder, 16, 1024);
  const auto is_there = [&](uint64_t budget, bool drafts, bool* has_output) {
    std::shared_ptr<const Model> model;
    const Status s = Model::open(path, "", &model, {"cuda", budget, drafts});
    CHECK((s.ok() || s.code() == Code::no_memory));
    if (!s.ok()) return false;
    *has_output = model->device_weights().back().has_output();
    std::unique_ptr<Drafter> drafter;
    REQUIRE(Drafter::create(model, 1024, true, pool.get(), &drafter).ok());
    return drafter->device_names() == model->device_names();
  };
  uint32_t gained = 0, outputs = 0, planned_outputs = 0;
  for (uint64_t budget = uint64_t{200} << 20; budget < uint64_t{320} << 20;
       budget += uint64_t{8} << 20) {
    CAPTURE(budget);
    bool whole = false, part = false;
    const bool anyway = is_there(budget, false, &whole), planned = is_there(budget, true, &part);
    CHECK((planned || !anyway));
    gained += planned && !anyway, outputs += whole, planned_outputs += part;
  }
  CHECK(gained > 0);
  CHECK(planned_outputs == outputs);
}
