// Which documents of a composition an answer attends.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "compose_helpers.h"
#include "pool.h"
#include "session/composition.h"

using namespace kvasir;
using namespace kvasir::test;

TEST_CASE("four layers choose documents at most, and none with less than half the largest error") {
  using Layers = std::vector<bool>;
  const float two[] = {0.1f, 0.3f, 0.14f, 0.2f, 0.0f, 0.15f};
  CHECK(retrieval_layers(two, 6) == Layers{false, true, false, true, false, true});
  const float many[] = {0.8f, 0.9f, 1.0f, 0.7f, 0.9f, 0.9f};
  CHECK(retrieval_layers(many, 6) == Layers{false, true, true, false, true, true});
  const float equal[] = {1, 1, 1, 1, 1, 1};
  CHECK(retrieval_layers(equal, 6) == Layers{true, true, true, true, false, false});
  CHECK(retrieval_layers({}, 3) == Layers{true, true, true});
}

TEST_CASE("an answer attends the documents that the question is about") {
  for (uint32_t most : {2u, 1u}) {
    auto session = compose(mini_model(), saved().long_paths, options_of("bounded"), most);
    for (std::size_t i = 0; i < 3; ++i) {
      const bool known = knows(session.get(), i);
      CHECK((known || most == 1));
      double sum = 0;
      uint32_t chosen = 0;
      for (const DocumentReport& report : session->documents()) {
        chosen += report.is_chosen;
        CHECK((report.score >= 0 && report.score <= 1));
        sum += report.score;
      }
      CHECK((chosen >= 1 && chosen <= most));
      CHECK(session->documents()[i].is_chosen == known);
      CHECK(std::abs(sum - 1) < 1e-4);
    }
  }
  auto session = compose(mini_model(), saved().long_paths, options_of("bounded"), 1);
  // of those that the caller allows
  const std::vector<uint32_t> others = {0, 2};
  REQUIRE(session->set_candidates(others).ok());
  CHECK(!knows(session.get(), 1));
  CHECK(!session->documents()[1].is_chosen);
  CHECK(session->documents()[1].score == -1);
}

TEST_CASE("a question that fails leaves the choice of the answer before it, and no evidence") {
  auto session = compose(mini_model(), saved().long_paths, options_of("bounded"), 2);
  GenerateOptions traced = briefly();
  traced.trace = true;
  ask(session.get(), question_of(0), traced);
  const auto chosen = [&] {
    std::vector<bool> out;
    for (const DocumentReport& d : session->documents()) out.push_back(d.is_chosen);
    return out;
  };
  const std::vector<bool> before = chosen();
  const std::vector<uint32_t> last = {2};
  REQUIRE(session->set_candidates(last).ok());
  GenerateOptions failing = briefly();
  failing.thinking = false;
  Cancel cancel;
  failing.cancel = &cancel;
  failing.progress = [&](uint64_t, uint64_t) { return cancel.fire(), 0; };
  Answer answer;
  CHECK(session->generate(question_of(2), failing, {}, &answer).code() == Code::cancelled);
  CHECK(chosen() == before);
  std::vector<Passage> none;
  CHECK(session->passages(&none).code() == Code::bad_state);
}

TEST_CASE("documents are chosen where not all fit into the context, and counted in it") {
  SessionOptions options = options_of("bounded");
  options.context = 10000;
  auto session = compose(mini_model(), saved().long_paths, options);  // 13,124 tokens
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(knows(session.get(), i));
    uint64_t tokens = 0, chosen = 0;
    for (const DocumentReport& d : session->documents())
      if (d.is_chosen) tokens += d.tokens, ++chosen;
    CHECK(session->documents()[i].is_chosen);
    CHECK(chosen <= 2);
    CHECK(tokens < options.context);
  }
  options.context = 4700;  // a document and a question, and no document after a conversation
  session = compose(mini_model(), saved().long_paths, options);
  CHECK(knows(session.get(), 1));
  ask(session.get(), question_of(1), keeping(24));
  Answer answer;
  Status s;
  for (int i = 0; i < 12 && s.ok(); ++i)
    s = session->generate(question_of(0), keeping(24), {}, &answer);
  CHECK(s.code() == Code::context_full);
  REQUIRE(session->rewind(0).ok());
  CHECK(knows(session.get(), 1));
}

TEST_CASE("a question about several documents attends them, and one about none attends all") {
  auto session = compose(mini_model(), numbered().paths, options_of("bounded"));
  const auto chosen = [&] {
    std::vector<uint32_t> out;
    for (uint32_t d = 0; d < 7; ++d)
      if (session->documents()[d].is_chosen) out.push_back(d);
    return out;
  };
  ask(session.get(), numbers_question, briefly());
  CHECK(chosen() == std::vector<uint32_t>{2, 4, 6});
  for (const char* question : {"What is this text about?", "Who are the main characters?"}) {
    ask(session.get(), question, briefly());
    CHECK(chosen().size() == 7);
  }
  // without a question the documents stay
  ask(session.get(), question_of(0), keeping(4));
  const auto before = chosen();
  CHECK(before == std::vector<uint32_t>{0});
  ask(session.get(), "", keeping(20));
  CHECK(chosen() == before);
}

// Of stores with different centres, bases and lengths, in a layer that retrieves.
TEST_CASE("the best scores of a document's blocks by its sketch are near the exact ones") {
  constexpr uint32_t layer = 7, tokens = 16;
  const ModelConfig& c = mini_model()->config();
  Attention attention(c, mini_model()->store_shape().page, cpu_kernels(), &pool(2));
  std::vector<std::unique_ptr<Session>> documents;
  for (const std::string& path : saved().long_paths)
    documents.push_back(load_session(path, options_of("auto")));
  // queries that look for a key of the last document
  std::vector<float> q(std::size_t{tokens} * c.heads * c.head_dim);
  const KvStore& from = documents[2]->store();
  for (uint32_t t = 0; t < tokens; ++t)
    for (uint32_t h = 0; h < c.heads; ++h)
      for (uint32_t d = 0; d < c.head_dim; ++d)
        q[(std::size_t{t} * c.heads + h) * c.head_dim + d] =
            from.window(layer, h / c.group()).k[t * from.shape().page.dim + d] * 4;
  const Plan plan;
  const CancelLatch latch(nullptr);
  double off = 0, spread = 0, mean = 0;
  std::vector<float> all;
  const auto estimates = make_bounded_selector();
  for (const auto& document : documents) {
    const KvStore& store = document->store();
    std::vector<float> found[2];
    for (const Selector* selector : {estimates.get(), static_cast<const Selector*>(nullptr)}) {
      std::vector<float>& scores = found[selector == nullptr];
      scores.resize(std::size_t{tokens} * c.heads * Attention::score_block_count(store));
      const AttentionRequest request{.layer = layer,
                                     .tokens = tokens,
                                     .q = q.data(),
                                     .store = store,
                                     .selector = selector,
                                     .plan = plan,
                                     .is_apart = true,
                                     .skipped = 4,
                                     .cancel = latch};
      float* const to = scores.data();
      REQUIRE(attention.score_blocks({&request, 1}, {&to, 1}).ok());
    }
    for (std::size_t i = 0; i < found[0].size(); ++i)
      off += std::abs(static_cast<double>(found[0][i] - found[1][i]));
    all.insert(all.end(), found[1].begin(), found[1].end());
  }
  for (float x : all) mean += static_cast<double>(x) / static_cast<double>(all.size());
  for (float x : all) spread += std::abs(static_cast<double>(x) - mean);
  CHECK(off < 0.2 * spread);
}
