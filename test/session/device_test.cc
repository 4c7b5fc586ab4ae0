// Sessions whose model has layers on a GPU, against those without. Without a GPU the cases pass and
// say so.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <thread>

#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::vector<float> logits_of(const std::shared_ptr<const Model>& model,
                             std::span<const Token> tokens, uint32_t chunk, bool bounded = false) {
  SessionOptions o = bounded ? bounded_options(256) : SessionOptions{};
  o.threads = 2;
  o.prefill_chunk = chunk;
  o.full_precision = !bounded;
  auto session = open_session(model, o);
  std::vector<float> logits(tokens.size() * model->config().vocabulary);
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, logits.data(), nullptr, {}, &done);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return logits;
}

}  // namespace

TEST_CASE("a device that is not known, not there or not built in is refused") {
  std::shared_ptr<const Model> model;
  for (const char* name :
       {"", "gpu", "cuda0", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "CUDA", "cuda:99999999999"})
    CHECK_MESSAGE(open_on(name, 0, &model).code() == Code::bad_argument, name);
  const Code code = open_on("cuda:4095", 0, &model).code();
  CHECK((code == Code::not_found || code == Code::unsupported));
  CHECK(model == nullptr);
}

TEST_CASE("a model on a device gives the logits of the CPU") {
  if (!device_model()) return;
  CHECK(device_model()->device_weights().front().has_output());
  const auto tokens = book_tokens(300);
  for (uint32_t chunk : {1u, 13u, 128u})
    CHECK(difference(logits_of(device_model(), tokens, chunk),
                     logits_of(mini_model(), tokens, chunk)) < rounding);
}

TEST_CASE("every architecture, RoPE kind and weight type gives on a device the logits of the CPU") {
  if (!device_model()) return;
  for (const auto& entry : std::filesystem::directory_iterator(FIXTURES "/models")) {
    if (entry.path().extension() != ".gguf") continue;
    const std::string path = entry.path().string();
    CAPTURE(path);
    const auto processors = open_model(path);
    std::shared_ptr<const Model> devices;
    const Status s = Model::open(path, "", &devices, {"cuda"});
    if (std::string(s.message()).find("GPUs do not compute") != std::string::npos) continue;
    REQUIRE_MESSAGE(s.ok(), s.message());
    std::vector<Token> tokens(40);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = static_cast<Token>(i * 37 % 200 + 10);
    const std::string formats = processors->weights().formats;
    const bool is_float =
        formats.find('Q') == std::string::npos && formats.find("FP4") == std::string::npos;
    for (const uint32_t chunk : {1u, 40u}) {
      for (const bool bounded : {false, true}) {
        CAPTURE(chunk);
        CAPTURE(bounded);
        const double floats = bounded ? 1e-4 : 1e-5;  // a device's attention has fast exponentials
        CHECK(difference(logits_of(devices, tokens, chunk, bounded),
                         logits_of(processors, tokens, chunk, bounded)) <
              (is_float ? floats : rounding));
      }
    }
  }
}

TEST_CASE("a device with room for some layers has the first ones, and the CPU the others") {
  if (!device_model()) return;
  const auto tokens = book_tokens(60);
  const std::vector<float> expected = logits_of(mini_model(), tokens, 20);
  const uint64_t all = device_model()->device_weights().front().bytes(), step = all / 20;
  std::vector<std::size_t> seen;
  bool refused = false, output = false;
  for (uint64_t budget = step; !output; budget += step) {
    REQUIRE(budget < (uint64_t{1} << 30));
    std::shared_ptr<const Model> model;
    const Status s = open_on("cuda:0", budget, &model);
    if (!s.ok()) {
      CHECK_MESSAGE(s.code() == Code::no_memory, s.message());
      CHECK(seen.empty());
      refused = true;
      continue;
    }
    const DeviceWeights& weights = model->device_weights().front();
    output = weights.has_output();
    if (!seen.empty() && seen.back() == weights.layers().size() && !output) continue;
    seen.push_back(weights.layers().size());
    CHECK(difference(logits_of(model, tokens, 20), expected) < rounding);
    CHECK(weights.device()->used() <= budget);
  }
  CHECK(refused);
  CHECK(seen.size() > 3);
  CHECK(std::is_sorted(seen.begin(), seen.end()));
  CHECK(seen.back() == mini_model()->config().layers);
}

