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

TEST_CASE("of many documents those without evidence leave, and the right one stays") {
  std::vector<std::string> paths = {saved().long_paths[1]};
  for (int i = 0; i < 70; ++i) paths.push_back(saved().long_paths[i % 2 ? 0 : 2]);
  auto session = compose(mini_model(), paths, options_of("bounded"), 1);
  CHECK(knows(session.get(), 1));
  CHECK(session->documents()[0].is_chosen);
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
      std::vector<RowFacts> facts(std::size_t{tokens} * c.heads);
      const Attention::ScoredRows to = {scores.data(), facts.data()};
      REQUIRE(attention.score_blocks({&request, 1}, 0, c.kv_heads, {&to, 1}).ok());
    }
    for (std::size_t i = 0; i < found[0].size(); ++i)
      off += std::abs(static_cast<double>(found[0][i] - found[1][i]));
    all.insert(all.end(), found[1].begin(), found[1].end());
  }
  for (float x : all) mean += static_cast<double>(x) / static_cast<double>(all.size());
  for (float x : all) spread += std::abs(static_cast<double>(x) - mean);
  CHECK(off < 0.2 * spread);
}

namespace {

// The queries of a step in layers of three documents.
struct Scored {
  static constexpr uint32_t tokens = 40, layer = 6;
  const ModelConfig& c = mini_model()->config();
  Attention attention{c, mini_model()->store_shape().page, cpu_kernels(), &pool(3)};
  std::vector<std::unique_ptr<Session>> documents;
  std::vector<float> q;
  std::vector<std::vector<RowFacts>> facts;  // of the last blocks(), [documents][rows]
  const std::unique_ptr<const Selector> estimates = make_bounded_selector();

  Scored() {
    for (const std::string& path : saved().long_paths)
      documents.push_back(load_session(path, options_of("auto")));
    for (std::size_t i = 0; i < std::size_t{tokens} * c.q_width(); ++i)
      q.push_back(std::sin(static_cast<float>(i * i % 7919)));
  }
  // Of all documents in two layers, by the tokens from the fourth on.
  DocumentScores asked_for(bool ends_step) const {
    DocumentScores scores;
    for (const auto& document : documents)
      scores.documents.push_back({.store = &document->store(), .tokens_before = 5000});
    scores.left = {0, 1, 2};
    scores.layers.assign(c.layers, false);
    scores.layers[2] = scores.layers[4] = true;
    scores.first = 3, scores.ends_step = ends_step;
    return scores;
  }
  // Of all documents: [KV head][tokens from `first` on][heads of the KV head][blocks].
  std::vector<std::vector<float>> blocks(uint32_t first, uint32_t head, uint32_t end_head,
                                         bool estimated) {
    const Plan plan;
    const CancelLatch latch(nullptr);
    std::vector<AttentionRequest> requests;
    std::vector<std::vector<float>> out;
    std::vector<Attention::ScoredRows> to;
    facts.assign(documents.size(), {});
    for (const auto& document : documents) {
      requests.push_back({.layer = layer,
                          .first = first,
                          .tokens = tokens,
                          .q = q.data(),
                          .store = document->store(),
                          .selector = estimated ? estimates.get() : nullptr,
                          .plan = plan,
                          .is_apart = true,
                          .skipped = 4,
                          .cancel = latch});
      out.emplace_back(std::size_t{tokens - first} * (end_head - head) * c.group() *
                       Attention::score_block_count(document->store()));
    }
    for (std::size_t d = 0; d < out.size(); ++d) {
      facts[d].resize(std::size_t{tokens - first} * (end_head - head) * c.group());
      to.push_back({out[d].data(), facts[d].data()});
    }
    REQUIRE(attention.score_blocks(requests, head, end_head, to).ok());
    return out;
  }
};

// One for each document: the step's tokens in `step` select.
std::vector<AttentionRequest> requests_of(const Scored& s,
                                          const std::vector<std::unique_ptr<Session>>& documents,
                                          PageRange step, const Plan& plan, PageRange hidden,
                                          const CancelLatch& latch) {
  std::vector<AttentionRequest> requests;
  for (const auto& document : documents)
    requests.push_back({.layer = Scored::layer,
                        .first = step.first,
                        .tokens = step.end,
                        .q = s.q.data(),
                        .store = document->store(),
                        .selector = s.estimates.get(),
                        .plan = plan,
                        .is_apart = true,
                        .skipped = 4,
                        .hidden = hidden,
                        .cancel = latch});
  return requests;
}

}  // namespace

