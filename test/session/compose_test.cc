// Sessions over several saved documents.
#include <algorithm>
#include <cmath>
#include <string>

#include "compose_helpers.h"
#include "pool.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// The plain equations: one store with the documents' keys at the positions of their places, in full
// precision, and the tokens after them. skip: first tokens of later documents that are left out.
// Returns the log-probabilities of `then` after `tail`.
std::vector<float> plainly(const std::vector<std::unique_ptr<Session>>& documents, uint64_t skip,
                           std::span<const Token> tail, std::span<const Token> then) {
  const Model& model = documents[0]->model();
  const ModelConfig& c = model.config();
  KvStore store(model.store_shape(), KvStore::keep_all);
  for (std::size_t d = 0; d < documents.size(); ++d) {
    const KvStore& from = documents[d]->store();
    REQUIRE(from.sealed_tokens() == 0);
    const uint64_t left_out = d == 0 ? 0 : skip;
    const auto n = static_cast<uint32_t>(from.tokens() - left_out);
    const uint64_t turned = store.tokens() - left_out;
    REQUIRE(store.prepare(n).ok());
    for (uint32_t l = 0; l < c.depth(); ++l) {
      const LayerConfig& layer = c.layer(l);
      const uint32_t dim = layer.head_dim, padded = from.shape().page.dim,
                     first = layer.is_latent() ? layer.latent.rank : 0;
      std::vector<float> k(std::size_t{n} * layer.kv_heads * dim), v(k.size());
      const bool turns = layer.has_rope() || layer.is_latent();
      const uint32_t half = turns ? c.ropes[layer.rope].dim / 2 : 0;
      std::vector<float> cosines(half), sines(half);
      if (turns) model.ropes(c.context)[layer.rope].turn(turned, cosines.data(), sines.data());
      for (uint32_t h = 0; h < layer.kv_heads; ++h)
        for (uint32_t t = 0; t < n; ++t) {
          const KvStore::Rows rows = from.window(layer.kv, h);
          float* to = k.data() + (std::size_t{t} * layer.kv_heads + h) * dim;
          std::copy_n(rows.k + (t + left_out) * padded, dim, to);
          std::copy_n(rows.v + (t + left_out) * padded, dim, v.data() + (to - k.data()));
          for (uint32_t i = 0; i < half; ++i) {
            const bool neox = c.ropes[layer.rope].neox;
            float &x = to[first + (neox ? i : 2 * i)],
                  &y = to[first + (neox ? i + half : 2 * i + 1)];
            const float a = x, b = y;
            x = a * cosines[i] - b * sines[i], y = a * sines[i] + b * cosines[i];
          }
        }
      store.write(layer.kv, n, k.data(), layer.is_latent() ? nullptr : v.data());
    }
    store.commit(n, cpu_kernels(), &pool(2));
  }
  std::unique_ptr<Forward> forward;
  REQUIRE(Forward::create(documents[0]->shared_model(), c.context, &pool(2), &forward).ok());
  std::vector<float> logits(c.vocabulary), out;
  const auto run = [&](std::span<const Token> tokens) {
    ForwardStep step;
    step.tokens = tokens;
    step.want = ForwardStep::Logits::last;
    step.logits = logits.data();
    REQUIRE(forward->run(step, {store}).ok());
  };
  run(tail);
  for (std::size_t i = 0; i < then.size(); ++i) {
    double sum = 0;
    for (float x : logits) sum += std::exp(static_cast<double>(x));
    out.push_back(logits[static_cast<std::size_t>(then[i])] - static_cast<float>(std::log(sum)));
    run(then.subspan(i, 1));
  }
  return out;
}

double furthest(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i] - b[i])));
  return most;
}

}  // namespace

