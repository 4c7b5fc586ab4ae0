// Checkpoints of layers that see a window: what a rewind, a prefix and an edit cost.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/little_endian.h"
#include "cachefile/format_fields.h"
#include "cachefile/pack.h"
#include "failing_allocations.h"
#include "kvasir.h"
#include "made_model.h"
#include "sequence_helpers.h"
#include "session/saved_checkpoints.h"
#include "session/saved_windows.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;
using format::SectionKind;

namespace {

constexpr uint64_t interval = 512;  // a multiple of the chunk

// Layers with windows of 32 tokens, whose extents have 128 tokens: the store drops most of them.
std::shared_ptr<const Model> model() {
  static const auto model = [] {
    ModelRecipe recipe;
    recipe.architecture = "gemma3";
    recipe.layers = 4, recipe.heads = 2, recipe.kv_heads = 1, recipe.head_dim = 256;
    recipe.context = 16384, recipe.window = 32;
    recipe.more_keys = [](GgufBuilder* b, const std::string& at) {
      b->key(at + "attention.sliding_window_pattern", uint32_t{2});
    };
    const std::vector<std::byte> bytes = make_model(recipe).build();
    TempFolder folder;
    std::ofstream(folder.file("a.gguf"), std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return open_model(folder.file("a.gguf"));
  }();
  return model;
}

SessionOptions options_of() {
  SessionOptions options;
  options.prefill_chunk = 256;
  options.checkpoint_interval = interval;
  options.select.strategy = "full";  // others know the queries of later tokens
  return options;
}

std::unique_ptr<Session> document(std::span<const Token> tokens,
                                  const SessionOptions& options = options_of()) {
  auto session = open_session(model(), options);
  read(session.get(), tokens);
  return session;
}

// A text that is common up to `common` tokens.
std::vector<Token> text(std::size_t n, std::size_t common = SIZE_MAX) {
  std::vector<Token> tokens = some_tokens(n);
  for (std::size_t i = common; i < n; ++i) tokens[i] = 3 + (tokens[i] + 50) % 250;
  return tokens;
}

std::unique_ptr<Session> load(const std::string& path, uint64_t tokens = 0,
                              const SessionOptions& options = options_of()) {
  std::unique_ptr<Session> session;
  const Status s = Session::load(model(), path, options, true, nullptr, {}, &session, tokens);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return session;
}

std::vector<uint64_t> checkpoints_of(const std::string& path) {
  CachePeek peek;
  std::vector<uint64_t> out;
  REQUIRE(CachePeek::open(path, &peek).ok());
  REQUIRE(list_checkpoints(peek, &out).ok());
  return out;
}

uint64_t windows_bytes(const Session& session) { return session.stats().windows_bytes; }

}  // namespace

TEST_CASE("the windows of a long text are dropped but for those of checkpoints") {
  const auto session = document(text(6000));
  const uint64_t token = 2 * 2 * 256;  // of two layers, keys and values
  CHECK(session->stats().checkpoints == 6000 / interval);
  CHECK(windows_bytes(*session) < 6000 * token * 3 / 4);
  CHECK(windows_bytes(*session) <=
        KvStore::max_bytes(model()->windows_shape(), 64, 6000, 256, 6000 / interval));
}

TEST_CASE("a rewind within windows costs at most an interval, whatever came after it") {
  for (const uint64_t to : {5990u, 5600u, 3100u, 1024u, 700u, 100u}) {
    CAPTURE(to);
    const auto session = document(text(6000)), other = document(text(6000, to));
    REQUIRE(session->rewind(to).ok());
    REQUIRE(other->rewind(to).ok());
    CHECK(again(*session) == 0);  // the next step does it
    check_same(*session, *other);
    const std::vector<float> logits = logits_after(session.get(), 100);
    CHECK(again(*session) <= interval);
    if (to == 5990 || to == 1024) CHECK(again(*session) == 0);
    CHECK(difference(logits, logits_after(document(text(to)).get(), 100)) < 0.03);
    // and it can be rewound again
    REQUIRE(session->rewind(to / 2).ok());
    (void)logits_after(session.get(), 100);
    CHECK(again(*session) <= 2 * interval);
  }
}

TEST_CASE("a prefix costs at most an interval and a window, and later tokens do not change it") {
  TempFolder folder;
  save(document(text(6000)).get(), folder.file("a.kv"));
  for (const uint64_t tokens : {5400u, 5990u, 3333u, 1030u, 90u}) {
    CAPTURE(tokens);
    save(document(text(6000, tokens)).get(), folder.file("b.kv"));
    const auto one = load(folder.file("a.kv"), tokens), two = load(folder.file("b.kv"), tokens);
    CHECK(one->tokens().size() == tokens);
    CHECK(again(*one) <= interval + 64 + 16);
    check_same(*one, *two);
    CHECK(difference(logits_after(one.get(), 100),
                     logits_after(document(text(tokens)).get(), 100)) < 0.03);
  }
}

TEST_CASE("a prefix under a low limit keeps the checkpoint at which it began") {
  TempFolder folder;
  save(document(text(6000)).get(), folder.file("a.kv"));
  SessionOptions options = options_of();
  options.memory.spill_folder = folder.path();
  options.memory.bytes = 8 << 20;
  REQUIRE(choose_checkpoints(*model(), 64, options.memory.bytes) <= 2);
  for (const uint64_t tokens : {3333u, 1500u}) {
    CAPTURE(tokens);
    const auto session = load(folder.file("a.kv"), tokens, options);
    CHECK(again(*session) <= interval + 64 + 16);
    const uint64_t before = again(*session);
    REQUIRE(session->rewind(tokens - 200).ok());
    (void)logits_after(session.get(), 100);
    CHECK(again(*session) - before <= interval);
  }
}

TEST_CASE("a rewind to the document's end costs nothing, however far into an answer one went") {
  TempFolder folder;
  SessionOptions options = options_of();
  options.prefill_chunk = 16, options.checkpoint_interval = 16;
  for (const bool windows : {true, false}) {
    CAPTURE(windows);
    const auto at_end = [&](Session* s) {
      const uint64_t before = again(*s);
      REQUIRE(s->rewind(1000).ok());
      (void)continue_with(s, 1);
      return again(*s) - before;
    };
    const auto session = open_session(windows ? model() : fixture("qwen35"), options);
    read(session.get(), text(1000));
    (void)continue_with(session.get(), 1000);
    REQUIRE(session->rewind(1800).ok());
    (void)continue_with(session.get(), 1);
    CHECK(again(*session) > 500);
    save(session.get(), folder.file("a.kv"));
    const auto other = windows ? load(folder.file("a.kv"), 0, options)
                               : loaded("qwen35", folder.file("a.kv"), 0, options);
    REQUIRE(other->rewind(1000).ok());
    CHECK(other->store().tokens() == 1000);
    CHECK(at_end(session.get()) == 0);
  }
}

TEST_CASE("no position of an answer becomes a checkpoint, though the document's end is none") {
  TempFolder folder;
  const auto session = document(text(400));
  (void)continue_with(session.get(), 5);
  save(session.get(), folder.file("a.kv"));
  rewrite_section(folder.file("a.kv"), folder.file("b.kv"), SectionKind::windows,
                  [](std::vector<std::byte>* bytes, uint32_t*) {
                    auto* at = reinterpret_cast<uint8_t*>(bytes->data());
                    store32(at + format::windows_at("checkpoints"), 0);
                    store64(at + format::windows_at("tokens of the first checkpoint"), 0);
                  });
  const auto other = load(folder.file("b.kv"));
  REQUIRE(other->stats().checkpoints == 0);
  (void)continue_with(other.get(), 2);
  CHECK(other->stats().checkpoints == 0);
}

TEST_CASE("the checkpoint where the document ends is dropped last") {
  const auto left = [](uint32_t most, uint64_t stays) {
    std::vector<uint64_t> at;
    for (uint64_t i = 1; i <= 40; ++i) {
      at.push_back(100 * i);
      thin_out(
          {most, stays}, 100 * i, [](uint64_t x) { return x; }, &at);
      CHECK(at.size() <= most + (most > 0));  // one is at the end
    }
    return at;
  };
  const auto has = [](const std::vector<uint64_t>& at, uint64_t x) {
    return std::find(at.begin(), at.end(), x) != at.end();
  };
  for (const uint32_t most : {1u, 2u, 3u, 8u}) {
    CAPTURE(most);
    CHECK(left(most, 1000).size() == most + 1);
    CHECK(has(left(most, 1000), 1000));
    CHECK(has(left(most, 901), 1000));  // the first one behind it
    CHECK(!has(left(most, CheckpointLimits::none), 1000));
    CHECK(has(left(most, 5000), 4000));
    CHECK(has(left(most, 1000), 4000));
  }
  CHECK(left(0, 1000).empty());
}

TEST_CASE("checkpoints that would be dropped before the document's end are left out") {
  const auto same = [](uint64_t x) { return x; };
  for (const uint32_t most : {1u, 3u, 8u, 32u})
    for (const uint64_t end : {900u, 5000u, 32768u, 131069u}) {
      CAPTURE(most);
      CAPTURE(end);
      const CheckpointLimits limits{most, CheckpointLimits::none, end};
      std::vector<uint64_t> all, some;
      uint32_t kept = 0;
      for (uint64_t at = 1024; at <= end; at += 1024) {
        all.push_back(at);
        thin_out(limits, at, same, &all);
        if (!outlives(limits, some, at, 1024)) continue;
        some.push_back(at), ++kept;
        thin_out(limits, at, same, &some);
      }
      CHECK(kept <= most + most / 4 + 2);
      CHECK(some.size() == all.size());
      // From each position the way to the nearest one is as long as before, or little longer.
      const auto way = [&](const std::vector<uint64_t>& kept_at, uint64_t from) {
        uint64_t nearest = 0;
        for (const uint64_t at : kept_at)
          if (at <= from) nearest = at;
        return from - nearest;
      };
      for (uint64_t from = end; from > 1024; from -= 1024)
        CHECK(way(some, from) <= 4 * std::max(way(all, from), (end - from) / 2 + 1024));
    }
}

TEST_CASE("a prefix of nine tenths costs an interval, and near the end little more") {
  constexpr uint64_t interval_tokens = 1024;
  const auto same = [](uint64_t x) { return x; };
  for (const uint32_t most : {2u, 3u, 4u, 8u})
    for (const uint64_t end : {20000u, 60000u, 130772u, 131072u}) {
      CAPTURE(most);
      CAPTURE(end);
      std::vector<uint64_t> kept;
      for (uint64_t at = interval_tokens; at <= end; at += interval_tokens) {
        kept.push_back(at);
        thin_out({most, CheckpointLimits::none, end}, at, same, &kept);
      }
      const auto cost = [&](uint64_t to) {
        const auto behind = std::upper_bound(kept.begin(), kept.end(), to);
        return to - (behind == kept.begin() ? 0 : *(behind - 1));
      };
      CHECK(cost(end - end / 10) <= interval_tokens);
      CHECK(cost(end) <= interval_tokens);
      for (uint64_t to = end - end / 10; to < end; to += 100)
        CHECK(cost(to) <= end / 10 + interval_tokens);
    }
}

TEST_CASE("checkpoints before the end add at most 15% to the pages, or 192 MiB") {
  const Model& m = *fixture("qwen35");
  const uint64_t state = m.config().state_size() * sizeof(float);
  const StoreShape& shape = m.store_shape();
  for (const uint64_t pages : {uint64_t{1} << 30, uint64_t{1522} << 20, uint64_t{1} << 34}) {
    const uint64_t tokens = pages / shape.slab_bytes() * shape.page.extent_tokens();
    CHECK(checkpoints_of(m, 64, tokens, UINT32_MAX) * state <=
          std::max<uint64_t>(192 << 20, pages / 100 * 15));
  }
  // However a sequence goes on, its states before the end are as many as it may have.
  RecurrentState states(1, 8, 3);
  const auto step = [&](uint32_t n) {
    states.prepare();
    std::fill_n(states.next(0), 8, 1.0f);
    states.commit(n);
    CHECK(states.saved() <= 3 + 1);
  };
  for (int i = 0; i < 20; ++i) {
    step(100);
    REQUIRE(states.keep().ok());
    CHECK(states.saved() <= 3 + 1);
  }
  step(1);
  RecurrentState fork(states);
  CHECK(fork.saved() <= 3 + 1);
  std::vector<uint64_t> saved = {100, 200, 300, 400, 500, 600};
  states.restore(saved, 600, states.make(), nullptr);
  CHECK(states.saved() <= 3 + 1);
  step(1);
}

TEST_CASE("a prefill is complete though its checkpoint has no room") {
  for (const bool windows : {true, false}) {
    CAPTURE(windows);
    int warnings = 0;
    SessionOptions options = options_of();
    options.log = [&](int level, const char* message) {
      warnings += level == 1 && std::string(message).find("no checkpoint was kept after 512") == 0;
    };
    const auto session = open_session(windows ? model() : fixture("qwen35"), options);
    read(session.get(), text(256));
    const std::vector<Token> more = some_tokens(256, 5);
    bool reached = true;
    int without = 0;
    for (long first = 0; reached; ++first) {
      const auto fork = fork_of(*session);
      uint64_t done = 0;
      Status s;
      {
        const FailingAllocations failing(first, true);
        try {
          s = fork->prefill_tokens(more, nullptr, nullptr, {}, &done);
        } catch (const std::bad_alloc&) {
          done = 0;
        }
        reached = failing.reached();
      }
      if (done < more.size()) continue;
      CHECK_MESSAGE(s.ok(), s.message());
      without += fork->stats().checkpoints == 0;
    }
    CHECK(without > 0);
    CHECK(warnings == without);
  }
}

TEST_CASE("an edit at the end of a document costs at most an interval") {
  TempFolder folder;
  const auto session = document(text(6000)), other = document(text(6000, 5500));
  save(session.get(), folder.file("a.kv"));
  const auto third = load(folder.file("a.kv"));
  for (Session* s : {session.get(), other.get(), third.get()}) {
    REQUIRE(s->rewind(5500).ok());
    read(s, some_tokens(400, 99));
    CHECK(again(*s) <= interval);
  }
  check_same(*session, *other);
  check_same(*session, *third);
}

TEST_CASE("checkpoints are the same saved, loaded, forked and packed") {
  TempFolder folder;
  const auto session = document(text(3000));
  (void)continue_with(session.get(), 600);
  const std::vector<uint64_t> expected = {512, 1024, 1536, 2048, 2560, 3000};
  save(session.get(), folder.file("a.kv"));
  CHECK(checkpoints_of(folder.file("a.kv")) == expected);
  const auto other = load(folder.file("a.kv")), fork = fork_of(*session);
  save(other.get(), folder.file("b.kv"));
  CHECK(read_file(folder.file("a.kv")) == read_file(folder.file("b.kv")));
  REQUIRE(pack(folder.file("a.kv"), folder.file("a.kvz"), default_level, nullptr, nullptr).ok());
  REQUIRE(unpack(folder.file("a.kvz"), folder.file("c.kv"), nullptr, nullptr).ok());
  CHECK(read_file(folder.file("a.kv")) == read_file(folder.file("c.kv")));
  for (const uint64_t to : {3400u, 3000u, 2700u, 1600u, 1024u}) {
    for (Session* s : {session.get(), other.get(), fork.get()}) REQUIRE(s->rewind(to).ok());
    check_same(*session, *other);
    check_same(*session, *fork);
  }
}

TEST_CASE("a step that fails or is cancelled leaves the checkpoints as they were") {
  const auto session = document(text(2000)), control = document(text(2000));
  const auto rewound = fork_of(*control);
  REQUIRE(rewound->rewind(1500).ok());
  const std::vector<Token> more = some_tokens(300, 5);
  Cancel cancel;
  cancel.fire();
  uint64_t done = 0;
  CHECK(session->prefill_tokens(more, nullptr, &cancel, {}, &done).code() == Code::cancelled);
  CHECK(session->stats().checkpoints == control->stats().checkpoints);
  bool reached = true;
  for (long first = 0; reached; first += 3) {
    const auto fork = fork_of(*session);
    {
      const FailingAllocations failing(first, true);
      try {
        (void)fork->prefill_tokens(more, nullptr, nullptr, {}, &done);
      } catch (const std::bad_alloc&) {
      }
      reached = failing.reached();
    }
    REQUIRE(fork->rewind(1500).ok());
    if (first % 4 == 0) check_same(*fork, *rewound);
  }
  check_same(*session, *control);
}

TEST_CASE("a memory limit bounds the checkpoints, and a rewind is exact") {
  TempFolder folder;
  SessionOptions options = options_of();
  options.memory.spill_folder = folder.path();
  options.memory.bytes = 12 << 20;
  const auto limited = document(text(6000), options);
  const SessionStats stats = limited->stats();
  CHECK(stats.private_bytes <= options.memory.bytes);
  CHECK(stats.checkpoints >= 1);
  CHECK(stats.checkpoints < 6000 / interval);
  CHECK(uint64_t{stats.checkpoints} * KvStore::checkpoint_bytes(model()->windows_shape(), 64) <=
        options.memory.bytes / 8);
  const auto other = document(text(6000, 5700), options);
  for (const auto& s : {limited.get(), other.get()}) REQUIRE(s->rewind(5700).ok());
  check_same(*limited, *other);
  (void)logits_after(limited.get(), 100);
  CHECK(again(*limited) <= interval);
}

TEST_CASE("intervals are four windows, and checkpoints take half a gigabyte at most") {
  CHECK(choose_checkpoint_interval(*model()) == 1024);
  CHECK(choose_checkpoints(*model(), 64, 0) == 32);
  CHECK(choose_checkpoints(*model(), 64, 1 << 20) == 1);
  CHECK(choose_checkpoints(*fixture("llama-f32"), 64, 0) == 0);
  CHECK(choose_checkpoints(*fixture("qwen35"), 64, 0) == 32);
  // 15% of the pages, or 192 MiB.
  const uint64_t state = fixture("qwen35")->config().state_size() * sizeof(float);
  const auto least = static_cast<uint32_t>((192 << 20) / state);
  CHECK(checkpoints_of(*fixture("qwen35"), 64, 1000, 1 << 20) == least);
  const StoreShape& shape = fixture("qwen35")->store_shape();
  const uint64_t tokens = (uint64_t{1} << 33) / shape.slab_bytes() * shape.page.extent_tokens();
  CHECK(std::abs(static_cast<double>(checkpoints_of(*fixture("qwen35"), 64, tokens, 1 << 30)) *
                     static_cast<double>(state) / static_cast<double>(uint64_t{1} << 33) -
                 0.15) < 0.001);
  CHECK(checkpoints_of(*fixture("qwen35"), 64, 1000, 2) == 2);
  const StoreShape gemma = {29, 4, PageShape::of(256), 1024};  // Gemma 3 4B
  CHECK(KvStore::checkpoint_bytes(gemma, 64) < 100 << 20);
}

TEST_CASE("files of version 1 of the windows are read") {
  TempFolder folder;
  for (const bool answered : {false, true}) {
    CAPTURE(answered);
    const auto session = document(text(900), SessionOptions{.prefill_chunk = 256});
    if (answered) (void)continue_with(session.get(), 700);
    const std::string path = folder.file("a.kv"), old = folder.file("b.kv");
    save(session.get(), path);
    SavedWindows windows = SavedWindows::of(*session->windows());
    REQUIRE(windows.runs.size() <= 2);
    rewrite_section(path, old, SectionKind::windows,
                    [&](std::vector<std::byte>* bytes, uint32_t* version) {
                      *version = 1;
                      bytes->assign(32, std::byte{});
                      auto* at = reinterpret_cast<uint8_t*>(bytes->data());
                      store32(at, windows.rows), store32(at + 4, windows.pages);
                      store64(at + 8, 900);
                      if (windows.runs.size() == 1)
                        windows.runs.insert(windows.runs.begin(), {0, 0});
                      for (int i = 0; i < 2; ++i) {
                        store32(at + 16 + 8 * i, windows.runs[static_cast<std::size_t>(i)].begin);
                        store32(at + 20 + 8 * i, windows.runs[static_cast<std::size_t>(i)].end);
                      }
                    });
    const auto one = load(path), two = load(old);
    check_same(*one, *two);
    CHECK(two->stats().checkpoints == (answered ? 1 : 0));
    for (Session* s : {one.get(), two.get()}) REQUIRE(s->rewind(880).ok());
    check_same(*one, *two);
    CHECK(checkpoints_of(old) == std::vector<uint64_t>(answered ? 1 : 0, 900));
  }
}

TEST_CASE("a file's checkpoints are those of its windows and of its states") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  save(fresh("qwen35", 3000, SessionOptions{.prefill_chunk = 256}).get(), path);
  CHECK(checkpoints_of(path) == std::vector<uint64_t>{1024, 2048});
  std::vector<std::byte> windows(format::windows_bytes);
  auto* at = reinterpret_cast<uint8_t*>(windows.data());
  store32(at + format::windows_at("checkpoints"), 3);
  uint64_t place = format::windows_at("tokens of the first checkpoint");
  for (const uint64_t tokens : {1000u, 2048u, 3000u}) store64(at + place, tokens), place += 8;
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  std::unique_ptr<CacheWriter> writer;
  REQUIRE(CacheWriter::create(folder.file("b.kv"), file->identity(), &writer).ok());
  for (const CacheFile::Section& section : file->sections())
    REQUIRE(writer->add_section(section.kind, section.version, section.bytes).ok());
  REQUIRE(writer->add_section(SectionKind::windows, 2, windows.size()).ok());
  REQUIRE(writer->begin().ok());
  for (const CacheFile::Section& section : file->sections()) {
    const auto bytes = file->bytes(section.kind);
    REQUIRE(writer->write(bytes.data(), bytes.size()).ok());
  }
  REQUIRE(writer->write(windows.data(), windows.size()).ok());
  REQUIRE(writer->finish().ok());
  CHECK(checkpoints_of(folder.file("b.kv")) == std::vector<uint64_t>{1000, 1024, 2048});
}