TEST_CASE("scores of documents do not depend on the tokens and heads that are scored with them") {
  Scored s;
  const uint32_t group = s.c.group(), first = 7;
  for (bool estimated : {false, true}) {
    const auto all = s.blocks(0, 0, s.c.kv_heads, estimated);
    for (uint32_t h = 0; h < s.c.kv_heads; ++h) {
      const auto part = s.blocks(first, h, h + 1, estimated);
      for (std::size_t d = 0; d < all.size(); ++d) {
        const std::size_t blocks = Attention::score_block_count(s.documents[d]->store());
        for (std::size_t t = first; t < Scored::tokens; ++t)
          for (std::size_t g = 0; g < group; ++g)
            REQUIRE(std::equal(
                all[d].begin() +
                    static_cast<std::ptrdiff_t>(((h * Scored::tokens + t) * group + g) * blocks),
                all[d].begin() + static_cast<std::ptrdiff_t>(
                                     ((h * Scored::tokens + t) * group + g + 1) * blocks),
                part[d].begin() + static_cast<std::ptrdiff_t>(((t - first) * group + g) * blocks)));
      }
    }
  }
}

TEST_CASE("the exact score of a block is that of its best key") {
  Scored s;
  const auto found = s.blocks(0, 0, s.c.kv_heads, false);
  const uint32_t dim = mini_model()->store_shape().page.dim, head_dim = s.c.head_dim;
  for (std::size_t d = 0; d < found.size(); ++d) {
    const KvStore& store = s.documents[d]->store();
    const PageShape& shape = store.shape().page;
    const uint32_t blocks = Attention::score_block_count(store);
    REQUIRE(blocks > 9);  // more than a kernel call scores
    std::vector<float> k(std::size_t{shape.page_tokens} * dim), v(k.size());
    for (uint32_t t : {0u, 13u, 39u})
      for (uint32_t h = 0; h < s.c.heads; ++h) {
        const uint32_t group = s.c.group(), kv = h / group;
        const std::size_t row = (std::size_t{kv} * Scored::tokens + t) * group + h % group;
        const float* const q = s.q.data() + (std::size_t{t} * s.c.heads + h) * head_dim;
        const float* const centre =
            store.centre().data() + (std::size_t{Scored::layer} * s.c.kv_heads + kv) * dim;
        std::vector<double> best(blocks, -1e30);
        const auto raise = [&](uint32_t block, const float* key) {
          double sum = 0;
          for (uint32_t i = 0; i < head_dim; ++i)
            sum += static_cast<double>(q[i]) *
                   (static_cast<double>(key[i]) + static_cast<double>(centre[i]));
          best[block] = std::max(best[block], sum / std::sqrt(static_cast<double>(head_dim)));
        };
        for (uint32_t i = 4; i < store.sink_count(); ++i)
          raise(0, store.sinks(Scored::layer, kv).k + std::size_t{i} * dim);
        for (uint32_t i = 0; i < store.window_count(); ++i)
          raise(0, store.window(Scored::layer, kv).k + std::size_t{i} * dim);
        for (uint32_t p = 1; p < store.pages().pages(); ++p) {
          const PageRef page = store.pages().page(Scored::layer, kv, p);
          cpu_kernels().unseal_page(shape, page.data, page.scales, k.data(), v.data());
          for (uint32_t i = 0; i < shape.page_tokens; ++i)
            raise(p * shape.page_tokens / Attention::score_block_tokens,
                  k.data() + std::size_t{i} * dim);
        }
        for (uint32_t b = 0; b < blocks; ++b)
          REQUIRE(std::abs(static_cast<double>(found[d][row * blocks + b]) - best[b]) < 0.1);
      }
  }
}