// Of every kind of attention and of RoPE that can be composed.
TEST_CASE("a composition attends as one store with its documents' keys moved") {
  for (const char* name :
       {"llama-f32", "llama-rope-yarn", "llama-ropefreqs", "llama-rope-linear", "qwen3-f16",
        "phi3-long", "phi3-short", "stablelm", "smollm3", "deepseek2-v2", "minicpm3"}) {
    CAPTURE(name);
    const auto model = open_model(FIXTURES "/models/" + std::string(name) + ".gguf");
    TempFolder folder;
    std::vector<std::string> exact_paths, paths;
    std::vector<std::unique_ptr<Session>> documents;
    for (uint32_t d = 0; d < 3; ++d)
      for (bool exact : {true, false}) {
        auto session = open_session(model, options_of("full", exact));
        read(session.get(), some_tokens(150 + 90 * d, 11 + d));
        std::vector<std::string>& to = exact ? exact_paths : paths;
        to.push_back(folder.file((exact ? "e" : "d") + std::to_string(d)));
        REQUIRE(session->save(to.back(), nullptr, {}).ok());
        if (exact) documents.push_back(std::move(session));
      }
    const auto then = some_tokens(12, 3);
    auto exact = compose(model, exact_paths, options_of("full", true), 3);
    ask(exact.get(), "abc abd abe", keeping(1));
    const auto wanted = plainly(documents, 0, exact->tokens(), then);
    CHECK(furthest(scores_of(exact.get(), then), wanted) < 1e-3);
    auto session = compose(model, paths, options_of("full"), 3);
    ask(session.get(), "abc abd abe", keeping(1));
    CHECK(furthest(scores_of(session.get(), then), wanted) < 0.5);
  }
}

// Of later documents, the marks and instructions before the text are left out.
TEST_CASE("a composition of texts has one opening") {
  const auto model = open_model(FIXTURES "/models/llama-f32.gguf");
  SessionOptions options = options_of("full", true);
  options.instructions = "bcd efg hij";
  TempFolder folder;
  std::vector<std::string> paths;
  std::vector<std::unique_ptr<Session>> documents;
  for (int d = 0; d < 3; ++d) {
    std::string text;
    for (int i = 0; i < 100 + 30 * d; ++i) text += static_cast<char>('a' + (i * i + d) % 23);
    auto session = open_session(model, options);
    uint64_t tokens = 0, bytes = 0;
    REQUIRE(session->prefill(text, false, nullptr, {}, &tokens, &bytes).ok());
    paths.push_back(folder.file(std::to_string(d)));
    REQUIRE(session->save(paths.back(), nullptr, {}).ok());
    documents.push_back(std::move(session));
  }
  Array<Token> opening;
  REQUIRE(Session::encode_first(*model, documents[0]->chat(), "", false, nullptr, &opening, nullptr,
                                *options.instructions)
              .ok());
  REQUIRE(opening.size() > 3);
  const auto then = some_tokens(12, 3);
  auto session = compose(model, paths, options_of("full", true), 3);
  CHECK(session->instructions() == *options.instructions);
  ask(session.get(), "abc", keeping(1));
  const auto scores = scores_of(session.get(), then);
  CHECK(furthest(scores, plainly(documents, opening.size(), session->tokens(), then)) < 1e-3);
  CHECK(furthest(scores, plainly(documents, opening.size() - 1, session->tokens(), then)) > 1e-3);
}

TEST_CASE("a composition finds what one of its documents says") {
  for (const char* strategy : {"auto", "full", "bounded"}) {
    CAPTURE(strategy);
    auto session = compose(mini_model(), saved().long_paths, options_of(strategy), 3);
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(knows(session.get(), i));
      for (const DocumentReport& d : session->documents()) CHECK((d.is_chosen && d.score == -1));
    }
    // `auto` goes by the tokens of all documents
    CHECK(session->stats().decode_strategy == (strategy[0] == 'f' ? "full" : "bounded"));
  }
}

TEST_CASE("a composition of one document is a loaded session, bit for bit") {
  const std::vector<std::string> one = {saved().long_paths[0]};
  auto composed = compose(mini_model(), one, options_of("auto")),
       loaded = load_session(one[0], options_of("auto"));
  CHECK(ask(composed.get(), question_of(0), keeping(8)) ==
        ask(loaded.get(), question_of(0), keeping(8)));
  const auto then = book_tokens(12);
  CHECK(scores_of(composed.get(), then) == scores_of(loaded.get(), then));
  CHECK(std::equal(composed->tokens().begin(), composed->tokens().end(), loaded->tokens().begin(),
                   loaded->tokens().end()));
  REQUIRE(composed->documents().size() == 1);
  CHECK(std::string(composed->documents()[0].path) == one[0]);
  REQUIRE(composed->rewind(10).ok());  // a part of the document stays
  CHECK(composed->documents()[0].tokens == 10);
  CHECK(composed->document_tokens(0).size() == 10);
}