TEST_CASE("NaN is found in the layer that makes it, however the device computes the step") {
  if (!device_model()) return;
  std::ifstream stream(EXAMPLES "/mini-reader-q8_0.gguf", std::ios::binary);
  std::string file{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  Gguf gguf;
  REQUIRE(Gguf::parse(std::as_bytes(std::span(file)), &gguf).ok());
  const uint32_t last = mini_model()->config().layers - 1;
  TempFolder folder;
  const std::pair<const char*, uint32_t> damages[] = {{"attn_q", 0},      {"attn_v", 2},
                                                      {"attn_output", 1}, {"ffn_up", last},
                                                      {"ffn_down", 0},    {"ffn_down", last}};
  for (const auto& [name, layer] : damages) {
    CAPTURE(std::string(name));
    const std::string tensor = "blk." + std::to_string(layer) + "." + name + ".weight",
                      path = folder.file("damaged.gguf");
    std::string damaged = file;
    // the first scale: infinity
    damaged.replace(gguf.find_tensor(tensor)->offset, 2, "\x00\x7c", 2);
    std::ofstream(path, std::ios::binary) << damaged;
    std::shared_ptr<const Model> model;
    REQUIRE(Model::open(path, "", &model, {"cuda"}).ok());
    for (const uint32_t chunk : {1u, 40u}) {
      for (const bool bounded : {false, true}) {
        CAPTURE(chunk);
        CAPTURE(bounded);
        SessionOptions o = bounded ? bounded_options(256) : SessionOptions{};
        o.threads = 2;
        o.prefill_chunk = chunk;
        auto session = open_session(model, o);
        uint64_t done = 7;
        const Status s = session->prefill_tokens(book_tokens(40), nullptr, nullptr, {}, &done);
        CHECK(s.code() == Code::corrupt);
        CHECK_MESSAGE(
            std::string(s.message()).find("layer " + std::to_string(layer) + " made") == 0,
            s.message());
        CHECK(done == 0);
      }
    }
  }
}

TEST_CASE("a step that a device has no room for is refused and a smaller one works") {
  if (!device_model()) return;
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda",
                  device_model()->device_weights().front().device()->used() + (uint64_t{80} << 20),
                  &model)
              .ok());
  SessionOptions o;
  o.prefill_chunk = 4096;
  auto session = open_session(model, o);
  const auto tokens = book_tokens(4096);
  uint64_t done = 0;
  std::vector<std::unique_ptr<Session>> others;  // whose workspaces fill what is left
  Status s;
  for (int i = 0; i < 64 && s.ok(); ++i) {
    others.push_back(open_session(model, o));
    s = others.back()->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
  }
  CHECK(s.code() == Code::no_memory);
  CHECK(std::string(s.message()).find("cuda:0") != std::string::npos);
  others.clear();
  REQUIRE_MESSAGE(
      (s = session->prefill_tokens({tokens.data(), 200}, nullptr, nullptr, {}, &done)).ok(),
      s.message());
}

