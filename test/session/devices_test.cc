// Sessions whose model is split over several GPUs, against a model on one GPU. A machine with one
// GPU names it twice. Without a GPU the cases pass and say so. The emulated GPUs of test/emulated
// always run them.
#include <algorithm>
#include <cstdlib>

#include "device_helpers.h"
#include "model/device_plan.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// The second device is another one where there is one.
const std::string& second() {
  static const std::string name = [] {
    std::vector<int> found;
    return Device::find("cuda:all", &found).ok() && found.size() > 1
               ? "cuda:" + std::to_string(found[1])
               : "cuda:0";
  }();
  return name;
}
const std::string& both() {
  static const std::string names = "cuda:0," + second();
  return names;
}

// The mini model on two devices, opened once; null where there is no GPU.
std::shared_ptr<const Model> split_model() {
  static const std::shared_ptr<const Model> model = [] {
    std::shared_ptr<const Model> opened;
    if (device_model()) REQUIRE(open_on(both().c_str(), 0, &opened).ok());
    return opened;
  }();
  return model;
}

uint32_t mini_layers() { return mini_model()->config().layers; }

// With so little memory that the CPU has layers too: budget is what each device may take, one more
// MB at a time. Null once all layers fit.
std::shared_ptr<const Model> open_in_part(const char* name, std::size_t devices, uint64_t* budget) {
  for (;; *budget += uint64_t{1} << 20) {
    REQUIRE(*budget < uint64_t{1} << 30);
    std::shared_ptr<const Model> model;
    if (const Status s = open_on(name, *budget, &model); !s.ok()) {
      REQUIRE_MESSAGE(s.code() == Code::no_memory, s.message());
      continue;
    }
    if (model->device_weights().back().end_layer() == mini_layers()) return nullptr;
    if (model->device_weights().size() == devices) return model;
  }
}

// All that a session does, and what came of it.
struct Course {
  std::vector<float> read_on, next, after_fork, after_rewind;
  std::vector<Token> answer;
  std::string question;
};
Course run(const std::shared_ptr<const Model>& model, const std::shared_ptr<const Model>& loads) {
  const auto tokens = book_tokens(3000);
  TempFolder folder;
  Course c;
  SessionOptions o = bounded_options(256);
  o.prefill_chunk = 500;
  auto session = open_session(model, o);
  read(session.get(), {tokens.data(), 1200});
  CHECK(attends(*session));
  c.read_on = score(session.get(), {tokens.data() + 1200, 100});  // as a text is read
  c.next = score(session.get(), {tokens.data() + 1200, 40});      // as a question
  CHECK(attends(*session));
  c.answer = continue_with(session.get(), 20);
  CHECK(stat_of(*session, "last_tokens_on_gpu") > 0);
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  auto loaded = load(loads, folder.file("a.kv"), o);
  std::unique_ptr<Session> fork;
  REQUIRE(loaded->fork(&fork).ok());
  c.after_fork = score(fork.get(), {tokens.data() + 2000, 30});
  CHECK(score(loaded.get(), {tokens.data() + 2000, 30}) == c.after_fork);
  REQUIRE(loaded->rewind(900).ok());
  read(loaded.get(), {tokens.data() + 2000, 300});
  c.after_rewind = score(loaded.get(), {tokens.data() + 2300, 30});
  CHECK(attends(*loaded));
  c.question = ask(fork.get(), "Who was there?", {.max_tokens = 12});
  return c;
}

}  // namespace

TEST_CASE(
    "layers are split over devices by the room that each has, and those that fit none are left") {
  using Layers = std::vector<uint32_t>;
  const auto split = [](std::vector<uint64_t> sizes, uint64_t output, std::vector<uint64_t> rooms) {
    return split_layers(sizes, output, rooms);
  };
  const std::vector<uint64_t> eight(8, 10);
  CHECK(split(eight, 5, {1000}).layers == Layers{8});
  CHECK(split(eight, 5, {1000}).output);
  CHECK(split(eight, 0, {1000, 1000}).layers == Layers{4, 4});
  CHECK(split(eight, 0, {3000, 1000}).layers == Layers{6, 2});
  CHECK(split(eight, 20, {1000, 1000}).layers == Layers{5, 3});  // the output is with the last one
  CHECK(split(eight, 0, {40, 40}).layers == Layers{4, 4});
  CHECK(split(eight, 0, {49, 9, 30}).layers == Layers{4, 0, 3});
  CHECK(split(eight, 0, {59, 9, 30}).layers == Layers{5, 0, 3});
  const LayerSplit no_output = split(eight, 5, {40, 40});
  CHECK(no_output.layers == Layers{4, 4});
  CHECK_FALSE(no_output.output);
  const LayerSplit some = split(eight, 5, {35, 25});
  CHECK(some.layers == Layers{3, 2});
  CHECK_FALSE(some.output);
  CHECK(split(eight, 5, {9, 0}).layers == Layers{0, 0});
  CHECK(split({10, 20, 30, 40}, 0, {100, 100}).layers == Layers{3, 1});
  for (uint64_t a = 0; a < 120; a += 7)
    for (uint64_t b = 0; b < 120; b += 9) {
      const LayerSplit s = split(eight, 25, {a, b});
      CHECK(s.layers[0] * 10 + (s.output && s.layers[1] == 0 ? 25 : 0) <= a);
      CHECK(s.layers[1] * 10 + (s.output && s.layers[1] > 0 ? 25 : 0) <= b);
      CHECK(s.layers[0] + s.layers[1] == std::min<uint64_t>(8, a / 10 + b / 10));
    }
}

