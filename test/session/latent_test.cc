// Models of latent attention.
#include <cmath>

#include "cachefile/pack.h"
#include "helpers.h"
#include "latent_model.h"
#include "session/external_store.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::vector<Token> text(std::size_t n) {
  std::vector<Token> tokens(n);
  uint32_t state = 5;
  for (Token& t : tokens) t = static_cast<Token>((state = state * 1664525u + 1013904223u) >> 24);
  return tokens;
}

double relative_error(const std::vector<float>& is, const std::vector<float>& want) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(is[i] - want[i]), 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / size);
}

// [tokens][vocabulary]
std::vector<float> logits_of(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                             uint32_t threads, uint32_t chunk) {
  SessionOptions o;
  o.threads = threads, o.prefill_chunk = chunk;
  o.full_precision = true;
  auto session = open_session(model, o);
  std::vector<float> logits(tokens.size() * model->config().vocabulary);
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, logits.data(), nullptr, {}, &done);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return logits;
}

Status read_config(const GgufBuilder& file) {
  const std::vector<std::byte> bytes = file.build();
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  ModelConfig c;
  return ModelConfig::read(gguf, &c);
}

void check_fails(const Status& s, Code code, const std::string& text) {
  CAPTURE(text);
  CHECK_MESSAGE(s.code() == code, s.message());
  CHECK_MESSAGE(std::string(s.message()).find(text) != std::string::npos, s.message());
}

}  // namespace

TEST_CASE("latent attention: keys that are missing or contradict others are refused by name") {
  const LatentSize size;
  const auto file = [&](const LatentSize& s, const char* leave_out = "") {
    GgufBuilder b;
    add_latent_keys(&b, s, leave_out);
    b.tensor("blk.0.attn_q.weight", {1}, TensorType::f32);
    return b;
  };
  CHECK(read_config(file({2, 32, 2, 256, 32})).ok());
  for (const char* key : {"attention.kv_lora_rank", "attention.key_length_mla",
                          "attention.value_length_mla", "rope.dimension_count"})
    check_fails(read_config(file(size, key)), Code::corrupt, key);
  GgufBuilder with_queries;  // without attn_q, queries have a rank
  add_latent_keys(&with_queries, size);
  check_fails(read_config(with_queries), Code::corrupt, "attention.q_lora_rank");

  for (const auto& [key, value] :
       {std::pair("attention.key_length", 100u), std::pair("attention.value_length", 100u)})
    check_fails(read_config(file(size, key).key(std::string("deepseek2.") + key, value)),
                Code::corrupt, "key_length");
  check_fails(
      read_config(
          file(size, "attention.head_count_kv").key("deepseek2.attention.head_count_kv", 3u)),
      Code::corrupt, "3 KV heads for 2 query heads");
  check_fails(read_config(file(size, "attention.key_length_mla")
                              .key("deepseek2.attention.key_length_mla", size.rotated)),
              Code::corrupt, "of which 64 rotate");
  check_fails(read_config(file({2, 32, 2, 24, 8})), Code::unsupported, "kv_lora_rank");
  check_fails(read_config(file({2, 32, 2, 1024, 64})), Code::unsupported, "1088 dimensions");
  check_fails(read_config(file({2, 32, 2, 256, 31})), Code::corrupt, "odd number");
  const auto yarn = [&](float factor, float multiplier) {
    return file({2, 32, 2, 256, 32})
        .key("deepseek2.rope.scaling.type", "yarn")
        .key("deepseek2.rope.scaling.factor", factor)
        .key("deepseek2.rope.scaling.yarn_log_multiplier", multiplier);
  };
  CHECK(read_config(yarn(40, 0.1f)).ok());
  check_fails(read_config(yarn(1e-9f, 0.1f)), Code::corrupt, "scales its scores");
  check_fails(read_config(yarn(40, 1e3f)), Code::corrupt, "yarn_log_multiplier");
}

