// Spans: all tokens of a span go through a layer before they go through the next one. What a
// session has afterwards is what chunks that go through all layers leave.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/span_size.h"
#include "helpers.h"
#include "model/device_sizes.h"
#include "pool.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint32_t chunk = 100;

// span 0: chunk by chunk.
SessionOptions span_options(uint64_t span) {
  SessionOptions o;
  o.threads = 2;
  o.prefill_chunk = chunk;
  o.checkpoint_interval = 1 << 20;
  o.span_tokens = span;
  return o;
}

std::string saved(Session* session) {
  const TempFolder folder;
  const std::string path = folder.file("spans.kv");
  REQUIRE(session->save(path, nullptr, {}).ok());
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> fixtures() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(FIXTURES "/models"))
    if (entry.path().extension() == ".gguf") paths.push_back(entry.path().string());
  return paths;
}

bool has_spans(const ModelConfig& c) {
  return c.streams == 1 && c.layer_input == 0 && !c.shares_kv();
}

// Reports of a prefill.
struct Reports {
  std::vector<uint64_t> done;
  uint64_t stop_at = UINT64_MAX;
  Progress::Report function() {
    return [this](uint64_t now, uint64_t) {
      done.push_back(now);
      return now >= stop_at ? 1 : 0;
    };
  }
};

}  // namespace

TEST_CASE("a span leaves the bits that its chunks leave, in every architecture") {
  const auto tokens = some_tokens(1257);
  uint32_t with_states = 0, with_windows = 0, with_experts = 0, latent = 0;
  for (const std::string& path : fixtures()) {
    CAPTURE(path);
    const auto model = open_model(path);
    const ModelConfig& config = model->config();
    auto chunks = open_session(model, span_options(0)),
         spans = open_session(model, span_options(600));
    read(chunks.get(), tokens), read(spans.get(), tokens);
    CHECK(spans->stats().spans == (has_spans(config) ? 2u : 0u));
    CHECK(chunks->stats().spans == 0);
    CHECK(saved(spans.get()) == saved(chunks.get()));
    CHECK(logits_after(spans.get(), 7) == logits_after(chunks.get(), 7));
    with_states += config.recurrent_layers > 0, with_windows += config.windows.layers > 0;
    for (const LayerConfig& l : config.layer_configs)
      with_experts += l.has_experts(), latent += l.is_latent();
  }
  for (const uint32_t each : {with_states, with_windows, with_experts, latent}) CHECK(each > 2);
}

TEST_CASE("a window of several chunks has room in a span") {
  const auto tokens = book_tokens(2000);
  for (const uint32_t window : {150u, 300u, 1000u}) {
    CAPTURE(window);
    std::string files[2];
    for (const uint64_t span : {0u, 700u}) {
      SessionOptions options = span_options(span);
      options.window = window;
      auto session = open_session(mini_model(), options);
      read(session.get(), tokens);
      CHECK(session->stats().spans == (span > 0 ? 3u : 0u));
      files[span > 0] = saved(session.get());
    }
    CHECK(files[0] == files[1]);
  }
}

TEST_CASE("all logits of spans are those of chunks") {
  const auto model = mini_model();
  const auto tokens = book_tokens(520);
  const std::size_t vocabulary = model->config().vocabulary;
  std::vector<float> logits[2];
  for (const uint64_t span : {0u, 300u}) {
    std::vector<float>& out = logits[span > 0];
    out.resize(tokens.size() * vocabulary);
    uint64_t done = 0;
    auto session = open_session(model, span_options(span));
    REQUIRE(session->prefill_tokens(tokens, out.data(), nullptr, {}, &done).ok());
    CHECK(session->stats().spans == (span > 0 ? 2u : 0u));
  }
  CHECK(logits[0] == logits[1]);
}

TEST_CASE("a span of a fork leaves the sequence that it was forked from") {
  const auto tokens = book_tokens(1000);
  auto base = open_session(mini_model(), span_options(400));
  read(base.get(), {tokens.data(), 333});
  const std::string before = saved(base.get());
  std::unique_ptr<Session> fork;
  REQUIRE(base->fork(&fork).ok());
  read(fork.get(), {tokens.data() + 333, 500});
  CHECK(fork->stats().spans > 0);
  CHECK(saved(base.get()) == before);
  read(base.get(), {tokens.data() + 333, 500});
  CHECK(saved(base.get()) == saved(fork.get()));
}

TEST_CASE("a cancelled span leaves nothing, with windows and with states") {
  for (const char* name : {"llama-bf16", "gemma3", "granitehybrid"}) {
    const auto model = open_model(FIXTURES "/models/" + std::string(name) + ".gguf");
    const auto tokens = some_tokens(1300);
    auto session = open_session(model, span_options(400)),
         undisturbed = open_session(model, span_options(400));
    const std::span<const Token> first(tokens.data(), 400), rest(tokens.data() + 400, 900);
    read(session.get(), first), read(undisturbed.get(), first);
    const std::string before = saved(session.get());
    Reports reports;
    reports.stop_at = 0;  // at the first report, after a layer's chunk
    uint64_t done = 0;
    const Status s = session->prefill_tokens(rest, nullptr, nullptr, reports.function(), &done);
    CHECK(s.code() == Code::cancelled);
    CHECK(done == 0);
    CHECK(saved(session.get()) == before);
    read(session.get(), rest), read(undisturbed.get(), rest);
    CHECK(saved(session.get()) == saved(undisturbed.get()));
  }
}

