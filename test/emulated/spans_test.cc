// Spans on emulated GPUs: a chunk of a layer computes what a step computes, also where the layer's
// weights come to the GPU when their turn comes.
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "../session/device_helpers.h"
#include "base/memory.h"
#include "emulated.h"
#include "made_model.h"

using namespace kvasir;
using namespace kvasir::test;
using emulated::Changed;
using emulated::machine;

namespace {

constexpr uint32_t chunk = 100, span_tokens = 400;

SessionOptions with_spans(uint64_t span) {
  SessionOptions o = bounded_options(128);
  o.prefill_chunk = chunk;
  o.checkpoint_interval = 1 << 20;
  o.span_tokens = span;
  return o;
}

// Keys and values: int8 pages and scales of the layers that keep every token, and windows.
std::string kept_by(const Session& session) {
  std::string out;
  const auto add = [&](const void* data, std::size_t bytes) {
    out.append(static_cast<const char*>(data), bytes);
  };
  const auto add_lists = [&](const KvStore& store, uint32_t pages) {
    const StoreShape& shape = store.shape();
    for (uint32_t list = 0; list < shape.heads_total(); ++list) {
      const uint32_t l = list / shape.kv_heads, h = list % shape.kv_heads;
      for (uint32_t p = 0; p < pages; ++p) {
        const PageRef page = store.pages().page(l, h, p);
        add(page.data, page_bytes);
        add(page.scales, shape.page.scales_bytes() / extent_pages);
      }
      const KvStore::Rows rows = store.window(l, h);
      const std::size_t bytes = std::size_t{store.window_count()} * shape.page.dim * sizeof(float);
      add(rows.k, bytes), add(rows.v, bytes);
    }
    add(store.centre().data(), store.centre().size_bytes());
    add(store.sink_floats().data(), store.sink_floats().size_bytes());
  };
  add_lists(session.store(), session.store().pages().pages());
  if (session.windows()) add_lists(*session.windows(), 0);
  return out;
}

bool has_spans(const ModelConfig& c) {
  return c.streams == 1 && c.layer_input == 0 && !c.shares_kv();
}

std::shared_ptr<const Model> open_with(const std::string& path, uint64_t budget) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path, "", &model, {"cuda", budget});
  if (s.code() == Code::unsupported || s.code() == Code::no_memory) return nullptr;
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return model;
}

bool is_complete(const Model& model) {
  const DeviceWeights& d = model.device_weights()[0];
  return d.has_output() && d.experts_end() == d.end_layer();
}

// The model on a GPU whose memory is too small for all of it; null: there is no such size.
std::shared_ptr<const Model> open_small(const std::string& path, const Model& whole) {
  const uint64_t all = whole.device_weights()[0].bytes();
  for (uint64_t budget = all / 4;; budget += all / 32) {
    const auto model = open_with(path, budget);
    if (!model) continue;
    if (is_complete(*model)) return nullptr;
    if (model->device_weights()[0].end_layer() < whole.config().depth()) return model;
    if (model->device_weights()[0].experts_end() < whole.config().depth()) return model;
  }
}

std::string write_made(const TempFolder& folder, const ModelRecipe& recipe) {
  std::string path = folder.file(recipe.architecture + ".gguf");
  const std::vector<std::byte> bytes = make_model(recipe).build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

}  // namespace