TEST_CASE("what cannot be composed is refused by name") {
  std::vector<std::string> paths = {saved().paths[0], saved().paths[1]};
  const auto says = [](const Status& s, Code code, const char* what) {
    CHECK(s.code() == code);
    CHECK_MESSAGE(std::string(s.message()).find(what) != std::string::npos, s.message());
  };
  says(refused({}, options_of("auto")), Code::bad_argument, "no document");
  for (const char* strategy : {"filter-layers", "snapkv", "infllm", "ood"}) {
    says(refused(paths, options_of(strategy)), Code::unsupported, strategy);
    auto session = compose(mini_model(), paths, options_of("auto"));
    SelectOptions select;
    select.strategy = strategy;
    says(session->set_select(select), Code::unsupported, strategy);
  }
  SessionOptions drafting = options_of("auto");
  drafting.draft_tokens = 2;
  says(refused(paths, drafting), Code::unsupported, "draft_tokens");
  SessionOptions instructed = options_of("auto");
  instructed.instructions = "Answer in one word.";
  says(refused(paths, instructed), Code::model_mismatch, "instructions");

  TempFolder folder;
  const auto with = [&](const std::string& path) {
    return std::vector<std::string>{saved().paths[0], path};
  };
  auto session = load_session(saved().paths[1], options_of("auto"));
  ask(session.get(), question_of(1), keeping(4));
  REQUIRE(session->save(folder.file("asked.kv"), nullptr, {}).ok());
  says(refused(with(folder.file("asked.kv")), options_of("auto")), Code::bad_argument, "alone");
  session = open_session(mini_model(), instructed);
  uint64_t tokens = 0, bytes = 0;
  REQUIRE(session->prefill("Some text.", false, nullptr, {}, &tokens, &bytes).ok());
  REQUIRE(session->save(folder.file("instructed.kv"), nullptr, {}).ok());
  says(refused(with(folder.file("instructed.kv")), options_of("auto")), Code::model_mismatch,
       "other instructions");
  session = open_session(mini_model(), options_of("auto"));
  read(session.get(), book_tokens(100));
  REQUIRE(session->save(folder.file("tokens.kv"), nullptr, {}).ok());
  says(refused(with(folder.file("tokens.kv")), options_of("auto")), Code::model_mismatch,
       "another kind");
  const auto other = open_model(FIXTURES "/models/llama-f32.gguf");
  auto foreign = open_session(other, options_of("full"));
  read(foreign.get(), some_tokens(100));
  REQUIRE(foreign->save(folder.file("foreign.kv"), nullptr, {}).ok());
  says(refused(with(folder.file("foreign.kv")), options_of("auto")), Code::model_mismatch,
       "another model");
  says(refused(with(folder.file("none.kv")), options_of("auto")), Code::not_found, "none.kv");
}

TEST_CASE("models whose documents cannot be composed are refused by name") {
  const auto model = open_model(FIXTURES "/models/hunyuan-dense.gguf");
  std::unique_ptr<Session> session;
  const std::vector<std::string> paths = {"a.kv", "b.kv"};
  const Status s = Session::compose(model, {.paths = paths}, options_of("auto"), &session);
  CHECK(s.code() == Code::unsupported);
  CHECK_MESSAGE(std::string(s.message()).find("after RoPE") != std::string::npos, s.message());
}