TEST_CASE("latent attention: matrices of another shape are refused by name") {
  const TempFolder folder;
  const LatentSize size{1, 32, 2, 64, 16};
  const auto check = [&](const LatentSize& of_matrices, bool joint, const char* name) {
    const std::string path = folder.file("a.gguf");
    save_latent_model(path, size, random_heads(size, joint));
    // The same file whose keys say otherwise.
    GgufBuilder b = bpe_file(byte_vocabulary());
    add_latent_keys(&b, of_matrices);
    std::mt19937 random(1);
    const HeadMatrices m = random_heads(size, joint)[0];
    const auto zeros = [&](const std::string& tensor, std::vector<uint64_t> dims) {
      b.tensor(tensor, std::move(dims), TensorType::f32);
    };
    const LatentSize& s = of_matrices;
    zeros("token_embd.weight", {s.width, 256}), zeros("output_norm.weight", {s.width});
    zeros("blk.0.attn_norm.weight", {s.width}), zeros("blk.0.ffn_norm.weight", {s.width});
    zeros("blk.0.attn_q.weight", {s.width, s.heads * (s.plain + s.rotated)});
    zeros("blk.0.attn_kv_a_mqa.weight", {s.width, s.rank + s.rotated});
    zeros("blk.0.attn_kv_a_norm.weight", {s.rank});
    zeros("blk.0.attn_output.weight", {s.heads * s.values, s.width});
    zeros("blk.0.ffn_gate.weight", {s.width, 48}), zeros("blk.0.ffn_up.weight", {s.width, 48});
    zeros("blk.0.ffn_down.weight", {48, s.width});
    if (joint) {
      b.tensor("blk.0.attn_kv_b.weight", {size.rank, size.heads * (size.plain + size.values)},
               TensorType::f32, m.keys);
    } else {
      b.tensor("blk.0.attn_k_b.weight", {size.plain, size.rank, size.heads}, TensorType::f32,
               m.keys);
      b.tensor("blk.0.attn_v_b.weight", {size.rank, size.values, size.heads}, TensorType::f32,
               m.values);
    }
    write_model(path, b);
    std::shared_ptr<const Model> model;
    check_fails(Model::open(path, "", &model), Code::corrupt, name);
  };
  LatentSize other = size;
  other.plain = 48;
  check(other, false, "tensor 'blk.0.attn_k_b.weight' is 32 x 64 x 2");
  check(other, true, "tensor 'blk.0.attn_kv_b.weight' is 64 x 128");
  other = size, other.values = 16;
  check(other, false, "tensor 'blk.0.attn_v_b.weight' is 64 x 32 x 2");
  other = size, other.rank = 80;
  check(other, false, "tensor 'blk.0.attn_k_b.weight'");
  other = size, other.heads = 4;
  check(other, false, "tensor 'blk.0.attn_k_b.weight'");
}

TEST_CASE("latent attention: the matrices of heads may be quantised, and be two or one") {
  const TempFolder folder;
  const LatentSize size{2, 32, 3, 256, 32};
  const auto tokens = text(70);
  const auto logits = [&](const std::vector<HeadMatrices>& matrices) {
    const auto model = open_model(save_latent_model(folder.file("a.gguf"), size, matrices));
    const std::vector<float> one = logits_of(model, tokens, 1, 512);
    CHECK(logits_of(model, tokens, 2, 512) == one);
    CHECK(relative_error(logits_of(model, tokens, 2, 1), one) < 2e-2);
    return one;
  };
  struct Form {
    bool joint;
    TensorType keys, values;
  };
  for (const Form& form : {Form{true, TensorType::f32, TensorType::f32},
                           Form{true, TensorType::q8_0, TensorType::q8_0},
                           Form{true, TensorType::q4_k, TensorType::q4_k},
                           Form{true, TensorType::q6_k, TensorType::q6_k},
                           Form{false, TensorType::q8_0, TensorType::q4_k},
                           Form{false, TensorType::q4_0, TensorType::q6_k},
                           Form{false, TensorType::f32, TensorType::q8_0}}) {
    CAPTURE(form.joint);
    CAPTURE(static_cast<uint32_t>(form.keys));
    CAPTURE(static_cast<uint32_t>(form.values));
    const std::vector<HeadMatrices> matrices =
        random_heads(size, form.joint, form.keys, form.values);
    std::vector<HeadMatrices> floats, other;
    for (const HeadMatrices& m : matrices) floats.push_back(m.as_floats(size));
    const bool exact = form.values == TensorType::f32;
    const std::vector<float> want = logits(floats);
    CHECK(relative_error(logits(matrices), want) < (exact ? 2e-5 : 2e-2));
    // and they matter
    CHECK(relative_error(logits(random_heads(size)), want) > 0.05);
  }
}