TEST_CASE(
    "a span on a GPU leaves the bits of its chunks, with weights there and with streamed ones") {
  TempFolder folder;
  const auto tokens = some_tokens(757);
  uint32_t there = 0, streamed = 0;
  for (const ModelRecipe& recipe : recipes_of_all_architectures()) {
    ModelRecipe r = recipe;
    r.context = 2048, r.layers = std::max(r.layers, 4u);
    CAPTURE(r.architecture);
    const std::string path = write_made(folder, r);
    const auto whole = open_with(path, 0);
    if (!whole || !has_spans(whole->config())) continue;
    auto chunks = open_session(whole, with_spans(0));
    read(chunks.get(), tokens);
    const std::string kept = kept_by(*chunks);
    const std::vector<float> expected = logits_after(chunks.get(), 9);
    const auto small = open_small(path, *whole);
    for (const auto& model : {whole, small}) {
      if (!model) continue;
      CAPTURE(model == small);
      auto spans = open_session(model, with_spans(span_tokens));
      read(spans.get(), tokens);
      CHECK(spans->stats().spans == 2);
      CHECK(says(*spans, "layer by layer"));
      if (model == small) CHECK(says(*spans, "layers streamed"));
      // The second span begins with windows of which the host keeps older tokens in 8 bits.
      if (whole->config().attention_softcap == 0) CHECK((kept_by(*spans) == kept));
      CHECK(difference(logits_after(spans.get(), 9), expected) < rounding);
      (model == small ? streamed : there) += 1;
    }
  }
  CHECK(there > 20);
  CHECK(streamed > 20);
}

namespace {

// A model of four layers, of which not all have room on the GPUs.
struct SmallGpu {
  explicit SmallGpu(const char* devices = "cuda") {
    ModelRecipe r;
    r.context = 2048, r.layers = 6, r.width = 128, r.feed_forward = 256;
    path = write_made(folder, r);
    whole = open_with(path, 0);
    REQUIRE(whole);
    const uint64_t all = whole->device_weights()[0].bytes();
    for (uint64_t budget = all / 8; !model; budget += all / 32) {
      const Status s = Model::open(path, "", &model, {devices, budget});
      REQUIRE((s.ok() || s.code() == Code::no_memory));
    }
    REQUIRE(!is_complete(*model));
  }

  TempFolder folder;
  std::string path;
  std::shared_ptr<const Model> whole, model;
};

Status prefill(Session* session, std::span<const Token> tokens, const Cancel* cancel,
               uint64_t* done) {
  return session->prefill_tokens(tokens, nullptr, cancel, {}, done);
}

}  // namespace

TEST_CASE("spans of several GPUs leave the bits of one") {
  const SmallGpu one, two("cuda:0,cuda:1");
  CHECK(two.model->device_weights().size() == 2);
  const auto tokens = some_tokens(900);
  auto chunks = open_session(one.whole, with_spans(0)),
       spans = open_session(two.model, with_spans(span_tokens));
  read(chunks.get(), tokens), read(spans.get(), tokens);
  CHECK(spans->stats().spans > 0);
  CHECK((kept_by(*spans) == kept_by(*chunks)));
}

TEST_CASE("spans of one chunk, of two and of three leave the bits of their chunks") {
  const SmallGpu one, two("cuda:0,cuda:1");
  const auto tokens = some_tokens(950);
  auto chunks = open_session(one.whole, with_spans(0));
  read(chunks.get(), tokens);
  for (const SmallGpu* gpus : {&one, &two})
    for (const uint64_t span : {chunk, 2 * chunk, 3 * chunk}) {
      CAPTURE(span);
      auto spans = open_session(gpus->model, with_spans(span));
      read(spans.get(), tokens);
      CHECK(spans->stats().spans >= 3);
      CHECK((kept_by(*spans) == kept_by(*chunks)));
    }
}

TEST_CASE("the spans of a text are about equal, and the last one is not small") {
  const SmallGpu gpu;
  const auto spans_of = [&](uint32_t tokens) {
    auto session = open_session(gpu.model, with_spans(span_tokens));
    read(session.get(), some_tokens(tokens));
    return session->stats().spans;
  };
  CHECK(spans_of(span_tokens) == 1);
  CHECK(spans_of(span_tokens + span_tokens / 4) == 1);
  CHECK(spans_of(span_tokens + span_tokens / 4 + 1) == 2);
  CHECK(spans_of(2 * span_tokens + 50) == 2);
}