TEST_CASE(
    "documents of every kind of layer are composed, and a conversation goes on after a load") {
  for (const char* name : {"cohere2", "exaone4-swa", "falcon-h1", "gemma2", "gemma3", "gemma3n",
                           "gpt-oss", "granitehybrid", "lfm2", "deepseek2-v2", "qwen3next"}) {
    CAPTURE(name);
    const auto model = open_model(FIXTURES "/models/" + std::string(name) + ".gguf");
    TempFolder folder;
    std::vector<std::string> paths;
    for (uint32_t i = 0; i < 3; ++i) {
      auto document = open_session(model, options_of("auto"));
      read(document.get(), some_tokens(700, i));
      paths.push_back(folder.file(std::to_string(i) + ".kv"));
      REQUIRE(document->save(paths.back(), nullptr, {}).ok());
    }
    auto session = compose(model, paths, options_of("full"));
    ask(session.get(), "what is it?", keeping(20));
    const std::string path = folder.file("kept.kv");
    REQUIRE(session->save(path, nullptr, {}).ok());
    std::unique_ptr<Session> loaded, fork;
    const Status s = Session::load(model, path, options_of("full"), false, nullptr, {}, &loaded);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    REQUIRE(session->fork(&fork).ok());
    const auto tokens = some_tokens(40, 9);
    const std::vector<float> expected = scores_of(session.get(), tokens);
    for (float x : expected) REQUIRE(std::isfinite(x));
    CHECK(scores_of(loaded.get(), tokens) == expected);
    CHECK(scores_of(fork.get(), tokens) == expected);
    // without one of the documents it is another text
    auto two = compose(model, std::span(paths).first(2), options_of("full"));
    ask(two.get(), "what is it?", keeping(20));
    CHECK(scores_of(two.get(), tokens) != expected);
  }
}

TEST_CASE("a composition takes no text, and is not compared or certified") {
  auto session = compose(mini_model(), saved().paths, options_of("auto"));
  uint64_t tokens = 1, bytes = 1;
  CHECK(session->prefill("More.", false, nullptr, {}, &tokens, &bytes).code() == Code::unsupported);
  CHECK(session->prefill_tokens(book_tokens(3), nullptr, nullptr, {}, &tokens).code() ==
        Code::unsupported);
  session->set_measure(CompareLevel::attention, false);
  Answer answer;
  CHECK(session->generate(question_of(0), {}, {}, &answer).code() == Code::unsupported);
  session->set_measure(CompareLevel::none, false);
  CHECK(knows(session.get(), 0));
}

TEST_CASE("answers over a composition can be repeated, forked and rewound") {
  for (const char* strategy : {"full", "bounded"}) {
    CAPTURE(strategy);
    auto session = compose(mini_model(), saved().paths, options_of(strategy));
    const std::string first = ask(session.get(), question_of(2), briefly());
    CHECK(ask(session.get(), question_of(2), briefly()) == first);  // nothing was kept
    CHECK(session->tokens().empty());
    ask(session.get(), question_of(0), keeping(24));
    const uint64_t kept = session->tokens().size();
    CHECK(kept > 20);
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    const auto then = book_tokens(6);
    CHECK(scores_of(fork.get(), then) == scores_of(session.get(), then));
    const std::string second = ask(session.get(), question_of(1), keeping(24));
    CHECK(ask(fork.get(), question_of(1), keeping(24)) == second);
    REQUIRE(session->rewind(kept).ok());
    CHECK(ask(session.get(), question_of(1), keeping(24)) == second);
    REQUIRE(session->rewind(0).ok());
    CHECK(ask(session.get(), question_of(2), briefly()) == first);
  }
}

TEST_CASE("the evidence of a composition names the document and its bytes") {
  for (const char* strategy : {"full", "bounded"}) {
    CAPTURE(strategy);
    auto session = compose(mini_model(), saved().long_paths, options_of(strategy));
    for (std::size_t i = 0; i < 3; ++i) {
      GenerateOptions options = briefly();
      options.trace = true;
      CHECK(knows(session.get(), i, options));
      std::vector<Passage> passages;
      REQUIRE(session->passages(&passages).ok());
      REQUIRE(!passages.empty());

      CHECK(passages[0].document == i);
      CHECK(text_of(i, 16000).substr(passages[0].first_byte, passages[0].bytes).find(codes[i]) !=
            std::string::npos);
      double sum = 0;
      for (const Passage& p : passages) sum += p.share;
      CHECK(sum <= 1.0001);
    }
  }
}