TEST_CASE("a cancelled prefill keeps whole spans, and goes on from there") {
  const auto tokens = book_tokens(1300);
  auto session = open_session(mini_model(), span_options(400)),
       undisturbed = open_session(mini_model(), span_options(400));
  Reports reports;
  reports.stop_at = 600;  // within the second span, or later where few reports are made
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, nullptr, nullptr, reports.function(), &done);
  if (s.ok()) return;  // in the time of one report
  CHECK(s.code() == Code::cancelled);
  CHECK((done == 400 || done == 800));
  CHECK(session->tokens().size() == done);
  read(undisturbed.get(), {tokens.data(), done});
  const std::span<const Token> rest(tokens.data() + done, tokens.size() - done);
  read(session.get(), rest), read(undisturbed.get(), rest);
  CHECK(saved(session.get()) == saved(undisturbed.get()));
}

TEST_CASE("a flag that fires within a span keeps whole spans") {
  const auto tokens = book_tokens(900);
  auto session = open_session(mini_model(), span_options(400));
  Cancel cancel;
  uint64_t done = 0;
  const Status s = session->prefill_tokens(
      tokens, nullptr, &cancel,
      [&](uint64_t now, uint64_t) {
        if (now > 600) cancel.fire();
        return 0;
      },
      &done);
  if (s.ok()) return;  // in the time of one report
  CHECK(s.code() == Code::cancelled);
  CHECK((done == 400 || done == 800));  // the second span may have ended before the report
  CHECK(session->tokens().size() == done);
}

TEST_CASE("progress within a span never goes back, and ends with the document") {
  const auto tokens = book_tokens(4100);
  auto session = open_session(mini_model(), span_options(2000));
  Reports reports;
  uint64_t done = 0;
  REQUIRE(session->prefill_tokens(tokens, nullptr, nullptr, reports.function(), &done).ok());
  CHECK(std::is_sorted(reports.done.begin(), reports.done.end()));
  CHECK(reports.done.back() == 4100);
}

TEST_CASE("the errors of layers are measured at the beginning of a span") {
  const auto tokens = book_tokens(4100);
  auto spans = open_session(mini_model(), span_options(2500)),
       chunks = open_session(mini_model(), span_options(0));
  read(spans.get(), tokens), read(chunks.get(), tokens);
  const auto errors = [](Session* session) {
    const std::string json = session->stats_json();
    const std::size_t at = json.find("\"layer_errors\"");
    return at == std::string::npos ? std::string() : json.substr(at, 60);
  };
  CHECK(!errors(chunks.get()).empty());
  CHECK(!errors(spans.get()).empty());
}

TEST_CASE("a memory limit, full precision and sparse prefill have no spans") {
  const auto tokens = book_tokens(900);
  for (int which = 0; which < 3; ++which) {
    SessionOptions o = span_options(400);
    if (which == 0) o.memory.bytes = uint64_t{64} << 20;
    if (which == 1) o.full_precision = true;
    if (which == 2) o.read.strategy = "bounded";
    auto session = open_session(mini_model(), o);
    read(session.get(), tokens);
    CHECK(session->stats().spans == 0);
  }
}

TEST_CASE("an MTP layer has the rows of spans as it has those of chunks") {
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"}) {
    CAPTURE(std::string(name));
    const auto model = open_model(FIXTURES "/models/" + std::string(name) + ".gguf");
    std::string texts[2];
    DraftCounts counts[2];
    for (const uint64_t span : {0u, 300u}) {
      SessionOptions options = span_options(span);
      options.draft_tokens = 3, options.drafts_always = true;
      const auto session = open_session(model, options);
      read(session.get(), some_tokens(650));
      CHECK((session->stats_json().find("\"prefill_spans\":0,") == std::string::npos) ==
            (span > 0));
      CHECK(session->stats().drafts_first == 1);
      GenerateOptions asked;
      asked.max_tokens = 40;
      texts[span > 0] = ask(session.get(), "", asked);
      counts[span > 0] = session->stats().drafts;
    }
    CHECK(texts[0] == texts[1]);
    CHECK(counts[0].drafted > 0);
    CHECK(counts[0].drafted == counts[1].drafted);
    CHECK(counts[0].accepted == counts[1].accepted);
  }
}

TEST_CASE("a cancelled span leaves the MTP layer's rows as they were") {
  const auto model = open_model(FIXTURES "/models/qwen35-mtp.gguf");
  SessionOptions options = span_options(300);
  options.draft_tokens = 2, options.drafts_always = true;
  const auto session = open_session(model, options), whole = open_session(model, options);
  const auto tokens = some_tokens(650);
  const std::span<const Token> first(tokens.data(), 300), rest(tokens.data() + 300, 350);
  read(session.get(), first), read(whole.get(), first);
  Reports reports;
  reports.stop_at = 0;
  uint64_t done = 0;
  const Status s = session->prefill_tokens(rest, nullptr, nullptr, reports.function(), &done);
  CHECK(s.code() == Code::cancelled);
  CHECK(done == 0);
  read(session.get(), rest), read(whole.get(), rest);
  CHECK(saved(session.get()) == saved(whole.get()));
}

