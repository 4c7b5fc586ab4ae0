// Sequences whose model has layers on a GPU: forks, rewinds, their mirrors, attention of the CPU,
// cancels. Without a GPU the cases pass and say so.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <thread>

#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

TEST_CASE("forks, rewinds and other texts of one session attend their own tokens on the device") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3400);
  auto a = load(device_model(), read_file(), bounded_options(200));
  std::unique_ptr<Session> b, c;
  REQUIRE(a->fork(&b).ok());
  const std::vector<Token> first = continue_with(a.get(), 60);
  CHECK(continue_with(b.get(), 60) == first);
  CHECK(attends(*a));
  REQUIRE(b->fork(&c).ok());
  const std::vector<Token> then = continue_with(b.get(), 20);
  CHECK(continue_with(c.get(), 20) == then);
  CHECK(attends(*c));
  // Other tokens in the places of those that were taken back.
  REQUIRE(a->rewind(2900).ok());
  read(a.get(), {tokens.data() + 3000, 400});
  std::vector<Token> other(tokens.begin(), tokens.begin() + 2900);
  other.insert(other.end(), tokens.begin() + 3000, tokens.begin() + 3400);
  const std::vector<float> went_back = score(a.get(), {tokens.data(), 40});
  std::unique_ptr<Session> cold;  // has nothing on the device yet
  REQUIRE(a->fork(&cold).ok());
  CHECK(score(cold.get(), {tokens.data(), 40}) == went_back);
  REQUIRE(a->rewind(0).ok());
  read(a.get(), other);
  const std::vector<float> anew = score(a.get(), {tokens.data(), 40});
  CHECK(attends(*a));
  // A step back takes the window's rows from pages; the sketch has the bases of the text before.
  CHECK(mean_difference(anew, went_back) < 0.3);
  auto processor = open_session(mini_model(), bounded_options(200));
  read(processor.get(), other);
  // With AMX the CPU rounds to bf16 where the GPU rounds to int8.
  const double bound = cpu_kernels().tile_bytes(32, 32) > 0 ? 0.3 : 0.2;
  CHECK(mean_difference(score(processor.get(), {tokens.data(), 40}), anew) < bound);
}

TEST_CASE("prefill goes on over pages that come in many pieces, and next to a fork") {
  if (!device_model()) return;
  const auto tokens = book_tokens(5000);
  auto a = open_session(device_model(), bounded_options(200)),
       whole = open_session(device_model(), bounded_options(200));
  read(a.get(), {tokens.data(), 4000});
  std::unique_ptr<Session> b;  // has no pages on the device yet
  REQUIRE(a->fork(&b).ok());
  read(a.get(), {tokens.data() + 4000, 500});
  {
    const SmallPieces small;
    read(b.get(), {tokens.data() + 4000, 500});
  }
  read(whole.get(), {tokens.data(), 4000});
  read(whole.get(), {tokens.data() + 4000, 500});
  const std::vector<float> expected = score(whole.get(), {tokens.data(), 40});
  CHECK(score(a.get(), {tokens.data(), 40}) == expected);
  CHECK(score(b.get(), {tokens.data(), 40}) == expected);
}