TEST_CASE("documents of a composition can be limited to some") {
  auto session = compose(mini_model(), saved().long_paths, options_of("auto"));
  const std::vector<uint32_t> one = {1}, none, wrong = {1, 1}, more = {3};
  CHECK(session->set_candidates(wrong).code() == Code::bad_argument);
  CHECK(session->set_candidates(more).code() == Code::bad_argument);
  REQUIRE(session->set_candidates(one).ok());
  CHECK(knows(session.get(), 1));
  CHECK(!knows(session.get(), 2));
  auto documents = session->documents();
  REQUIRE(documents.size() == 3);
  CHECK(!documents[0].is_candidate);
  CHECK((documents[1].is_candidate && documents[1].is_chosen));
  REQUIRE(session->set_candidates(none).ok());
  CHECK(knows(session.get(), 2));
  CHECK(session->documents()[2].is_chosen);
}

TEST_CASE("a composition honours a memory limit, and says what it needs") {
  SessionOptions options = options_of("bounded");
  options.memory.bytes = 1 << 20;
  Status s = refused(saved().long_paths, options);
  CHECK(s.code() == Code::limit);
  CHECK(std::string(s.message()).find("3 documents") != std::string::npos);
  options.memory.bytes = 33 << 20;
  auto limited = compose(mini_model(), saved().long_paths, options);
  for (std::size_t i = 0; i < 3; ++i) CHECK(knows(limited.get(), i));
  const SessionStats stats = limited->stats();
  CHECK(stats.memory_limit == options.memory.bytes);
  CHECK(stats.private_bytes < options.memory.bytes);
  CHECK(stats.mapped_bytes > options.memory.bytes);
}

TEST_CASE("drafts by lookup change no bit of answers over a composition") {
  for (const char* strategy : {"full", "bounded"}) {
    CAPTURE(std::string(strategy));
    SessionOptions options = options_of(strategy);
    options.drafts_always = true;
    auto drafting = compose(mini_model(), saved().paths, options);
    options.lookup_tokens = 0;
    auto alone = compose(mini_model(), saved().paths, options);
    uint64_t looked_up = 0;
    for (const std::size_t i : {0u, 1u, 0u}) {
      CHECK(ask(drafting.get(), question_of(i), keeping(40)) ==
            ask(alone.get(), question_of(i), keeping(40)));
      looked_up += drafting->stats().drafts.looked_up;
    }
    CHECK(looked_up > 0);
    const auto then = book_tokens(12);
    CHECK(scores_of(drafting.get(), then) == scores_of(alone.get(), then));
  }
}

TEST_CASE("tokens after an answer over a composition need one that was kept") {
  auto session = compose(mini_model(), saved().paths, options_of("auto"));
  const auto refused = [&] {
    Token token = 0;
    bool end = false;
    float log_probability = 0;
    const Token one = 5;
    return session->next({}, nullptr, &token, &end).code() == Code::bad_state &&
           session->score({&one, 1}, &log_probability, nullptr, {}).code() == Code::bad_state;
  };
  CHECK(refused());
  ask(session.get(), question_of(0), briefly());
  CHECK(refused());
  ask(session.get(), question_of(0), keeping(8));
  CHECK(!refused());
  REQUIRE(session->rewind(0).ok());
  CHECK(refused());
}

TEST_CASE("a cancelled answer over a composition leaves it as it was") {
  auto session = compose(mini_model(), saved().paths, options_of("auto"));
  const std::string wanted = ask(session.get(), question_of(0), briefly());
  Cancel cancel;
  cancel.fire();
  GenerateOptions options;
  options.cancel = &cancel;
  options.keep = true;
  Answer answer;
  CHECK(session->generate(question_of(0), options, {}, &answer).code() == Code::cancelled);
  CHECK(session->tokens().empty());
  std::unique_ptr<Session> none;
  CHECK(Session::compose(mini_model(), {.paths = saved().paths, .cancel = &cancel},
                         options_of("auto"), &none)
            .code() == Code::cancelled);
  CHECK(ask(session.get(), question_of(0), briefly()) == wanted);
}