TEST_CASE(
    "a sequence prefilled on a device is saved, loaded and asked without one, and the reverse") {
  if (!device_model()) return;
  TempFolder folder;
  // What has one answer: roundings do not change it.
  std::string text = "In the evening they came to the house. ";
  for (int i = 0; i < 60; ++i)
    text += "The wind went round it all night and nobody slept. The horses stood in the yard " +
            std::to_string(i) + " hours. ";
  text.insert(text.size() / 3 / 100 * 100, " The access code of the north gate is 4821907. ");
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = "bounded";
  o.select.budget_tokens = 200;
  std::string answers[2][2];
  for (int from = 0; from < 2; ++from) {
    auto session = open_session(from ? device_model() : mini_model(), o);
    uint64_t done = 0, bytes = 0;
    REQUIRE(session->prefill(text, false, nullptr, {}, &done, &bytes).ok());
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    for (int to = 0; to < 2; ++to) {
      std::unique_ptr<Session> loaded;
      REQUIRE(Session::load(to ? device_model() : mini_model(), folder.file("a.kv"), o, true,
                            nullptr, {}, &loaded)
                  .ok());
      answers[from][to] = ask(loaded.get(), "What is the access code of the north gate?");
      CHECK(loaded->stats_json().find("\"device\":\"cuda:0\"") != (to ? std::string::npos : 0));
    }
  }
  for (const auto& of : answers)
    for (const std::string& answer : of)
      CHECK(answer == "The access code of the north gate is 4821907.");
}

TEST_CASE("sessions of one device answer as each alone, and cancelling one is over at once") {
  if (!device_model()) return;
  const auto tokens = book_tokens(800);
  SessionOptions o;
  o.threads = 1;
  auto a = open_session(device_model(), o), b = open_session(device_model(), o);
  read(a.get(), tokens);
  read(b.get(), tokens);
  std::vector<Token> alone = continue_with(a.get(), 20), other;
  auto c = open_session(device_model(), o);
  read(c.get(), tokens);
  std::vector<Token> together[2];
  std::thread thread([&] { together[0] = continue_with(b.get(), 20); });
  together[1] = continue_with(c.get(), 20);
  thread.join();
  CHECK(together[0] == alone);
  CHECK(together[1] == alone);
  Cancel cancel;
  cancel.fire();
  uint64_t done = 0;
  CHECK(a->prefill_tokens(tokens, nullptr, &cancel, {}, &done).code() == Code::cancelled);
  cancel.reset();
  CHECK(continue_with(b.get(), 5) == continue_with(c.get(), 5));
}

TEST_CASE(
    "selected attention on a device equals the CPU's, of a mapped file and of memory, while pages "
    "are sealed") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 150);
  TempFolder folder;
  for (const uint64_t budget : {64u, 256u, 3000u}) {
    CAPTURE(budget);
    auto expected = load(mini_model(), read_file(), bounded_options(budget)),
         mapped = load(device_model(), read_file(), bounded_options(budget));
    auto memory = open_session(device_model(), bounded_options(budget));
    read(memory.get(), {tokens.data(), 3000});
    REQUIRE(memory->save(folder.file("memory.kv"), nullptr, {}).ok());
    const std::vector<float> wanted_of_memory =
        score(load(mini_model(), folder.file("memory.kv"), bounded_options(budget)).get(), next);
    const std::vector<float> wanted = score(expected.get(), next),
                             of_file = score(mapped.get(), next),
                             of_memory = score(memory.get(), next);
    CHECK(attends(*mapped));
    CHECK(attends(*memory));
    for (const Session* session : {mapped.get(), memory.get()})
      CHECK(stat_of(*session, "last_tokens_on_gpu") > 0);
    CHECK_FALSE(attends(*expected));
    // What the rounding of weights' inputs does, as above, where the CPU attends everything for
    // both.
    SessionOptions everything = bounded_options(0);
    everything.select.strategy = "full";
    // A device that multiplies as the CPU does still differs by how weights of attention are
    // rounded, which later layers carry on.
    constexpr double min_difference = 0.08;
    const double by_weights =
        std::max(min_difference,
                 mean_difference(score(load(device_model(), read_file(), everything).get(), next),
                                 score(load(mini_model(), read_file(), everything).get(), next)));
    CHECK(mean_difference(of_file, wanted) < 2 * by_weights + 0.02);
    CHECK(mean_difference(of_memory, wanted_of_memory) < 2 * by_weights + 0.02);
    CHECK(score(mapped.get(), next) == of_file);  // the same bits again, after going back
  }
}