TEST_CASE("forks share the sketch of their text on the device, and each has its own new tokens") {
  if (!device_model()) return;
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda", 0, &model).ok());
  const DeviceWeights& weights = model->device_weights().front();
  const StoreShape& shape = model->store_shape();
  auto a = load(model, read_file(), bounded_options(200));
  const uint64_t sketch =
      a->store().pages().extents() * shape.heads_total() * shape.page.sketch_bytes();
  const auto allocated_size = [&](Session* session, int tokens) {
    const uint64_t before = weights.device()->used();
    const std::vector<Token> answer = continue_with(session, tokens);
    CHECK(attends(*session));
    return std::pair(weights.device()->used() - before, answer);
  };
  const auto [of_first, answer] = allocated_size(a.get(), 3);
  // the same file, of which nothing is known
  auto other = load(model, read_file(), bounded_options(200));
  std::unique_ptr<Session> fork, second_fork;
  REQUIRE(other->fork(&fork).ok());
  REQUIRE(other->fork(&second_fork).ok());
  const auto [of_other, again] = allocated_size(other.get(), 3);
  const auto [of_fork, of_forks] = allocated_size(fork.get(), 3);
  CHECK((again == answer && of_forks == answer));
  CHECK(of_other == of_first);
  CHECK(of_fork + sketch <= of_other);
  // What a fork writes takes a block of its own, and nobody else has it.
  std::vector<Token> text = book_tokens(3600);
  text.erase(text.begin(), text.begin() + 3000);
  read(fork.get(), text);
  const std::vector<float> longer = score(fork.get(), std::span<const Token>(text).first(40));
  CHECK(attends(*fork));
  CHECK(continue_with(second_fork.get(), 3) == answer);
  CHECK(attends(*second_fork));
  auto cold = load(model, read_file(), bounded_options(200));
  CHECK(continue_with(cold.get(), 3) == answer);
  read(cold.get(), text);
  CHECK(score(cold.get(), std::span<const Token>(text).first(40)) == longer);
  // The first one's end is nothing to the others.
  other.reset();
  REQUIRE(second_fork->rewind(2990).ok());
  REQUIRE(a->rewind(2990).ok());
  CHECK(continue_with(second_fork.get(), 3) == continue_with(a.get(), 3));
}

TEST_CASE(
    "a damaged page of a file that the device reads is an error, and the sequence is as before") {
  if (!device_model()) return;
  TempFolder folder;
  const std::string path = damaged_file(folder);
  auto session = load(device_model(), path, bounded_options(100000));  // everything
  check_is_damaged(session.get());
}

TEST_CASE("the CPU attends the layers that a device does not, and the statistics say why") {
  if (!device_model()) return;
  const auto because = [](const Session& s, const char* why) {
    return s.stats_json().find(why) != std::string::npos;
  };
  const auto tokens = book_tokens(40);
  SessionOptions o = bounded_options(200);
  o.select.strategy = "quest";
  auto quest = load(device_model(), read_file(), o);
  score(quest.get(), tokens);
  CHECK_FALSE(attends(*quest));
  CHECK(because(*quest, "the GPU does not choose by this strategy"));
  o = bounded_options(200);
  o.select.share_heads = false;
  auto separate = load(device_model(), read_file(), o);
  score(separate.get(), tokens);
  CHECK(because(*separate, "each query head chooses for itself"));
  auto traced = load(device_model(), read_file(), bounded_options(200));
  GenerateOptions passages;
  passages.max_tokens = 4;
  passages.trace = true;
  ask(traced.get(), "Who?", passages);
  CHECK(because(*traced, "passages are traced"));
  passages.trace = false;
  ask(traced.get(), "Who?", passages);
  CHECK(attends(*traced));
  // A device with room for some layers, and one that other sessions fill.
  auto on_processor = load(mini_model(), read_file(), bounded_options(200));
  const std::vector<float> expected = score(on_processor.get(), tokens);
  const DeviceWeights& weights = device_model()->device_weights().front();
  std::shared_ptr<const Model> model;
  for (uint64_t budget = uint64_t{1} << 20; !open_on("cuda", budget, &model).ok();
       budget += uint64_t{1} << 20)
    REQUIRE(budget < uint64_t{1} << 30);
  CHECK(model->device_weights().front().layers().size() < model->config().layers);
  auto part = load(model, read_file(), bounded_options(200));
  CHECK(mean_difference(score(part.get(), tokens), expected) < 0.2);
  CHECK(attends(*part));
  REQUIRE(open_on("cuda", weights.device()->used() + (uint64_t{80} << 20), &model).ok());
  std::vector<std::unique_ptr<Session>> sessions;
  bool full = false;
  for (int i = 0; i < 64 && !full; ++i) {
    sessions.push_back(load(model, read_file(), bounded_options(200)));
    std::vector<float> out(tokens.size());
    const Status s = sessions.back()->score(tokens, out.data(), nullptr, {});
    if ((full = s.code() == Code::no_memory)) break;  // not even a step
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(mean_difference(out, expected) < 0.2);
    full = !attends(*sessions.back());
    CHECK((!full || because(*sessions.back(), "the GPU has no room for what its attention needs")));
  }
  CHECK(full);
  CHECK(model->device_weights().front().device()->used() <=
        model->device_weights().front().device()->budget());
}