TEST_CASE("all logits of a span are those of chunks, where the CPU has the output") {
  const SmallGpu gpu;
  const auto tokens = some_tokens(450);
  const std::size_t vocabulary = gpu.whole->config().vocabulary;
  CHECK(!gpu.model->device_weights().back().has_output());
  std::vector<float> logits[2];
  for (const bool spans : {false, true}) {
    std::vector<float>& out = logits[spans];
    out.resize(tokens.size() * vocabulary);
    auto session = open_session(spans ? gpu.model : gpu.whole, with_spans(spans ? span_tokens : 0));
    uint64_t done = 0;
    REQUIRE(session->prefill_tokens(tokens, out.data(), nullptr, {}, &done).ok());
    CHECK(session->stats().spans == (spans ? 1u : 0u));
  }
  CHECK(difference(logits[0], logits[1]) < rounding);
}

TEST_CASE("a span that its progress stops leaves nothing that a later one meets") {
  const SmallGpu gpu;
  const auto tokens = some_tokens(700), others = some_tokens(1100);
  auto expected = open_session(gpu.model, with_spans(span_tokens));
  read(expected.get(), tokens);
  uint32_t stopped = 0;
  for (uint32_t report = 1; report < 100; report += 1 + report / 6) {
    CAPTURE(report);
    auto session = open_session(gpu.model, with_spans(span_tokens));
    uint32_t reports = 0;
    uint64_t done = 0;
    const auto stop = [&](uint64_t, uint64_t) { return ++reports < report ? 0 : 1; };
    const Status s =
        session->prefill_tokens(std::span(others).subspan(350), nullptr, nullptr, stop, &done);
    if (s.ok()) break;
    ++stopped;
    CHECK(s.code() == Code::cancelled);
    REQUIRE(session->rewind(0).ok());
    read(session.get(), tokens);
    CHECK((kept_by(*session) == kept_by(*expected)));
  }
  CHECK(stopped > 0);  // reports are some time apart
}

TEST_CASE("spans on a GPU that is nearly full leave the bits of their chunks") {
  const SmallGpu gpu;
  const auto tokens = some_tokens(700);
  auto chunks = open_session(gpu.whole, with_spans(0));
  read(chunks.get(), tokens);
  uint32_t refused = 0, read_by_spans = 0;
  for (uint64_t room = 0; room < uint64_t{16} << 20; room += uint64_t{64} << 10) {
    CAPTURE(room);
    auto session = open_session(gpu.model, with_spans(span_tokens));
    const Changed full(machine().max_bytes[0], machine().bytes[0] + room);
    uint64_t done = 0;
    const Status s = prefill(session.get(), tokens, nullptr, &done);
    if (!s.ok()) {
      CHECK(s.code() == Code::no_memory);
      ++refused;
      continue;
    }
    if (session->stats().spans == 0) continue;
    ++read_by_spans;
    CHECK((kept_by(*session) == kept_by(*chunks)));
    if (read_by_spans > 40) break;
  }
  MESSAGE("refused ", refused, ", by spans ", read_by_spans);
  CHECK(read_by_spans > 0);
}

TEST_CASE("a GPU without room for all weights is given spans unless few tokens come") {
  const SmallGpu gpu;
  auto session = open_session(gpu.model, with_spans(0));
  read(session.get(), some_tokens(50));
  CHECK(session->stats().spans == 0);
  read(session.get(), some_tokens(700));
  CHECK(session->stats().spans == 1);
  CHECK(session->stats().span_tokens == 700);
  CHECK(says(*session, "\"prefill_spans_because\":\"\""));
  auto whole = open_session(gpu.whole, with_spans(0));
  read(whole.get(), some_tokens(700));
  CHECK(whole->stats().spans == 0);
}