TEST_CASE("spans serve where weights and the text to come do not fit together") {
  SpanSize size;
  size.weights = 100, size.available = 120;
  CHECK(!size.weights_exceed());
  size.text = 20;
  CHECK(!size.weights_exceed());
  size.text = 21;
  CHECK(size.weights_exceed());
  size.text = 0, size.weights = 121;
  CHECK(size.weights_exceed());
  size.available = 0, size.weights = UINT64_MAX, size.text = UINT64_MAX;
  CHECK(size.weights_exceed());
}

TEST_CASE("a span is as long as memory allows for its stream and its windows' pages") {
  constexpr uint64_t gib = uint64_t{1} << 30;
  SpanSize size;
  size.stream = 10'000, size.available = 4 * gib;
  CHECK(size.tokens(512) == SpanSize::max_stream / 10'000 / 512 * 512);
  size.windows = 10'000;
  CHECK(size.tokens(512) == gib / 2 / 20'000 / 512 * 512);
  size.windows = 1'000'000;
  CHECK(size.tokens(512) == SpanSize::min_tokens);
  size = {.stream = 100, .available = 1024 * gib};
  CHECK(size.tokens(512) == SpanSize::max_tokens);
}

TEST_CASE("the commit of a span can be cancelled while it extends the sketch") {
  constexpr uint32_t n = 500;
  auto session = open_session(mini_model(), span_options(0));
  read(session.get(), book_tokens(1200));
  ThreadPool* const pool = &test::pool();
  KvStore before(session->store());
  if (!before.sketch().built()) REQUIRE(before.build_sketch({}, cpu_kernels(), pool, nullptr).ok());
  const uint32_t layers = before.shape().layers;
  const std::vector<float> rows(std::size_t{chunk} * before.shape().kv_heads *
                                before.shape().page.head_dim);
  for (const bool cancelled : {true, false}) {
    KvStore fork(before);
    REQUIRE(fork.begin_span(n, chunk, pool, nullptr).ok());
    for (uint32_t l = 0; l < layers; ++l) {
      fork.begin_layer();
      for (uint32_t at = 0; at < n; at += chunk) {
        REQUIRE(fork.prepare_chunk(l, chunk, pool).ok());
        fork.write(l, chunk, rows.data(), rows.data());
        fork.end_chunk(l, chunk, cpu_kernels(), pool);
      }
    }
    Cancel cancel;
    if (cancelled) cancel.fire();
    const Status s = fork.commit_span(cpu_kernels(), pool, &cancel);
    CHECK(s.code() == (cancelled ? Code::cancelled : Code::ok));
    CHECK((fork.sketch().pages() == fork.pages().pages()) == !cancelled);
    CHECK(before.sketch().pages() == before.pages().pages());
  }
}

TEST_CASE("what streamed layers take of a GPU has the vectors of all layers") {
  DeviceKernels kernels{};
  kernels.matrix_bytes = [](TensorType, uint32_t rows, uint32_t cols) {
    return std::size_t{rows} * cols;
  };
  for (const char* name : {"llama-bf16", "gpt-oss", "qwen35"}) {
    CAPTURE(std::string(name));
    const auto model = open_model(FIXTURES "/models/" + std::string(name) + ".gguf");
    Weights twice = model->weights();
    ModelConfig config = model->config();
    uint64_t vectors = 0;
    for (const LayerWeights& l : model->weights().layers) {
      twice.layers.push_back(l);
      vectors += (l.mixer_norm.weight.size() + l.ffn_norm.weight.size()) * sizeof(float);
      for (const ExpertMatrices* m : {&l.experts.gate, &l.experts.up, &l.experts.down})
        vectors += m->biases.size() * sizeof(float);
    }
    for (const LayerConfig& l : model->config().layer_configs) config.layer_configs.push_back(l);
    const DeviceSizes one(model->weights(), model->config(), kernels), two(twice, config, kernels);
    CHECK(vectors > 0);
    CHECK(two.stream_margin >= one.stream_margin + vectors);
  }
}

TEST_CASE("a model knows where its layers lie in the file") {
  for (const std::string& path : fixtures()) {
    CAPTURE(path);
    const auto model = open_model(path);
    uint64_t bytes = 0;
    for (uint32_t l = 0; l < model->config().depth(); ++l) {
      bytes += model->layer_bytes(l);
      for (uint32_t part = 0; part < 4; ++part) model->read_ahead(l, part, 3);  // one too many
    }
    CHECK(bytes <= std::filesystem::file_size(path));
  }
  const auto model = mini_model();
  for (uint32_t l = 0; l < model->config().depth(); ++l) CHECK(model->layer_bytes(l) > 0);
}