// ---- texts that are read
// -------------------------------------------------------------------------------------------------

TEST_CASE(
    "prefill on a device is at least as near to full precision as on the CPU, in chunks of any "
    "size") {
  if (!device_model()) return;
  const auto tokens = book_tokens(4200);
  const std::span<const Token> next(tokens.data() + 4000, 60);
  const auto read_by = [&](const std::shared_ptr<const Model>& model, uint32_t chunk,
                           bool full_precision, bool* attended) {
    SessionOptions o;
    o.threads = 2;
    o.select.strategy = "full";
    o.prefill_chunk = chunk;
    o.full_precision = full_precision;
    auto session = open_session(model, o);
    read(session.get(), {tokens.data(), 4000});
    if (attended) *attended = attends(*session);
    return score(session.get(), next);
  };
  const std::vector<float> exact = read_by(mini_model(), 512, true, nullptr),
                           by_processor = read_by(mini_model(), 512, false, nullptr);
  const double processors = mean_difference(by_processor, exact);
  for (const uint32_t chunk : {100u, 500u, 1024u, 4000u}) {
    CAPTURE(chunk);
    bool attended = false;
    const std::vector<float> by_device = read_by(device_model(), chunk, false, &attended);
    CHECK(attended);
    const double devices = mean_difference(by_device, exact);
    MESSAGE("chunk ", chunk, ": differs from full precision by ", devices, ", the CPU by ",
            processors);
    CHECK(devices < 1.25 * processors + 0.02);
    CHECK(read_by(device_model(), chunk, false, nullptr) == by_device);  // the same bits again
  }
}

// Of 1,600 tokens in steps of 128 the last four steps have a quarter. The reader has three groups
// of layers. The last group's bases are found in the second of these steps, by 1,408 tokens, and
// the first one's in the fourth, which has 64.
TEST_CASE("a prefill on a device finds its sketch in its last steps") {
  if (!device_model()) return;
  constexpr uint32_t early = 9, late = 0, common = 1408, all = 1600;
  const auto tokens = book_tokens(3000);
  SessionOptions o = bounded_options(200);
  o.prefill_chunk = 128;
  const auto floats_of = [](const Session& session, uint32_t layer) {
    const PageShape& page = session.store().shape().page;
    const float* basis = session.store().sketch().query_basis(layer, 0);
    return std::vector<float>(basis, basis + page.dim * page.sketch_dim());
  };
  auto one = open_session(device_model(), o), other = open_session(device_model(), o);
  read(one.get(), {tokens.data(), all});
  CHECK(attends(*one));
  std::vector<Token> ends(tokens.begin(), tokens.begin() + common);
  ends.insert(ends.end(), tokens.begin() + 2000, tokens.begin() + 2000 + all - common);
  read(other.get(), ends);
  const KeySketch& sketch = one->store().sketch();
  REQUIRE(sketch.built());
  CHECK(sketch.pages() == one->store().pages().pages());
  CHECK(sketch.built_pages() == sketch.pages());
  CHECK(floats_of(*one, early) == floats_of(*other, early));
  CHECK(floats_of(*one, late) != floats_of(*other, late));

  auto processor = open_session(mini_model(), o);
  read(processor.get(), {tokens.data(), all});
  const std::span<const Token> next(tokens.data() + all, 40);
  SessionOptions all_tokens = o;
  all_tokens.select.strategy = "full";
  auto full = open_session(mini_model(), all_tokens);
  read(full.get(), {tokens.data(), all});
  const std::vector<float> exact = score(full.get(), next);
  const double processors = mean_difference(score(processor.get(), next), exact),
               devices = mean_difference(score(one.get(), next), exact);
  MESSAGE("differs from full attention by ", devices, ", the CPU by ", processors);
  CHECK(devices < 1.25 * processors + 0.02);

  TempFolder folder;
  REQUIRE(one->save(folder.file("a.kv"), nullptr, {}).ok());
  const auto loaded = load(device_model(), folder.file("a.kv"), o);
  CHECK(floats_of(*loaded, early) == floats_of(*one, early));
  CHECK(loaded->store().sketch().built_pages() == sketch.pages());

  // Of a prefill that is stopped no half sketch stays.
  auto stopped = open_session(device_model(), o);
  uint64_t done = 0;
  const Status s = stopped->prefill_tokens(
      {tokens.data(), all}, nullptr, nullptr,
      [](uint64_t at, uint64_t) {
        // so that the next one is reported
        std::this_thread::sleep_for(std::chrono::milliseconds(110));
        return at >= common;
      },
      &done);
  CHECK(s.code() == Code::cancelled);
  CHECK(done == common);
  CHECK_FALSE(stopped->store().sketch().built());
  read(stopped.get(), {tokens.data() + done, all - done});
  CHECK(stopped->store().sketch().built_pages() == sketch.pages());
}