TEST_CASE("lists of devices that are not lists, or name what is not there, are refused") {
  std::shared_ptr<const Model> model;
  for (const char* name : {"cuda:0,", ",cuda:0", "cuda:0,,cuda:0", "cuda:0,cpu", "cpu,cuda:0",
                           "cuda:0 ,cuda:0", "cuda:0;cuda:0", "cuda:all,cuda:0", "cuda:0,cuda:all",
                           "cuda:0,auto", "auto,cuda:0", "cuda:all,", "all", "AUTO"})
    CHECK_MESSAGE(open_on(name, 0, &model).code() == Code::bad_argument, name);
  for (const char* name : {"cuda:99", "cuda:0,cuda:99", "cuda:99,cuda:0"}) {
    const Status s = open_on(name, 0, &model);
    CHECK_MESSAGE((s.code() == Code::not_found || s.code() == Code::unsupported), s.message());
    CHECK(std::string(s.message()).find(name) != std::string::npos);
    if (device_model()) CHECK(std::string(s.message()).find("cuda:99") != std::string::npos);
  }
  CHECK(model == nullptr);
}

TEST_CASE(
    "a device that is chosen is a GPU where there is one, and otherwise the CPU, and the session "
    "says which and why") {
  std::shared_ptr<const Model> model;
  const Status s = open_on("auto", 0, &model);
  REQUIRE_MESSAGE(s.ok(), s.message());
  auto session = open_session(model);
  if (device_model()) {
    CHECK(model->device_names().rfind("cuda:", 0) == 0);
    CHECK(model->device_weights().front().has_output());
    CHECK(says(*session, "\"device\":\"" + model->device_names() + "\""));
    CHECK_FALSE(says(*session, "device_because"));
  } else {
    CHECK(model->device_weights().empty());
    CHECK(says(*session, "\"device\":\"cpu\",\"device_because\":\"device 'auto': "));
    CHECK_FALSE(says(*session, "gpu_layers"));
  }
  read(session.get(), book_tokens(40));
  CHECK(continue_with(session.get(), 3).size() == 3);
  CHECK(says(*open_session(mini_model()), "\"device\":\"cpu\""));
  CHECK_FALSE(says(*open_session(mini_model()), "device_because"));
  // Memory for no layer: a device that was named is an error, one that is chosen is not taken.
  if (!device_model()) return;
  CHECK(open_on("cuda", 4096, &model).code() == Code::no_memory);
  REQUIRE(open_on("auto", 4096, &model).ok());
  CHECK(
      says(*open_session(model), "\"device\":\"cpu\",\"device_because\":\"cuda:0 has 4096 bytes"));
}

TEST_CASE(
    "a model on two devices computes the same bits as on one: prefill, answers, files, forks, "
    "rewinds") {
  if (!split_model()) return;
  const auto& devices = split_model()->device_weights();
  REQUIRE(devices.size() == 2);
  CHECK(devices[0].first_layer() == 0);
  CHECK(devices[0].end_layer() == devices[1].first_layer());
  CHECK(devices[1].end_layer() == mini_layers());
  CHECK(devices[1].has_output());
  CHECK_FALSE(devices[0].has_output());
  for (const DeviceWeights& d : devices) CHECK(d.layers().size() >= 2);
  // What the one has saved the other goes on from.
  const Course one = run(device_model(), split_model()), two = run(split_model(), device_model());
  CHECK(two.read_on == one.read_on);
  CHECK(two.next == one.next);
  CHECK(two.answer == one.answer);
  CHECK(two.after_fork == one.after_fork);
  CHECK(two.after_rewind == one.after_rewind);
  CHECK(two.question == one.question);
  auto session = open_session(split_model(), bounded_options(256));
  CHECK(says(*session, "\"device\":\"" + both() + "\""));
  CHECK(stat_of(*session, "gpu_layers") == mini_layers());
  CHECK(says(*session, "\"gpu_output\":true"));
  CHECK(stat_of(*session, "gpu_weight_bytes") == devices[0].bytes() + devices[1].bytes());
  CHECK(says(*session, "{\"device\":\"" + second() +
                           "\",\"first_layer\":" + std::to_string(devices[1].first_layer()) + ","));
}

