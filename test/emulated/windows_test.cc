// Layers that see a window, on a device whose calls fail: a step that failed has written to the
// ring of the window, and the next one sees what the sequence has.
#include <algorithm>
#include <string>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

SessionOptions exact() {
  SessionOptions o;
  o.threads = 1;
  o.select.strategy = "full";
  o.full_precision = true;
  o.prefill_chunk = 64;
  return o;
}

constexpr std::size_t length = 200;
constexpr double tolerance = 1e-3;

std::unique_ptr<Session> open_windows(const char* name, const char* device) {
  std::shared_ptr<const Model> model;
  const std::string path = FIXTURES "/models/" + std::string(name) + ".gguf";
  REQUIRE(Model::open(path, "", &model, {device, 0}).ok());
  auto session = open_session(model, exact());
  read(session.get(), some_tokens(length));
  return session;
}

bool has_windows_on(const char* executor, const Session& session) {
  return session.stats_json().find("sliding windows " + std::string(executor)) != std::string::npos;
}
}  // namespace

TEST_CASE("a step that fails on a device leaves the windows of its layers as they were") {
  const auto tokens = some_tokens(length + 90);
  for (const char* name : {"gemma3", "gemma4-e"}) {
    CAPTURE(std::string(name));
    const auto cpu = open_windows(name, "cpu"), gpu = open_windows(name, "cuda");
    const std::vector<float> expected = logits_after(cpu.get(), 9);
    uint32_t failures = 0;
    for (const std::size_t n : {1u, 90u}) {
      bool fails = true;
      for (uint64_t call = 1; fails; call += 1 + call / 8) {
        emulated::Machine& machine = emulated::machine();
        emulated::Changed with(machine.fails_with, emulated::out_of_memory);
        emulated::Changed at(machine.fails_at, machine.calls + call);
        uint64_t done = 0;
        fails = !gpu->prefill_tokens({tokens.data() + length, n}, nullptr, nullptr, {}, &done).ok();
        const bool reached = machine.calls >= machine.fails_at;
        machine.fails_at = 0;
        failures += fails;
        fails = reached;
        REQUIRE(gpu->rewind(length).ok());
        CHECK(difference(logits_after(gpu.get(), 9), expected) < tolerance);
        REQUIRE(gpu->rewind(length).ok());
      }
    }
    CHECK(failures > 5);
  }
}

TEST_CASE("windows that a device has no room for are attended by the CPU, and the plan says so") {
  for (const char* name : {"gemma3", "gemma4"}) {
    CAPTURE(std::string(name));
    const auto cpu = open_windows(name, "cpu"), gpu = open_windows(name, "cuda");
    CHECK(has_windows_on("cuda:0", *gpu));
    const std::vector<float> expected = logits_after(cpu.get(), 9);
    std::unique_ptr<Session> fork;
    REQUIRE(gpu->fork(&fork).ok());
    // The fork's workspace fits, and nothing behind it.
    emulated::Machine& machine = emulated::machine();
    bool without = false, with = false;
    for (uint64_t room = 1 << 10; !with; room += room / 4) {
      emulated::Changed most(machine.max_bytes[0], machine.bytes[0] + room);
      std::vector<float> logits(fork->model().config().vocabulary);
      const Token token = 9;
      uint64_t done = 0;
      const Status s = fork->prefill_tokens({&token, 1}, logits.data(), nullptr, {}, &done);
      if (!s.ok()) {
        CHECK(s.code() == Code::no_memory);
        continue;
      }
      CHECK(difference(logits, expected) < tolerance);
      (has_windows_on("cpu", *fork) ? without : with) = true;
      REQUIRE(fork->rewind(length).ok());
      REQUIRE(room < uint64_t{1} << 30);
    }
    (void)without;
  }
}

TEST_CASE("layers that see a window are on several devices, or on one and the CPU") {
  const auto tokens = some_tokens(length);
  for (const char* name : {"gemma3", "gemma4", "gemma4-e", "cohere2"}) {
    CAPTURE(std::string(name));
    const auto cpu = open_windows(name, "cpu");
    const std::vector<float> expected = logits_after(cpu.get(), 9);
    const std::string path = FIXTURES "/models/" + std::string(name) + ".gguf";
    std::size_t splits = 0;
    for (const char* devices : {"cuda:0,cuda:1,cuda:2", "cuda:0"}) {
      const auto open = [&](uint64_t budget, std::shared_ptr<const Model>* model) {
        const Status s = Model::open(path, "", model, {devices, budget});
        CHECK((s.ok() || s.code() == Code::no_memory));
        return s.ok();
      };
      // From the smallest budget with which a device has a layer on.
      uint64_t little = 0, enough = uint64_t{1} << 28;
      for (std::shared_ptr<const Model> model; enough - little > 4096;)
        (open((little + enough) / 2, &model) ? enough : little) = (little + enough) / 2;
      std::vector<uint32_t> seen;
      for (uint64_t budget = enough; budget < enough + (uint64_t{1} << 20); budget += 16384) {
        std::shared_ptr<const Model> model;
        if (!open(budget, &model)) continue;
        std::vector<uint32_t> layers;
        for (const DeviceWeights& weights : model->device_weights())
          layers.push_back(weights.end_layer());
        if (layers == seen) continue;
        seen = layers;
        if (model->config().shares_kv()) CHECK(layers.size() == 1);
        auto session = open_session(model, exact());
        uint64_t done = 0;
        const Status read = session->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
        if (read.code() == Code::no_memory) continue;  // only the weights had room
        REQUIRE_MESSAGE(read.ok(), read.message());
        CHECK(difference(logits_after(session.get(), 9), expected) < tolerance);
        ++splits;
      }
    }
    CHECK(splits > 2);
  }
}