TEST_CASE("prefill on a device measures the errors of layers as the CPU does") {
  if (!device_model()) return;
  const auto tokens = book_tokens(4100);
  const auto errors_of = [&](const std::shared_ptr<const Model>& model) {
    SessionOptions o;
    o.threads = 2;
    o.prefill_chunk = 512;
    auto session = open_session(model, o);
    read(session.get(), {tokens.data(), 4096});
    const std::string json = session->stats_json(), key = "\"layer_errors\":[";
    std::vector<double> errors;
    std::istringstream in(json.substr(json.find(key) + key.size()));
    for (double e = 0; in >> e; in.ignore()) errors.push_back(e);
    return errors;
  };
  const std::vector<double> device = errors_of(device_model()), processor = errors_of(mini_model());
  REQUIRE(device.size() == mini_model()->config().layers);
  REQUIRE(processor.size() == device.size());
  for (std::size_t l = 0; l < device.size(); ++l) {
    CAPTURE(l);
    CHECK(std::fabs(device[l] - processor[l]) <= 0.05 * processor[l] + 0.005);
  }
}

TEST_CASE("a sequence goes on after a load, a fork and a rewind, and the device has its pages") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3800);
  SessionOptions o = bounded_options(0);
  o.select.strategy = "full";
  auto loaded = load(device_model(), read_file(), o);
  const auto go_on = [&](Session* session) {
    read(session, {tokens.data() + 3000, 600});
    CHECK(attends(*session));
    return score(session, {tokens.data() + 3600, 40});
  };
  std::unique_ptr<Session> fork, other;
  REQUIRE(loaded->fork(&fork).ok());
  const std::vector<float> first = go_on(loaded.get());
  CHECK(go_on(fork.get()) == first);
  REQUIRE(loaded->rewind(2000).ok());
  read(loaded.get(), {tokens.data() + 3000, 300});
  REQUIRE(loaded->fork(&other).ok());  // knows nothing of the device yet
  read(loaded.get(), {tokens.data() + 3300, 300});
  read(other.get(), {tokens.data() + 3300, 300});
  CHECK(score(loaded.get(), {tokens.data() + 3600, 40}) ==
        score(other.get(), {tokens.data() + 3600, 40}));
}

TEST_CASE("a damaged page is an error of later prefill, and the sequence is as before") {
  if (!device_model()) return;
  TempFolder folder;
  const std::string path = damaged_file(folder);
  auto session = load(device_model(), path, bounded_options(200));
  const auto tokens = book_tokens(300);
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
  CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
  CHECK(session->tokens().size() == 3000);
}