TEST_CASE("a step that is wanted for scores alone has those of a whole one, and appends nothing") {
  Scored s;
  std::unique_ptr<Forward> forward;
  REQUIRE(Forward::create(s.documents[0]->shared_model(), 8192, &pool(2), &forward).ok());
  std::vector<Token> tokens(s.documents[1]->tokens().begin(), s.documents[1]->tokens().begin() + 9);
  std::vector<float> found[2];
  for (bool ends : {false, true}) {
    KvStore store(mini_model()->store_shape(), 64);
    DocumentScores scores = s.asked_for(ends);
    std::size_t rows = 0;
    scores.take = [&](std::size_t count) {
      rows += count;
      found[ends].insert(found[ends].end(), scores.scores.get(),
                         scores.scores.get() + scores.floats);
    };
    ForwardStep step;
    step.tokens = tokens, step.scores = &scores;
    REQUIRE(forward->run(step, {store}).ok());
    CHECK(rows == 2 * 6 * s.c.heads);
    CHECK(store.tokens() == (ends ? 0 : tokens.size()));
  }
  CHECK(found[0] == found[1]);
}

TEST_CASE(
    "documents that leave after a layer change no scores of others, nor does a part of tokens") {
  Scored s;
  std::unique_ptr<Forward> forward;
  REQUIRE(Forward::create(s.documents[0]->shared_model(), 8192, &pool(2), &forward).ok());
  std::vector<Token> tokens(s.documents[1]->tokens().begin(), s.documents[1]->tokens().begin() + 9);
  std::vector<float> found[3];  // of the last document in layer 4
  for (int way : {0, 1, 2}) {
    KvStore store(mini_model()->store_shape(), 64);
    DocumentScores scores = s.asked_for(true);
    if (way == 2) scores.max_floats = 1;
    int layers = 0;
    std::size_t taken = 0;
    scores.take = [&](std::size_t rows) {
      const std::size_t i = scores.left.size() - 1,
                        blocks = Attention::score_block_count(s.documents[2]->store());
      REQUIRE(scores.left[i] == 2);
      const float* const from = scores.of_document[i];
      for (std::size_t r = 0; r < rows; ++r) {
        const std::span<const float> row(from + r * blocks, blocks);
        const RowFacts facts = scores.facts_of(i, rows)[r];
        double sum = 0, off = 0;
        for (float x : row) sum += static_cast<double>(x);
        const double mean = sum / static_cast<double>(blocks);
        for (float x : row)
          off += (static_cast<double>(x) - mean) * (static_cast<double>(x) - mean);
        CHECK(facts.best == *std::max_element(row.begin(), row.end()));
        CHECK(static_cast<double>(facts.variance) ==
              doctest::Approx(off / static_cast<double>(blocks)).epsilon(1e-3));
      }
      taken += rows;
      if (layers == 1) found[way].insert(found[way].end(), from, from + rows * blocks);
    };
    scores.end_layer = [&] {
      ++layers;
      if (way == 1) scores.left = {0, 2};
    };
    ForwardStep step;
    step.tokens = tokens, step.scores = &scores;
    REQUIRE(forward->run(step, {store}).ok());
    CHECK(layers == 2);
    CHECK(taken == 2 * 6 * s.c.heads);
  }
  CHECK(!found[0].empty());
  CHECK(found[0] == found[1]);
  std::sort(found[0].begin(), found[0].end());  // in another order
  std::sort(found[2].begin(), found[2].end());
  CHECK(found[0] == found[2]);
}