namespace {

// DeepSeek's sizes: 512 numbers and 64 that rotate.
std::shared_ptr<const Model> deep_model() {
  static const TempFolder folder;
  static const auto model =
      open_model(save_latent_model(folder.file("deep.gguf"), {}, random_heads({})));
  return model;
}

SessionOptions latent_options(std::string_view strategy, uint32_t threads = 2) {
  SessionOptions o;
  o.threads = threads;
  o.select.strategy = strategy;
  o.select.budget_tokens = strategy == "full" ? 0 : 200;
  return o;
}

constexpr std::size_t document_tokens = 2300;  // enough for an index

}  // namespace

TEST_CASE("latent attention: keys hold the values, in 576 bytes a token of DeepSeek's sizes") {
  const StoreShape shape = deep_model()->store_shape();
  CHECK(shape.page.dim == 576);
  CHECK(shape.page.page_tokens == 64);
  CHECK(shape.page.page_size() == 9 * 4096);
  CHECK(shape.kv_heads == 1);
  const auto session = open_session(deep_model(), latent_options("full"));
  read(session.get(), text(document_tokens));
  const KvStore& store = session->store();
  CHECK(store.sealed_tokens() > document_tokens - 200);
  // Pages, scales and bounds; and rows without values.
  const std::size_t bytes = 576 + 2 * sizeof(uint16_t) + 2 * 576 / 16 + sizeof(float) / 16;
  const std::size_t extents = 3, tokens = extents * 1024;
  CHECK(shape.slab_bytes() * extents <= shape.layers * tokens * (bytes + 1));
  CHECK(store.window(0, 0).k == store.window(0, 0).v);
  CHECK(store.sinks_size() == std::size_t{shape.layers} * 64 * 576);
}

TEST_CASE("latent attention: int8 pages are as precise as those of other models") {
  SessionOptions exact = latent_options("full");
  exact.full_precision = true;
  const auto sealed = open_session(deep_model(), latent_options("full")),
             whole = open_session(deep_model(), exact);
  read(sealed.get(), text(document_tokens)), read(whole.get(), text(document_tokens));
  const double error =
      relative_error(logits_after(sealed.get(), 65), logits_after(whole.get(), 65));
  CAPTURE(error);
  CHECK(error < 1e-2);
}

TEST_CASE("latent attention: every strategy goes on the same after a save, load, pack and fork" *
          doctest::test_suite("slow")) {
  const TempFolder folder;
  const auto document = open_session(deep_model(), latent_options("full"));
  read(document.get(), text(document_tokens));
  for (const StrategyInfo& strategy : all_strategies()) {
    CAPTURE(strategy.name);
    const SessionOptions options = latent_options(strategy.name);
    std::unique_ptr<Session> session, loaded, unpacked, fork;
    REQUIRE(document->fork(&session).ok());
    Status s = session->set_select(options.select);
    REQUIRE_MESSAGE(s.ok(), s.message());
    s = session->save(folder.file("a.kv"), nullptr, {});
    REQUIRE_MESSAGE(s.ok(), s.message());
    const auto load = [&](const char* file, std::unique_ptr<Session>* out) {
      s = Session::load(deep_model(), folder.file(file), options, true, nullptr, {}, out);
      REQUIRE_MESSAGE(s.ok(), s.message());
    };
    load("a.kv", &loaded);
    REQUIRE(session->fork(&fork).ok());
    REQUIRE(pack(folder.file("a.kv"), folder.file("a.kvz"), 1, nullptr, nullptr).ok());
    s = unpack(folder.file("a.kvz"), folder.file("b.kv"), nullptr, nullptr);
    REQUIRE_MESSAGE(s.ok(), s.message());
    load("b.kv", &unpacked);
    const std::vector<Token> expected = continue_with(session.get(), 6);
    CHECK(continue_with(loaded.get(), 6) == expected);
    CHECK(continue_with(unpacked.get(), 6) == expected);
    CHECK(continue_with(fork.get(), 6) == expected);
    CHECK(logits_after(loaded.get(), 7) == logits_after(session.get(), 7));
  }
}