TEST_CASE("hot quads stay valid when pages are sealed, and after rewinds over generated tokens") {
  if (!device_model()) return;
  auto session = load(device_model(), read_file(), bounded_options(64));
  const uint64_t sealed = stat_of(*session, "sealed_tokens");
  continue_with(session.get(), 1);
  CHECK(stat_of(*session, "last_tokens_on_gpu") == 0);
  const auto go_on = [&](int tokens) {
    for (int i = 0; i < tokens; ++i) {
      continue_with(session.get(), 1);
      REQUIRE(attends(*session));
      CHECK(stat_of(*session, "last_tokens_on_gpu") > 0);
    }
  };
  go_on(70);
  CHECK(stat_of(*session, "sealed_tokens") > sealed);
  REQUIRE(session->rewind(2990).ok());
  continue_with(session.get(), 1);
  go_on(20);
}

TEST_CASE("the logits of a token that a GPU chose are there for whatever comes next") {
  if (!device_model()) return;
  const auto tokens = book_tokens(3200);
  const std::span<const Token> next(tokens.data() + 3000, 6);
  const SamplingOptions greedy, largest{.temperature = 1, .top_k = 1};
  for (const char* strategy : {"bounded", "full", "quest"}) {
    CAPTURE(std::string(strategy));
    SessionOptions o = bounded_options(strategy == std::string("full") ? 0 : 200);
    o.select.strategy = strategy;
    const auto after = [&](const SamplingOptions& sampling, std::vector<Token>* chosen) {
      auto session = load(device_model(), read_file(), o);
      REQUIRE(session->prepare_devices(nullptr, {}).ok());
      for (int i = 0; i < 4; ++i) {
        bool end = false;
        REQUIRE(session->next(sampling, nullptr, &chosen->emplace_back(), &end).ok());
      }
      return session;
    };
    std::vector<Token> expected_tokens, chosen, ignored;
    const auto expected = after(largest, &expected_tokens), session = after(greedy, &chosen);
    CHECK(chosen == expected_tokens);
    const std::vector<float> scores = score(expected.get(), next);
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    CHECK(score(fork.get(), next) == scores);
    CHECK(score(session.get(), next) == scores);
    CHECK(score(after(greedy, &ignored).get(), next) == scores);
    const TempFolder folder;
    const auto saved = after(greedy, &ignored), goes_on = after(greedy, &ignored),
               asked = after(greedy, &ignored);
    REQUIRE(saved->save(folder.file("chosen.kv"), nullptr, {}).ok());
    const auto loaded = load(device_model(), folder.file("chosen.kv"), o);
    REQUIRE(loaded->prepare_devices(nullptr, {}).ok());
    const auto drawn = [](Session* of, const SamplingOptions& sampling) {
      Token token = -1;
      bool end = false;
      CHECK(of->next(sampling, nullptr, &token, &end).ok());
      return token;
    };
    const SamplingOptions random{.temperature = 1.5f, .seed = 7};
    const Token token = drawn(expected.get(), random);
    CHECK(drawn(goes_on.get(), random) == token);
    CHECK(drawn(session.get(), random) == token);
    // a step that is cancelled before it begins
    const auto stopped = after(greedy, &ignored);
    Cancel cancel;
    cancel.fire();
    Token none = -1;
    bool end = false;
    CHECK(stopped->next(greedy, &cancel, &none, &end).code() == Code::cancelled);
    CHECK(score(stopped.get(), next) == scores);
    const auto prepared = after(greedy, &ignored);
    REQUIRE(prepared->prepare_devices(nullptr, {}).ok());
    CHECK(drawn(prepared.get(), random) == token);
    // a rewind to where it is, and an answer without a question
    REQUIRE(asked->prepare_devices(nullptr, {}).ok());
    REQUIRE(asked->rewind(asked->tokens().size()).ok());
    GenerateOptions brief;
    brief.max_tokens = 5;
    CHECK(ask(asked.get(), "", brief) == ask(fork.get(), "", brief));
    CHECK(ask(loaded.get(), "", brief).size() > 0);
  }
}