TEST_CASE("documents that are attended at once have the bits of those attended one by one") {
  Scored s;
  SelectOptions select = options_of("bounded").select;
  select.budget_tokens = 256;
  const Plan plan = make_plan(select, s.documents[0]->store().sealed_tokens(), s.c.layers, {});
  const CancelLatch latch(nullptr);
  std::vector<AttentionRequest> requests = requests_of(s, s.documents, {0, 1}, plan, {}, latch);
  const std::size_t n = requests.size(), width = s.c.q_width(), heads = s.c.heads;
  std::vector<float> out(n * width), lse(n * heads), one(n * width), one_lse(n * heads);
  REQUIRE(s.attention.can_run_together(requests));
  for (std::size_t d = 0; d < n; ++d)
    REQUIRE(s.attention.run(requests[d], one.data() + d * width, one_lse.data() + d * heads).ok());
  const ReadCounts counts = s.attention.counts();
  s.attention.reset_counts();
  REQUIRE(s.attention.run_together(requests, out.data(), lse.data()).ok());
  CHECK(out == one);
  CHECK(lse == one_lse);
  CHECK(s.attention.counts().tokens_read == counts.tokens_read);
  CHECK(counts.tokens_read > 0);
  CHECK(s.attention.counts().tokens_present == counts.tokens_present);
  requests[1].selector = nullptr;
  CHECK(!s.attention.can_run_together(requests));
}

TEST_CASE("a question attends documents at once with the bits of one by one, for any threads") {
  constexpr uint32_t tokens = Scored::tokens, first = 3;
  Scored s;
  SelectOptions select = options_of("bounded").select;
  select.budget_tokens = 256;
  std::vector<std::unique_ptr<Session>> documents;
  for (std::size_t i = 0; i < 3; ++i) {
    documents.push_back(open_session(mini_model(), options_of("auto")));
    uint64_t count = 0, bytes = 0;
    REQUIRE(documents[i]
                ->prefill(text_of(i, 9000 + 3000 * i), false, nullptr, {}, &count, &bytes)
                .ok());
  }
  Plan plan = make_plan(select, documents[0]->store().sealed_tokens(), s.c.layers, {});
  plan.query_batch = true;
  const CancelLatch latch(nullptr);
  std::vector<AttentionRequest> requests =
      requests_of(s, documents, {first, tokens}, plan, {5, 9}, latch);
  const std::size_t n = requests.size(), width = tokens * s.c.q_width(), heads = tokens * s.c.heads;
  std::vector<float> one(n * width), one_lse(n * heads);
  for (std::size_t d = 0; d < n; ++d)
    REQUIRE(s.attention.run(requests[d], one.data() + d * width, one_lse.data() + d * heads).ok());
  const ReadCounts counts = s.attention.counts();
  for (uint32_t threads : {1u, 4u}) {
    Attention attention(s.c, mini_model()->store_shape().page, cpu_kernels(), &pool(threads));
    std::vector<float> out(n * width), lse(n * heads);
    REQUIRE(attention.can_run_together(requests));
    REQUIRE(attention.run_together(requests, out.data(), lse.data()).ok());
    CHECK(out == one);
    CHECK(lse == one_lse);
    CHECK(attention.counts().tokens_read == counts.tokens_read);
    CHECK(counts.tokens_read > 0);
    CHECK(attention.counts().tokens_present == counts.tokens_present);
    CHECK(attention.counts().pages_touched == counts.pages_touched);
    CHECK(attention.counts().summary_bytes == counts.summary_bytes);
    std::fill(out.begin(), out.end(), 0.0f);
    REQUIRE(attention.run_together({requests.data(), 1}, out.data(), lse.data()).ok());
    CHECK(std::equal(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(width), one.begin()));
  }
  plan.query_batch = false;
  CHECK(!s.attention.can_run_together(requests));
}