TEST_CASE("checkpoints of a file that lie are refused by name") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), bad = folder.file("b.kv");
  save(document(text(3000)).get(), path);
  const auto refused = [&](const std::string& name, uint64_t at, uint64_t value,
                           std::size_t bytes) {
    CAPTURE(name);
    rewrite_section(path, bad, SectionKind::windows,
                    [&](std::vector<std::byte>* section, uint32_t*) {
                      for (std::size_t i = 0; i < bytes; ++i)
                        (*section)[at + i] = static_cast<std::byte>(value >> (8 * i));
                    });
    std::unique_ptr<Session> session;
    const Status s = Session::load(model(), bad, {}, false, nullptr, {}, &session);
    CHECK(s.code() == Code::corrupt);
    CHECK_MESSAGE(std::string(s.message()).find(name) != std::string::npos, s.message());
    CachePeek peek;
    std::vector<uint64_t> listed;
    REQUIRE(CachePeek::open(bad, &peek).ok());
    CHECK(list_checkpoints(peek, &listed).ok());
  };
  constexpr uint64_t first = format::windows_at("tokens of the first checkpoint"),
                     run = format::windows_at("begin of the first run");
  refused("do not ascend", first, 1024, 8);
  refused("do not ascend", first, 0, 8);
  refused("behind the sequence", first + 8 * 4, 3001, 8);
  refused("behind the sequence", first + 8 * 4, UINT64_MAX, 8);
  refused("less than the window of a checkpoint", first + 8, 700, 8);
  refused("more checkpoints than it counts", format::windows_at("checkpoints"), 4, 4);
  refused("too many checkpoints", format::windows_at("checkpoints"), 65, 4);
  refused("do not ascend", format::windows_at("checkpoints"), 6, 4);
  refused("too many runs", format::windows_at("runs"), 66, 4);
  refused("more runs of extents than it counts", format::windows_at("runs"), 1, 4);
  refused("extents that contradict its pages", run, 9, 4);
  refused("extents that contradict its pages", run + 4, UINT32_MAX, 4);
  refused("reserved bytes", format::windows_bytes - 1, 1, 1);
  refused("other tokens than the sequence", format::windows_at("rows"), 1, 4);
  for (const std::size_t size : {0u, 32u, 2047u, 4096u}) {
    rewrite_section(path, bad, SectionKind::windows,
                    [&](std::vector<std::byte>* section, uint32_t*) { section->resize(size); });
    std::unique_ptr<Session> session;
    CHECK(Session::load(model(), bad, {}, false, nullptr, {}, &session).code() == Code::corrupt);
  }
  rewrite_section(path, bad, SectionKind::windows,
                  [](std::vector<std::byte>*, uint32_t* version) { *version = 3; });
  std::unique_ptr<Session> session;
  CHECK(Session::load(model(), bad, {}, false, nullptr, {}, &session).code() == Code::version);
}