TEST_CASE("a model on two devices attends as the CPU does, of a file and while pages are sealed") {
  if (!split_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 150);
  for (const uint64_t budget : {64u, 3000u}) {
    auto expected = load(mini_model(), read_file(), bounded_options(budget)),
         split = load(split_model(), read_file(), bounded_options(budget));
    const std::vector<float> found = score(split.get(), next);
    CHECK(attends(*split));
    CHECK(mean_difference(found, score(expected.get(), next)) < 0.2);
    CHECK(score(split.get(), next) == found);
    continue_with(split.get(), 70);
    CHECK(attends(*split));
    CHECK(stat_of(*split, "sealed_tokens") > stat_of(*expected, "sealed_tokens"));
  }
}

TEST_CASE(
    "layers without room on two devices stay on the CPU, and the tokens equal those of as many "
    "layers on one") {
  if (!split_model()) return;
  const auto tokens = book_tokens(900);
  const auto course = [&](const std::shared_ptr<const Model>& model) {
    SessionOptions o = bounded_options(200);
    o.prefill_chunk = 400;
    auto session = open_session(model, o);
    read(session.get(), {tokens.data(), 800});
    std::vector<float> out = score(session.get(), {tokens.data() + 800, 30});
    for (const Token t : continue_with(session.get(), 10)) out.push_back(static_cast<float>(t));
    return out;
  };
  const std::vector<float> by_processor = course(mini_model());
  uint64_t budget = uint64_t{1} << 20, of_one = budget;
  int seen = 0;
  uint32_t before = 0;
  while (const auto split = open_in_part(both().c_str(), 2, &budget)) {
    const uint32_t end = split->device_weights().back().end_layer();
    for (const DeviceWeights& d : split->device_weights()) CHECK(d.device()->used() <= budget);
    budget += uint64_t{1} << 20;
    if (end == before) continue;
    before = end;
    CAPTURE(end);
    CHECK_FALSE(split->device_weights().back().has_output());
    const std::vector<float> found = course(split);
    CHECK(mean_difference({found.begin(), found.begin() + 30},
                          {by_processor.begin(), by_processor.begin() + 30}) < 0.2);
    std::shared_ptr<const Model> one;
    while (!one || one->device_weights().back().end_layer() < end)
      (void)open_on("cuda:0", of_one += uint64_t{1} << 18, &one);
    if (one->device_weights().back().end_layer() != end) continue;  // two layers fitted at once
    if (attends(*load(split, read_file(), bounded_options(200))) ==
        attends(*load(one, read_file(), bounded_options(200))))
      ++seen;
    CHECK(course(one) == found);
  }
  CHECK(seen > 0);
}

TEST_CASE(
    "a damaged page of the second device's layers is an error, and the sequence is as before") {
  if (!split_model()) return;
  TempFolder folder;
  const std::string path = damaged_file(folder, mini_layers() - 1);
  auto session = load(split_model(), path, bounded_options(100000));  // everything
  Token token = -1;
  bool end = false;
  for (int i = 0; i < 2; ++i) {
    const Status s = session->next({}, nullptr, &token, &end);
    CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
    CHECK(session->tokens().size() == 3000);
  }
  uint64_t done = 0;
  const auto tokens = book_tokens(200);
  CHECK(session->prefill_tokens(tokens, nullptr, nullptr, {}, &done).code() == Code::corrupt);
  CHECK(session->tokens().size() == 3000);
}

TEST_CASE("a list of one GPU is that GPU, and `all` is every GPU of the machine") {
  if (!device_model()) return;
  std::shared_ptr<const Model> one, all;
  REQUIRE(open_on("cuda:0", 0, &one).ok());
  CHECK(one->device_names() == "cuda:0");
  REQUIRE(open_on("cuda:all", 0, &all).ok());
  CHECK(all->device_names().rfind("cuda:0", 0) == 0);
  CHECK(all->device_weights().back().end_layer() == mini_layers());
  const auto tokens = book_tokens(3100);
  auto a = load(one, read_file(), bounded_options(200)),
       b = load(all, read_file(), bounded_options(200));
  CHECK(mean_difference(score(b.get(), {tokens.data() + 3000, 60}),
                        score(a.get(), {tokens.data() + 3000, 60})) < 0.2);
  CHECK(attends(*b));
}
