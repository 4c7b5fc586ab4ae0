// Sequences of models with recurrent layers: their states are part of what was prefilled.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cachefile/cache_file.h"
#include "cachefile/pack.h"
#include "failing_allocations.h"
#include "kvasir.h"
#include "sequence_helpers.h"
#include "session/external_store.h"
#include "session/saved_checkpoints.h"
#include "session/saved_states.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;
using format::SectionKind;

namespace {

// One of each kind of layer and of each way to combine them.
constexpr const char* names[] = {"qwen3next",     "qwen35",    "lfm2moe",
                                 "granitehybrid", "falcon-h1", "nemotron_h"};

SessionOptions in_full_precision() {
  SessionOptions options;
  options.full_precision = true;
  return options;
}

// A model's file with bytes of one tensor replaced.
void with_tensor(const std::string& name, const std::string& tensor, float value,
                 const std::string& path) {
  std::ifstream in(FIXTURES "/models/" + name + ".gguf", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  const GgufTensor* t = gguf.find_tensor(tensor);
  REQUIRE(t);
  for (std::size_t at = 0; at < t->bytes; at += sizeof value)
    std::memcpy(&bytes[t->offset + at], &value, sizeof value);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

TEST_CASE("every model with recurrent layers gives the reference's logits token by token") {
  std::ifstream in(FIXTURES "/models/fixtures.json");
  std::size_t models = 0;
  for (const auto& entry : nlohmann::json::parse(in)) {
    const std::string file = entry["model"], name = file.substr(0, file.rfind('.'));
    const std::set<std::string> architectures = {"qwen3next", "qwen35",     "qwen35moe",
                                                 "lfm2",      "lfm2moe",    "granitehybrid",
                                                 "falcon-h1", "nemotron_h", "nemotron_h_moe"};
    if (!architectures.count(entry["arch"])) continue;
    CAPTURE(name);
    ++models;
    const std::vector<Token> tokens = entry["tokens"];
    const std::vector<std::size_t> positions = entry["positions"];
    const std::size_t vocabulary = fixture(name)->config().vocabulary;
    std::vector<float> expected(positions.size() * vocabulary), logits;
    std::ifstream(FIXTURES "/models/" + entry["logits"].get<std::string>(), std::ios::binary)
        .read(reinterpret_cast<char*>(expected.data()),
              static_cast<std::streamsize>(expected.size() * sizeof(float)));
    auto session = fresh(name, 0, in_full_precision());
    for (const Token token : tokens) {
      const std::vector<float> row = test::logits_after(session.get(), token);
      if (std::count(positions.begin(), positions.end(), session->tokens().size() - 1))
        logits.insert(logits.end(), row.begin(), row.end());
    }
    REQUIRE(logits.size() == expected.size());
    CHECK(difference(logits, expected) < 2e-5);
    // Steps that need the last token's output only advance the states of all layers too.
    const std::vector<float> last(expected.end() - static_cast<std::ptrdiff_t>(vocabulary),
                                  expected.end());
    for (const uint32_t chunk : {5u, 64u, 256u}) {
      SessionOptions options = in_full_precision();
      options.prefill_chunk = chunk;
      auto other = fresh(name, 0, options);
      test::read(other.get(), std::span(tokens).first(tokens.size() - 1));
      CHECK(difference(test::logits_after(other.get(), tokens.back()), last) < 2e-5);
    }
    for (std::size_t r = 0; r < positions.size(); ++r) {
      const auto largest = [&](const std::vector<float>& all) {
        const auto row = all.begin() + static_cast<std::ptrdiff_t>(r * vocabulary);
        return std::max_element(row, row + static_cast<std::ptrdiff_t>(vocabulary)) - row;
      };
      CHECK(largest(logits) == largest(expected));
    }
  }
  CHECK(models == 13);
}

TEST_CASE("recurrent layers: one thread and two compute the same bits") {
  for (const char* name : names) {
    CAPTURE(name);
    SessionOptions one, two;
    one.threads = 1, two.threads = 2;
    one.prefill_chunk = two.prefill_chunk = 100;
    check_same(*fresh(name, 330, one), *fresh(name, 330, two));
  }
}

TEST_CASE("a step that fails or is cancelled leaves the states as they were") {
  for (const char* name : names) {
    CAPTURE(name);
    const auto session = fresh(name, 100), control = fresh(name, 100);
    for (int i = 0; i < 3; ++i) {
      Cancel cancel;
      cancel.fire();
      uint64_t done = 0;
      const Status s = session->prefill_tokens(some_tokens(50), nullptr, &cancel, {}, &done);
      CHECK(s.code() == Code::cancelled);
      CHECK(done == 0);
    }
    check_same(*session, *control);
  }
}

TEST_CASE("a question without memory leaves the states as they were") {
  for (const char* name : {"qwen35", "falcon-h1"}) {
    CAPTURE(name);
    const std::vector<Token> more = some_tokens(40);
    const auto control = fresh(name, 100), longer = fresh(name, 100);
    test::read(longer.get(), more);
    const auto session = fresh(name, 100);
    bool reached = true;
    for (long first = 0; reached; ++first) {
      CAPTURE(first);
      const auto fork = first % 2 ? fork_of(*session) : fresh(name, 100);
      bool failed = false;
      {
        const FailingAllocations failing(first, true);
        uint64_t done = 0;
        try {
          failed = !fork->prefill_tokens(more, nullptr, nullptr, {}, &done).ok();
        } catch (const std::bad_alloc&) {
          failed = true;
        }
        reached = failing.reached();
      }
      REQUIRE(fork->tokens().size() == (failed ? 100 : 140));
      if (first % 7 == 0) check_same(*fork, failed ? *control : *longer);
    }
    check_same(*session, *control);
  }
}

TEST_CASE("a sequence with states is the same saved, loaded and forked") {
  TempFolder folder;
  for (const char* name : names)
    for (const SessionOptions& options : {SessionOptions(), in_full_precision()}) {
      CAPTURE(name);
      const auto session = fresh(name, 700, options), control = fresh(name, 700, options);
      save(session.get(), folder.file("a.kv"));
      const auto other = loaded(name, folder.file("a.kv"), 0, options), fork = fork_of(*session);
      CHECK(again(*other) == 0);
      check_same(*other, *control);
      // what follows in one does not change the others
      test::read(fork.get(), some_tokens(60));
      check_same(*session, *control);
      save(other.get(), folder.file("b.kv"));
      check_same(*loaded(name, folder.file("b.kv"), 0, options), *control);
    }
}

TEST_CASE("ask and go back is exact: on one session, on forks and after a load") {
  TempFolder folder;
  for (const char* name : names)
    for (const SessionOptions& options : {SessionOptions(), in_full_precision()}) {
      CAPTURE(name);
      CAPTURE(options.full_precision);
      constexpr std::size_t document = 500;
      const auto session = fresh(name, document, options);
      save(session.get(), folder.file("a.kv"));
      const auto other = loaded(name, folder.file("a.kv"), 0, options);
      GenerateOptions ask;
      ask.max_tokens = 12;
      for (int i = 0; i < 10; ++i) {
        const std::string question = "question " + std::string(static_cast<std::size_t>(i), '?');
        const auto alone = fresh(name, document, options);
        const std::string expected = test::ask(alone.get(), question, ask);
        CHECK(test::ask(session.get(), question, ask) == expected);
        CHECK(test::ask(other.get(), question, ask) == expected);
        CHECK(test::ask(fork_of(*session).get(), question, ask) == expected);
        GenerateOptions keep = ask;
        keep.keep = true;
        const auto kept = fork_of(i % 2 ? *session : *other);
        CHECK(test::ask(kept.get(), question, keep) == expected);
        CHECK(kept->tokens().size() > document);
        REQUIRE(kept->rewind(document).ok());
        CHECK(test::ask(kept.get(), question, ask) == expected);
        CHECK(again(*kept) == 0);
      }
      check_same(*session, *fresh(name, document, options));
      check_same(*other, *session);
    }
}

TEST_CASE("a rewind goes on from the nearest state that was kept, and says what it costs") {
  SessionOptions options;
  options.prefill_chunk = 256;
  for (const char* name : {"qwen35", "lfm2moe"}) {
    CAPTURE(name);
    const auto session = fresh(name, 2600, options);
    REQUIRE(session->rewind(2500).ok());
    CHECK(session->tokens().size() == 2500);
    CHECK(again(*session) == 0);  // the next step does it
    const std::vector<float> logits = test::logits_after(session.get(), 100);
    CHECK(again(*session) == 2500 - 2048);
    const auto whole = fresh(name, 2500, options);
    CHECK(difference(logits, test::logits_after(whole.get(), 100)) < 0.03);
    // to a position that was kept; before all of them
    const auto at = fresh(name, 2600, options);
    REQUIRE(at->rewind(1024).ok());
    CHECK(difference(test::logits_after(at.get(), 100),
                     test::logits_after(fresh(name, 1024, options).get(), 100)) < 0.03);
    CHECK(again(*at) == 0);
    REQUIRE(at->rewind(900).ok());
    check_same(*at, *fresh(name, 900, options));
    CHECK(test::continue_with(at.get(), 3) ==
          test::continue_with(fresh(name, 900, options).get(), 3));
    CHECK(again(*at) == 900);
  }
}

TEST_CASE("the next token after a rewind needs the last token's logits, which are computed again") {
  const auto session = fresh("qwen35", 400, in_full_precision());
  const std::vector<Token> expected = test::continue_with(session.get(), 5);
  REQUIRE(session->rewind(400).ok());  // the document's end, whose logits were kept
  CHECK(test::continue_with(session.get(), 5) == expected);
  CHECK(again(*session) == 0);
  REQUIRE(session->rewind(390).ok());
  const std::vector<Token> earlier = test::continue_with(session.get(), 5);
  CHECK(again(*session) == 390);
  CHECK(earlier == test::continue_with(fresh("qwen35", 390, in_full_precision()).get(), 5));
  // Another text of the same length has other logits.
  REQUIRE(session->rewind(300).ok());
  const std::vector<Token> others(100, 65);
  test::read(session.get(), others);
  const auto control = fresh("qwen35", 300, in_full_precision());
  test::read(control.get(), others);
  CHECK(test::continue_with(session.get(), 5) == test::continue_with(control.get(), 5));
  REQUIRE(session->rewind(400).ok());
  REQUIRE(control->rewind(400).ok());
  CHECK(test::continue_with(session.get(), 5) == test::continue_with(control.get(), 5));
}

TEST_CASE("checkpoints are saved, and a prefix costs at most the way from one") {
  TempFolder folder;
  SessionOptions options;
  options.prefill_chunk = 256;
  const auto session = fresh("qwen35", 3000, options);
  save(session.get(), folder.file("a.kv"));
  const auto prefix = loaded("qwen35", folder.file("a.kv"), 2800, options);
  CHECK(again(*prefix) == 2800 - 2048);
  CHECK(difference(test::logits_after(prefix.get(), 100),
                   test::logits_after(fresh("qwen35", 2800, options).get(), 100)) < 0.03);
  const auto other = loaded("qwen35", folder.file("a.kv"), 0, options);
  REQUIRE(other->rewind(2100).ok());
  (void)test::logits_after(other.get(), 100);
  CHECK(again(*other) == 2100 - 2048);
  // A loaded sequence saves the checkpoints that it has not read.
  const auto third = loaded("qwen35", folder.file("a.kv"), 0, options);
  save(third.get(), folder.file("b.kv"));
  CHECK(again(*loaded("qwen35", folder.file("b.kv"), 1100, options)) == 1100 - 1024);
}

TEST_CASE("a file says which states it has, and which prefixes they serve") {
  TempFolder folder;
  SessionOptions options;
  options.prefill_chunk = 256;
  const std::string path = folder.file("a.kv");
  kv_file_info info{};
  info.struct_size = sizeof info;
  save(fresh("qwen35", 2600, options).get(), path);
  REQUIRE(kv_file_inspect(path.c_str(), &info, nullptr) == KV_OK);
  const ModelConfig& config = fixture("qwen35")->config();
  CHECK(info.recurrent_layers == 3);
  CHECK(info.states == 3);  // after 1024 and 2048 tokens, and at the end
  CHECK(info.state_bytes == 3 * config.state_size() * sizeof(float));
  CachePeek peek;
  REQUIRE(CachePeek::open(path, &peek).ok());
  for (const auto& [tokens, expected] : {std::pair(900u, false), std::pair(1030u, false),
                                         std::pair(1100u, true), std::pair(2600u, true)}) {
    CAPTURE(tokens);
    bool serves = !expected;
    REQUIRE(prefix_serves(peek, {}, config, tokens, &serves).ok());
    CHECK(serves == expected);
  }
  save(fresh("qwen35", 0).get(), path);
  REQUIRE(kv_file_inspect(path.c_str(), &info, nullptr) == KV_OK);
  CHECK(info.states == 0);
  CHECK(info.recurrent_layers == 3);
}

TEST_CASE("every strategy answers over the layers that attend") {
  for (const char* strategy : {"full", "window", "quest", "flat", "dipr", "bounded", "ood", "hnsw",
                               "dipr-graph", "filter-layers", "snapkv", "infllm", "ivf"}) {
    CAPTURE(strategy);
    SessionOptions options;
    options.select.strategy = strategy;
    options.select.budget_tokens = 128;
    const auto session = fresh("falcon-h1", 1300, options);
    GenerateOptions ask;
    ask.max_tokens = 4;
    const std::string text = test::ask(session.get(), "?", ask);
    CHECK(test::ask(session.get(), "?", ask) == text);
    (void)test::continue_with(session.get(), 2);
  }
}

TEST_CASE("checkpoints are bounded and denser near the end; a fork's are its own") {
  RecurrentState states(2, 8, 4);
  const auto step = [](RecurrentState* s, float value) {
    s->prepare();
    for (uint32_t l = 0; l < s->layers(); ++l) std::fill_n(s->next(l), s->layer_size(), value);
    s->commit(100);
  };
  const auto value = [](const RecurrentState& s) { return s.now(1)[7]; };
  states.prepare();
  CHECK(value(states) == 0);
  for (int i = 1; i <= 40; ++i) {
    step(&states, static_cast<float>(i));
    REQUIRE(states.keep().ok());
    REQUIRE(states.keep().ok());
    CHECK(states.checkpoints() <= 4 + 1);  // one is at the end
    CHECK(states.bytes() <= states.max_bytes());
  }
  CHECK(states.last_checkpoint() == 4000);
  for (std::size_t i = 0; i + 2 < 4; ++i)  // gaps shrink towards the end
    CHECK(states.checkpoint_at(i + 1) - states.checkpoint_at(i) >=
          states.checkpoint_at(i + 2) - states.checkpoint_at(i + 1));
  RecurrentState fork(states);
  step(&fork, 77);
  CHECK(value(states) == 40);
  CHECK(states.resume_point(4000) == 4000);
  CHECK(states.resume_point(50) == 0);
  const uint64_t earlier = states.checkpoint_at(2);
  CHECK(states.resume_point(earlier + 99) == earlier);
  REQUIRE(states.rewind(earlier).ok());
  CHECK(states.tokens() == earlier);
  CHECK(value(states) == static_cast<float>(earlier / 100));
  CHECK(states.checkpoints() == 3);
  CHECK(fork.tokens() == 4100);
  CHECK(value(fork) == 77);
  CHECK(fork.checkpoints() == 4);
  REQUIRE(states.rewind(0).ok());
  states.prepare();
  CHECK(value(states) == 0);
  CHECK(states.saved() == 0);
  CHECK(states.rewind(100).code() == Code::internal);

  // A file may have more than this session keeps.
  std::vector<uint64_t> saved(64);
  for (std::size_t i = 0; i < saved.size(); ++i) saved[i] = 10 * (i + 1);
  states.restore(saved, 640, std::shared_ptr<float[]>(new float[states.size()]()), nullptr);
  CHECK(states.tokens() == 640);
  CHECK(states.checkpoints() == 4 + 1);
  CHECK(states.saved() == 4 + 1);
  step(&states, 1);
  CHECK(states.saved() == 5);
}

TEST_CASE("states that would be dropped before the document's end are not copied") {
  RecurrentState states(1, 8, 4);
  constexpr uint64_t end = 12800, interval = 100;
  uint32_t kept = 0;
  while (states.tokens() < end) {
    states.prepare();
    std::fill_n(states.next(0), states.layer_size(), 1.0f);
    states.commit(interval);
    // While a document is read it ends at the newest token.
    states.limit_checkpoints({4, states.tokens(), end});
    if (!states.outlives({4, CheckpointLimits::none, end}, interval)) continue;
    REQUIRE(states.keep().ok());
    ++kept;
  }
  CHECK(kept <= 7);
  CHECK(states.checkpoints() == 4 + 1);
  CHECK(states.last_checkpoint() == end);
}

TEST_CASE("a memory limit counts the states") {
  const auto model = fixture("qwen35");
  KvStore store(model->store_shape(), 64);
  MemoryBudget budget;
  budget.step_tokens = 128;
  const uint64_t without = store.min_bytes(1000);
  REQUIRE(store.set_budget(budget, 0).ok());
  const uint64_t step = store.min_bytes(1000);
  CHECK(step > without);
  budget.states = 12345;
  REQUIRE(store.set_budget(budget, 0).ok());
  CHECK(store.min_bytes(1000) == step + 12345);
  TempFolder folder;
  SessionOptions options;
  options.prefill_chunk = 128;
  options.memory.spill_folder = folder.path();
  options.memory.bytes = 16 << 20;
  const auto session = fresh("qwen35", 3900, options);
  CHECK(session->stats().states_bytes > 0);
  CHECK(session->stats().private_bytes <= options.memory.bytes);
  check_same(*session, *fresh("qwen35", 3900, SessionOptions{.prefill_chunk = 128}));
}

TEST_CASE("weights that make a state infinite fail the step by name") {
  TempFolder folder;
  for (const auto& [name, tensor] :
       {std::pair("qwen35", "blk.0.ssm_a"), std::pair("granitehybrid", "blk.0.ssm_a"),
        std::pair("falcon-h1", "blk.0.ssm_d"), std::pair("lfm2", "blk.0.shortconv.conv.weight")}) {
    CAPTURE(name);
    with_tensor(name, tensor, 3e38f, folder.file("a.gguf"));
    const auto session = test::open_session(test::open_model(folder.file("a.gguf")));
    for (const std::size_t n : {1u, 40u}) {
      uint64_t done = 7;
      const Status s = session->prefill_tokens(some_tokens(n), nullptr, nullptr, {}, &done);
      CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
      CHECK(std::string(s.message()).find("layer 0 made NaN or infinity") == 0);
      CHECK(session->tokens().empty());
    }
  }
}

TEST_CASE("damage in the section of states is found") {
  TempFolder folder;
  SessionOptions options;
  options.prefill_chunk = 256;
  const auto session = fresh("qwen35", 1500, options);
  const std::string path = folder.file("a.kv"), damaged = folder.file("b.kv");
  save(session.get(), path);
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  const CacheFile::Section* section = file->find(SectionKind::recurrent);
  REQUIRE(section);
  std::ifstream in(path, std::ios::binary);
  const std::string sound((std::istreambuf_iterator<char>(in)), {});
  const auto load_with = [&](uint64_t at) {
    std::string bytes = sound;
    bytes[section->offset + at] ^= 1;
    std::ofstream(damaged, std::ios::binary | std::ios::trunc) << bytes;
    std::unique_ptr<Session> other;
    Status s = Session::load(fixture("qwen35"), damaged, options, false, nullptr, {}, &other);
    if (s.ok()) s = other->rewind(1024);  // reads the checkpoint
    return s;
  };
  for (const uint64_t at :
       {uint64_t{0}, uint64_t{5}, uint64_t{20}, uint64_t{5000}, section->bytes - 1}) {
    CAPTURE(at);
    const Status s = load_with(at);
    CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
  }
}

TEST_CASE("a file with states packs and unpacks to the same bytes") {
  TempFolder folder;
  const auto session = fresh("nemotron_h", 400);
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  save(session.get(), path);
  REQUIRE(pack(path, folder.file("a.kvz"), default_level, nullptr, nullptr).ok());
  REQUIRE(unpack(folder.file("a.kvz"), other, nullptr, nullptr).ok());
  const auto bytes_of = [](const std::string& name) {
    std::ifstream in(name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  CHECK(bytes_of(path) == bytes_of(other));
}

TEST_CASE("a cache of another engine has no states and is refused") {
  BareOptions options;
  options.shape = fixture("qwen35")->config();
  options.max_tokens = 100;
  std::unique_ptr<ExternalStore> cache;
  REQUIRE(ExternalStore::open(options, &cache).ok());
  const std::vector<Token> tokens = some_tokens(10);
  std::unique_ptr<Session> session;
  const Status s = Session::adopt(fixture("qwen35"), *cache, tokens, {}, {}, nullptr, {}, &session);
  CHECK(s.code() == Code::unsupported);
  CHECK(std::string(s.message()).find("recurrent") != std::string::npos);
}