TEST_CASE("a span that fails or is cancelled at any call leaves the sequence as it was") {
  const SmallGpu gpu;
  const auto tokens = some_tokens(500);
  const std::span<const Token> first(tokens.data(), 250), rest(tokens.data() + 250, 250);
  auto expected = open_session(gpu.model, with_spans(span_tokens));
  read(expected.get(), first), read(expected.get(), rest);
  for (const bool cancels : {false, true}) {
    CAPTURE(cancels);
    uint32_t failures = 0;
    for (uint64_t call = 1;; call += 1 + call / 9) {
      CAPTURE(call);
      auto session = open_session(gpu.model, with_spans(span_tokens));
      read(session.get(), first);
      const std::string before = kept_by(*session);
      Cancel cancel;
      uint64_t done = 0;
      Status s;
      const uint64_t fails_at = machine().calls + call;
      {
        const Changed at(machine().fails_at, fails_at);
        const Changed with(machine().fails_with, cancels ? 0 : emulated::refused);
        const Changed fires(machine().fires, cancels ? &cancel : nullptr);
        s = prefill(session.get(), rest, &cancel, &done);
      }
      if (machine().calls < fails_at) break;
      if (s.ok()) continue;  // pinned memory is missing, or all was done
      ++failures;
      CHECK(s.code() == (cancels ? Code::cancelled : Code::device));
      CHECK(done == 0);
      CHECK((kept_by(*session) == before));
      read(session.get(), rest);
      CHECK((kept_by(*session) == kept_by(*expected)));
    }
    CHECK(failures > 10);
  }
}

TEST_CASE("without room for streamed weights prefill goes chunk by chunk, and says why") {
  const SmallGpu gpu;
  auto session = open_session(gpu.model, with_spans(0));
  {
    const Changed full(machine().max_bytes[0], machine().bytes[0].load());
    uint64_t done = 0;
    const Status s = prefill(session.get(), some_tokens(300), nullptr, &done);
    CHECK((s.ok() || s.code() == Code::no_memory));
    CHECK(session->stats().spans == 0);
    CHECK(says(*session, "\"prefill_spans_because\":\"the GPU has no room"));
  }
}

TEST_CASE("spans over many extents leave the bits of their chunks") {
  const auto model = model_on("cuda");
  const auto tokens = book_tokens(2600);
  auto chunks = open_session(model, with_spans(0)), spans = open_session(model, with_spans(1100));
  CHECK(spans->store().shape().page.extent_tokens() < 1100);
  read(chunks.get(), tokens), read(spans.get(), tokens);
  CHECK(spans->stats().spans == 3);
  CHECK((kept_by(*spans) == kept_by(*chunks)));
  CHECK(!ask(spans.get(), "What is it about?").empty());
}

TEST_CASE("the last span of a text finds the sketch while its layers are computed") {
  const auto model = model_on("cuda");
  const auto tokens = book_tokens(2600);
  const StoreShape& shape = model->store_shape();
  const TempFolder folder;
  const auto saved = [&](bool fails) {
    auto session = open_session(model, with_spans(1100));
    // Memory that lacks within the span is tried again after it. After it that is an error.
    failing_size = fails ? shape.page.sketch_bytes() * shape.heads_total() : 0;
    allocation_fault = first_of_size_fails;
    read(session.get(), tokens);
    allocation_fault = nullptr;
    CHECK(failing_size == 0);
    CHECK(session->stats().spans == 3);
    CHECK(session->store().sketch().built_pages() == session->store().pages().pages());
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    std::ifstream in(folder.file("a.kv"), std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const std::string within = saved(false);
  CHECK((saved(true) == within));
}

TEST_CASE("a GPU computes a chunk of a span while the next one begins, in room for all of them") {
  const auto model = model_on("cuda");
  const auto tokens = book_tokens(2400);
  SessionOptions o = with_spans(1200);
  o.prefill_chunk = 300;
  auto session = open_session(model, o);
  read(session.get(), {tokens.data(), 1200});
  std::vector<uint64_t> taken;
  uint64_t done = 0;
  const uint64_t waits = machine().waits;
  REQUIRE(session
              ->prefill_tokens(
                  {tokens.data() + 1200, 1200}, nullptr, nullptr,
                  [&](uint64_t, uint64_t) { return taken.push_back(machine().bytes[0]), false; },
                  &done)
              .ok());
  REQUIRE(taken.size() > 2);
  CHECK(std::count(taken.begin() + 1, taken.end(), taken[1]) == std::ssize(taken) - 1);
  // Of a chunk: for its keys and values, and for its pages on their way to the GPU.
  const uint64_t chunks = 4 * model->config().depth();
  CHECK(machine().waits - waits < 4 * chunks);
}