TEST_CASE("latent attention: one thread and two give the same bits, and so does a rewind") {
  for (const char* strategy : {"full", "bounded", "quest", "window"}) {
    CAPTURE(strategy);
    const auto tokens = text(1500);
    std::vector<float> logits[2];
    for (const uint32_t threads : {1u, 2u}) {
      const auto session = open_session(deep_model(), latent_options(strategy, threads));
      read(session.get(), tokens);
      logits[threads - 1] = logits_after(session.get(), 65);
      REQUIRE(session->rewind(tokens.size()).ok());
      CHECK(logits_after(session.get(), 65) == logits[threads - 1]);
      // before the window: its tokens come from pages
      REQUIRE(session->rewind(1000).ok());
      const double error = [&] {
        const auto short_one = open_session(deep_model(), latent_options(strategy, threads));
        read(short_one.get(), std::span(tokens).first(1000));
        return relative_error(logits_after(session.get(), 65), logits_after(short_one.get(), 65));
      }();
      CHECK(error < 2e-2);
    }
    CHECK(logits[0] == logits[1]);
  }
}

TEST_CASE("latent attention: a spilled sequence gives the bits of one in memory") {
  const TempFolder folder;
  const auto tokens = text(6000);
  SessionOptions small = latent_options("quest");
  small.prefill_chunk = 256;
  const auto whole = open_session(deep_model(), small);
  read(whole.get(), tokens);
  small.memory.bytes = whole->store().min_bytes(tokens.size() + 100) + (3 << 20);
  small.memory.spill_folder = folder.path();
  const auto spilled = open_session(deep_model(), small);
  read(spilled.get(), tokens);
  CHECK(spilled->store().pages().spilled_bytes() > 0);
  CHECK(continue_with(spilled.get(), 4) == continue_with(whole.get(), 4));
  CHECK(logits_after(spilled.get(), 65) == logits_after(whole.get(), 65));
}

TEST_CASE("latent attention: a damaged page of a file is reported, and no other's bytes used") {
  const TempFolder folder;
  const auto document = open_session(deep_model(), latent_options("full"));
  read(document.get(), text(document_tokens));
  REQUIRE(document->save(folder.file("a.kv"), nullptr, {}).ok());
  uint64_t place = 0;
  {
    std::shared_ptr<const CacheFile> file;
    REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
    CHECK(file->version() == format::version);
    const CacheFile::Section* pages = file->find(format::SectionKind::pages);
    REQUIRE(pages);
    CHECK(pages->bytes == 2 * 3 * 16 * 9 * 4096);
    place = pages->offset + 9 * 4096 * 3 + 5 * 4096 + 100;  // the sixth block of the fourth page
  }
  std::fstream(folder.file("a.kv"), std::ios::binary | std::ios::in | std::ios::out)
      .seekp(static_cast<std::streamoff>(place))
      .put('x');
  std::unique_ptr<Session> session;
  REQUIRE(Session::load(deep_model(), folder.file("a.kv"), latent_options("full"), false, nullptr,
                        {}, &session)
              .ok());
  const Token token = 65;
  uint64_t done = 0;
  check_fails(session->prefill_tokens({&token, 1}, nullptr, nullptr, {}, &done), Code::corrupt,
              "pages");
}

TEST_CASE("latent attention: rows of another engine are refused, in memory and in a file") {
  const TempFolder folder;
  const LatentSize size{2, 32, 2, 32, 8};
  const auto model = open_model(save_latent_model(folder.file("a.gguf"), size, random_heads(size)));
  BareOptions o;
  o.shape = model->config();
  o.max_tokens = 1000;
  std::unique_ptr<ExternalStore> cache;
  REQUIRE(ExternalStore::open(o, &cache).ok());
  std::unique_ptr<Session> session;
  const auto tokens = text(10);
  check_fails(Session::adopt(model, *cache, tokens, {}, {.document = true}, nullptr, {}, &session),
              Code::unsupported, "values are parts of its keys");
}