TEST_CASE("hot quads use no memory that a fork needs") {
  if (!device_model()) return;
  constexpr uint64_t spare = uint64_t{1} << 26, step = uint64_t{1} << 18;
  const uint64_t weights = device_model()->device_weights().front().bytes();
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda", weights + spare, &model).ok());
  REQUIRE(model->device_weights().back().has_output());
  const std::shared_ptr<Device>& device = model->device_weights().front().device();
  const auto attended = [](Session* of) {  // its answer, by the device
    for (int i = 0; i < 3; ++i) {
      Token token = -1;
      bool end = false;
      const Status s = of->next({}, nullptr, &token, &end);
      if (s.code() == Code::no_memory) return false;  // not even for a step
      REQUIRE(s.ok());
    }
    return attends(*of);
  };
  int alone = 0, second_fork = 0;
  bool stays = false;
  for (uint64_t room = step; !stays; room += step) {
    REQUIRE(room < spare);
    DeviceBuffer<std::byte> others;  // that have the rest
    REQUIRE(others.allocate(device, device->left() - room, "others").ok());
    auto session = load(model, read_file(), bounded_options(200));
    if (!attended(session.get())) continue;
    stays = stat_of(*session, "last_tokens_on_gpu") > 0;
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    const bool too = attended(fork.get());
    if (stays) CHECK(too);
    ++(too ? second_fork : alone);
  }
  CHECK(alone > 0);
  CHECK(second_fork > 1);
}

TEST_CASE("a sequence without room on a device is attended by the CPU, and the statistics say so") {
  if (!device_model()) return;
  const auto tokens = book_tokens(4096);  // in whole chunks: a shorter one might find room
  SessionOptions o = bounded_options(200);
  o.prefill_chunk = 2048;  // whose workspace is more than what a model leaves free
  const DeviceWeights& weights = device_model()->device_weights().front();
  uint32_t by_processor = 0;
  for (uint64_t budget = weights.bytes();; budget += uint64_t{3} << 20) {
    REQUIRE(budget < uint64_t{1} << 30);
    std::shared_ptr<const Model> model;
    if (!open_on("cuda", budget, &model).ok()) continue;
    auto session = open_session(model, o);
    uint64_t done = 0;
    const Status s = session->prefill_tokens(tokens, nullptr, nullptr, {}, &done);
    CHECK(model->device_weights().front().device()->used() <= budget);
    if (s.code() == Code::no_memory) continue;
    REQUIRE_MESSAGE(s.ok(), s.message());
    if (attends(*session)) break;
    CHECK(session->stats_json().find("the GPU has no room for what its attention needs") !=
          std::string::npos);
    ++by_processor;
  }
  CHECK(by_processor > 0);
}

TEST_CASE("prefill on a device is cancelled within 100 ms, and goes on") {
  if (!device_model()) return;
  std::vector<Token> tokens = book_tokens(8000);
  const std::vector<Token> once = tokens;
  for (int i = 0; i < 7; ++i) tokens.insert(tokens.end(), once.begin(), once.end());
  auto session = open_session(device_model(), bounded_options(200));
#ifdef KVASIR_EMULATED_DEVICE
  constexpr double max_milliseconds = 5000;  // one thread emulates the device while other tests run
#else
  constexpr double max_milliseconds = 100;
#endif
  for (const int after : {20, 70, 150}) {
    Cancel cancel;
    std::chrono::steady_clock::time_point fired;
    std::thread thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(after));
      fired = std::chrono::steady_clock::now();
      cancel.fire();
    });
    uint64_t done = 0;
    const Status s = session->prefill_tokens(tokens, nullptr, &cancel, {}, &done);
    const auto returned = std::chrono::steady_clock::now();
    thread.join();
    REQUIRE_MESSAGE(s.code() == Code::cancelled, s.message());
    CHECK(std::chrono::duration<double, std::milli>(returned - fired).count() < max_milliseconds);
    CHECK(session->tokens().size() == done);
    REQUIRE(session->rewind(0).ok());
  }
  read(session.get(), {tokens.data(), 3000});
  auto other = open_session(device_model(), bounded_options(200));
  read(other.get(), {tokens.data(), 3000});
  CHECK(continue_with(session.get(), 8) == continue_with(other.get(), 8));
}
