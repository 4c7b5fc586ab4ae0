// Comparisons of a strategy with full attention: against the definition, and in whole sessions.
#include "attention/compare.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "helpers.h"
#include "select/samples.h"
#include "select/token_scores.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// What a head sees behind the sinks, in double precision: weights relative to the largest score,
// values, and sinks and window made up.
struct Head {
  std::vector<double> weights, values, near_o;  // [n], [n][head_dim], [head_dim]
  double near = 0, total = 0;
  uint32_t head_dim;

  Head(const PageStore& store, uint32_t layer, uint32_t head, const float* q, float near_m,
       float near_l, const float* o)
      : head_dim(store.shape().page.head_dim) {
    const PageShape& page = store.shape().page;
    std::vector<double> scores = plain_scores(store, layer, head, q);
    scores.erase(scores.begin(), scores.begin() + page.page_tokens);
    const double largest =
        std::max(static_cast<double>(near_m), *std::max_element(scores.begin(), scores.end()));
    near = static_cast<double>(near_l) * std::exp(static_cast<double>(near_m) - largest);
    total = near;
    for (double s : scores) weights.push_back(std::exp(s - largest)), total += weights.back();
    for (uint32_t d = 0; d < head_dim; ++d)
      near_o.push_back(static_cast<double>(o[d]) * std::exp(static_cast<double>(near_m) - largest));
    Array<float> k(page.page_tokens * page.dim), v(k.size());
    for (uint32_t p = 1; p < store.pages(); ++p) {
      const PageRef ref = store.page(layer, head / sample_group, p);
      cpu_kernels().unseal_page(page, ref.data, ref.scales, k.data(), v.data());
      for (uint32_t t = 0; t < page.page_tokens; ++t)
        for (uint32_t d = 0; d < head_dim; ++d)
          values.push_back(static_cast<double>(v[t * page.dim + d]));
    }
  }
  double mass(const std::set<uint32_t>& tokens) const {
    double sum = near;
    for (uint32_t t : tokens) sum += weights[t];
    return sum / total;
  }
  std::vector<double> output(const std::set<uint32_t>& tokens) const {
    std::vector<double> out = near_o;
    for (uint32_t t : tokens)
      for (uint32_t d = 0; d < head_dim; ++d) out[d] += weights[t] * values[t * head_dim + d];
    for (double& x : out) x /= mass(tokens) * total;
    return out;
  }
  std::set<uint32_t> best(std::size_t k) const {
    std::vector<uint32_t> order(weights.size());
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return weights[a] > weights[b]; });
    return {order.begin(), order.begin() + static_cast<std::ptrdiff_t>(std::min(k, order.size()))};
  }
};

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  return std::sqrt(difference / norm);
}

std::set<uint32_t> all_tokens(std::size_t n) {
  std::set<uint32_t> all;
  for (uint32_t t = 0; t < n; ++t) all.insert(t);
  return all;
}

// One token's queries to the store of samples.h, compared for each layer and KV head with a random
// choice; naively too.
struct Compare {
  PageStore store;
  std::vector<float> q;
  Comparison comparison{sample_layers, sample_kv_heads};
  std::vector<Head> heads;  // [layers][heads]

  Compare(uint32_t head_dim, uint32_t pages, uint32_t seed)
      : store(sample_shape(head_dim)),
        q(normals(std::size_t{sample_heads} * head_dim, seed, 0, 2)) {
    seal_pages(&store, pages, seed);
  }

  void run(CompareLevel level, bool share, uint32_t seed) {
    const PageShape& page = store.shape().page;
    const uint32_t n = (store.pages() - 1) * page.page_tokens;
    std::mt19937 random(seed);
    for (uint32_t l = 0; l < sample_layers; ++l) {
      comparison.begin(level, store, 1, 1);
      for (uint32_t h = 0; h < sample_kv_heads; ++h) {
        const std::vector<float> o = normals(std::size_t{sample_group} * page.dim,
                                             seed + l * 7 + h),
                                 m = normals(sample_group, seed + l + h, 4);
        Array<float> state_o(o.begin(), o.end()), state_m(m.begin(), m.end()),
            state_l(sample_group, 3.0f);
        TokenQueries queries(cpu_kernels(), page);
        const QueryRows& rows =
            queries.set(q.data() + std::size_t{h} * sample_group * page.head_dim, sample_group);
        Comparison::Scratch scratch;
        scratch.keep_near({state_o.data(), state_m.data(), state_l.data()}, sample_group, page.dim);

        Selection selection;
        std::vector<std::set<uint32_t>> read(sample_group);
        selection.lists.resize(share ? 1 : sample_group);
        selection.page_numbers.resize(selection.lists.size());
        for (std::size_t i = 0; i < selection.lists.size(); ++i)
          for (uint32_t p = 1; p < store.pages(); ++p) {
            const uint64_t bits =
                random() % 3 == 0 ? random() & (~uint64_t{0} >> (64 - page.page_tokens)) : 0;
            if (bits == 0) continue;
            selection.lists[i].push_back({nullptr, nullptr, bits});
            selection.page_numbers[i].push_back(p);
            for (uint32_t r = 0; r < sample_group; ++r)
              for (uint32_t t = 0; (share || r == i) && t < page.page_tokens; ++t)
                if (bits >> t & 1) read[r].insert((p - 1) * page.page_tokens + t);
          }
        if (!share) selection.found.resize(sample_group - 1);  // the last row did not search
        for (auto& found : selection.found)
          for (uint32_t t = page.page_tokens; t < store.pages() * page.page_tokens; ++t)
            if (random() % 4 == 0) found.push_back(t);
        std::vector<float> out;
        Compared expected;
        for (uint32_t r = 0; r < sample_group; ++r) {
          heads.emplace_back(store, l, h * sample_group + r, q.data(), m[r], 3.0f,
                             o.data() + std::size_t{r} * page.dim);
          const Head& head = heads.back();
          for (double x : head.output(read[r])) out.push_back(static_cast<float>(x));
          const std::set<uint32_t> best = head.best(compared_best);
          Compared c;
          c.queries = 1;
          c.mass = c.min_mass = head.mass(read[r]);
          c.error = c.largest_error = distance(head.output(read[r]), head.output(all_tokens(n)));
          c.recall = c.min_recall =
              static_cast<double>(std::count_if(best.begin(), best.end(),
                                                [&](uint32_t t) { return read[r].count(t); })) /
              static_cast<double>(best.size());
          c.tokens = static_cast<double>(read[r].size());
          if (r < selection.found.size()) {
            c.searches = 1;
            c.search_keys = static_cast<double>(selection.found[r].size());
            for (const uint32_t t : selection.found[r])
              c.search_recall +=
                  best.count(t - page.page_tokens) > 0 ? 1.0 / static_cast<double>(best.size()) : 0;
          }
          expected += c;
        }
        REQUIRE(comparison.compare({cpu_kernels(), store, l, h, 1, 0, rows, &selection, out.data()},
                                   &scratch));
        comparison.end(cpu_kernels(), l);  // sums, so that this head's are there
        const Compared& got = comparison.of(l, h);
        CHECK(got.queries == sample_group);
        CHECK(got.mass == doctest::Approx(expected.mass).epsilon(1e-4));
        CHECK(got.min_mass == doctest::Approx(expected.min_mass).epsilon(1e-4));
        // kernels round weights to 14 bits
        CHECK(got.error == doctest::Approx(expected.error).epsilon(2e-3));
        CHECK(got.largest_error == doctest::Approx(expected.largest_error).epsilon(2e-3));
        CHECK(got.recall == doctest::Approx(expected.recall));
        CHECK(got.min_recall == doctest::Approx(expected.min_recall));
        CHECK(got.tokens == expected.tokens);
        CHECK(got.searches == expected.searches);
        CHECK(got.search_keys == expected.search_keys);
        CHECK(got.search_recall == doctest::Approx(expected.search_recall));
        comparison.reset();
        comparison.begin(level, store, 1, 1);
      }
    }
  }
};

}  // namespace

TEST_CASE("compare: mass, error and recall of a choice are those of the definition") {
  for (uint32_t head_dim : {32u, 64u, 80u, 128u, 512u})
    for (bool share : {true, false}) {
      CAPTURE(head_dim);
      Compare(head_dim, 11, head_dim).run(CompareLevel::attention, share, 5 + head_dim);
    }
  Compare(64, 3, 9).run(CompareLevel::attention, true, 10);  // fewer than 100 tokens
}

TEST_CASE(
    "compare: what a layer's set holds of another layer's attention is that of the definition") {
  constexpr uint32_t head_dim = 64, pages = 14;
  PageStore store(sample_shape(head_dim));
  seal_pages(&store, pages, 3);
  const PageShape& page = store.shape().page;
  const std::size_t n = std::size_t{pages - 1} * page.page_tokens;
  Comparison comparison(sample_layers, sample_kv_heads);
  std::vector<std::vector<double>> expected(sample_layers, std::vector<double>(sample_layers));
  constexpr uint32_t steps = 3, step_tokens = 2;  // of which the newest counts
  for (uint32_t step = 0; step < steps; ++step) {
    std::vector<std::vector<Head>> heads(sample_layers);
    for (uint32_t l = 0; l < sample_layers; ++l) {
      comparison.begin(CompareLevel::layers, store, 1, step_tokens);
      for (uint32_t t = 0; t < step_tokens; ++t) {
        const std::vector<float> q =
            normals(std::size_t{sample_heads} * head_dim, 100 * step + 10 * l + t, 0, 2);
        for (uint32_t h = 0; h < sample_kv_heads; ++h) {
          Array<float> o(sample_group * page.dim, 1.0f), m(sample_group, 2.0f),
              sums(sample_group, 1.5f), out(sample_group * head_dim, 1.0f);
          TokenQueries queries(cpu_kernels(), page);
          const QueryRows& rows =
              queries.set(q.data() + std::size_t{h} * sample_group * head_dim, sample_group);
          Comparison::Scratch scratch;
          scratch.keep_near({o.data(), m.data(), sums.data()}, sample_group, page.dim);
          REQUIRE(comparison.compare({cpu_kernels(), store, l, h, 1, t, rows, nullptr, out.data()},
                                     &scratch));
          for (uint32_t r = 0; r < sample_group && t + 1 == step_tokens; ++r)
            heads[l].emplace_back(store, l, h * sample_group + r, q.data(), 2.0f, 1.5f, o.data());
        }
      }
      comparison.end(cpu_kernels(), l);
    }
    for (uint32_t i = 0; i < sample_layers; ++i) {
      std::vector<std::pair<double, uint32_t>> order;  // by the largest share of any head
      for (uint32_t t = 0; t < n; ++t) {
        double best = 0;
        for (const Head& head : heads[i]) best = std::max(best, head.weights[t] / head.total);
        order.emplace_back(-best, t);
      }
      std::sort(order.begin(), order.end());
      std::set<uint32_t> set;
      for (std::size_t k = 0;
           k < static_cast<std::size_t>(std::ceil(0.05 * static_cast<double>(n))); ++k)
        set.insert(order[k].second);
      for (uint32_t j = 0; j < sample_layers; ++j)
        for (const Head& head : heads[j]) expected[i][j] += head.mass(set) / (sample_heads * steps);
    }
  }
  CHECK(comparison.covered_steps() == steps);
  for (uint32_t i = 0; i < sample_layers; ++i)
    for (uint32_t j = 0; j < sample_layers; ++j)
      CHECK(comparison.covered(i, j) == doctest::Approx(expected[i][j]).epsilon(1e-4));
  for (uint32_t l = 0; l < sample_layers; ++l)
    for (uint32_t h = 0; h < sample_kv_heads; ++h) {
      CHECK(comparison.of(l, h).queries == steps * step_tokens * sample_group);
      CHECK(comparison.of(l, h).min_mass == 1);  // everything was read
      CHECK(comparison.of(l, h).min_recall == 1);
    }
}

namespace {

SessionOptions comparing(const char* strategy, uint64_t budget,
                         CompareLevel level = CompareLevel::attention) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = strategy;
  o.select.budget_tokens = budget;
  o.compare = level;
  return o;
}

// The comparison of seven tokens after a text, of which six are attended; as likely as without
// comparison.
std::string compared_of(const SessionOptions& options, const std::vector<Token>& tokens) {
  SessionOptions plain = options;
  plain.compare = CompareLevel::none;
  auto session = open_session(mini_model(), options), other = open_session(mini_model(), plain);
  const std::span<const Token> text(tokens.data(), tokens.size() - 7),
      rest(tokens.data() + text.size(), 7);
  std::vector<float> found(7), expected(7);
  for (Session* s : {session.get(), other.get()}) {
    read(s, text);
    REQUIRE(s->score(rest, (s == other.get() ? expected : found).data(), nullptr, {}).ok());
  }
  CHECK(found == expected);
  CHECK(other->stats_json().find("\"compared\"") == std::string::npos);
  const std::string json = session->stats_json();
  const std::size_t at = json.find("\"compared\":");
  REQUIRE(at != std::string::npos);
  return json.substr(at, json.find(",\"kernels\"") - at);
}

std::vector<double> numbers(const std::string& json, const std::string& key) {
  std::vector<double> out;
  for (std::size_t at = 0; (at = json.find("\"" + key + "\":", at)) != std::string::npos;
       at += key.size())
    out.push_back(std::stod(json.substr(at + key.size() + 3)));
  return out;
}

bool all(const std::vector<double>& values, const std::function<bool(double)>& good) {
  return !values.empty() && std::all_of(values.begin(), values.end(), good);
}

}  // namespace

TEST_CASE(
    "compare: full attention is exact, sinks and window alone are not, and the best tokens are all "
    "there is to find" *
    doctest::test_suite("slow")) {
  const auto tokens = book_tokens(1500);
  const std::string full = compared_of(comparing("full", 0), tokens),
                    window = compared_of(comparing("window", 0), tokens);
  for (const char* key : {"mass", "min_mass", "recall", "min_recall"})
    CHECK(all(numbers(full, key), [](double x) { return x == 1; }));
  CHECK(all(numbers(full, "largest_error"), [](double x) { return x < 1e-3; }));
  CHECK(numbers(full, "queries").size() ==
        std::size_t{mini_model()->config().layers} * mini_model()->config().kv_heads);
  CHECK(all(numbers(window, "recall"), [](double x) { return x == 0; }));
  CHECK(all(numbers(window, "mass"), [](double x) { return x > 0 && x <= 1; }));
  CHECK(!all(numbers(window, "mass"), [](double x) { return x > 0.9; }));
  CHECK(all(numbers(window, "tokens"), [](double x) { return x == 0; }));
  SessionOptions flat = comparing("flat", 100);
  flat.select.share_heads = false;
  const std::string best = compared_of(flat, tokens);
  CHECK(all(numbers(best, "min_recall"), [](double x) { return x == 1; }));
  CHECK(all(numbers(best, "tokens"), [](double x) { return x == 100; }));
  const std::vector<double> of_window = numbers(window, "mass"), of_best = numbers(best, "mass");
  CHECK(std::accumulate(of_best.begin(), of_best.end(), 0.0) >
        std::accumulate(of_window.begin(), of_window.end(), 0.0));
}

TEST_CASE(
    "compare: the estimate of the attention that bounded read is near the truth, the same for any "
    "number of threads" *
    doctest::test_suite("slow")) {
  const auto tokens = book_tokens(2500);
  SessionOptions one = comparing("bounded", 64, CompareLevel::layers), three = one;
  one.threads = 1;
  three.threads = 3;
  const std::string json = compared_of(one, tokens);
  CHECK(json == compared_of(three, tokens));
  CHECK(all(numbers(json, "mass_estimated"), [](double x) { return x > 0 && x <= 1; }));
  CHECK(all(numbers(json, "estimate_error"), [](double x) { return x >= 0 && x < 0.5; }));
  CHECK(numbers(json, "covered_steps").front() == 6);
}

namespace {

// The same after a text that was read once for all.
std::string compared_of_saved(const SessionOptions& options) {
  static const TempFolder folder;
  static const std::vector<Token> tokens = book_tokens(2500);
  static const std::string path = [] {
    auto session = open_session(mini_model());
    read(session.get(), {tokens.data(), tokens.size() - 7});
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    return folder.file("a.kv");
  }();
  std::unique_ptr<Session> session;
  REQUIRE(Session::load(mini_model(), path, options, false, nullptr, {}, &session).ok());
  std::vector<float> found(7);
  REQUIRE(session->score({tokens.data() + tokens.size() - 7, 7}, found.data(), nullptr, {}).ok());
  const std::string json = session->stats_json();
  return json.substr(json.find("\"compared\":"));
}

}  // namespace

TEST_CASE(
    "certificate: it is never above the truth, not without use where little is left out, and "
    "certain where everything was read") {
  for (const char* strategy : {"quest", "bounded", "flat"})
    for (uint64_t budget : {48u, 1200u, 100000u})
      for (bool share : {true, false}) {
        CAPTURE(strategy);
        CAPTURE(budget);
        SessionOptions o = comparing(strategy, budget);
        o.select.certify = true;
        o.select.share_heads = share;
        const std::string json = compared_of_saved(o);
        CHECK(all(numbers(json, "certificate_excess"), [](double x) { return x <= 0; }));
        CHECK(all(numbers(json, "certificate"), [](double x) { return x > 0 && x <= 1; }));
        if (budget == 100000u)
          CHECK(all(numbers(json, "certificate"), [](double x) { return x == 1; }));
        if (budget == 1200u)
          CHECK(!all(numbers(json, "certificate"), [](double x) { return x < 0.5; }));
      }
}

TEST_CASE(
    "coverage: the fewest quads that reach it, between a quarter of the budget and four times it") {
  const auto read = [&](float coverage) {
    SessionOptions o = comparing("bounded", 128);
    o.select.coverage = coverage;
    return numbers(compared_of_saved(o), "tokens");
  };
  const std::vector<double> by_budget = read(0), half = read(0.5f), most = read(0.95f),
                            all_of_it = read(0.9999f);
  // How many there are in each is a matter of chance, of what is expected.
  const auto mean = [](const std::vector<double>& x) {
    return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size());
  };
  CHECK(mean(by_budget) == doctest::Approx(128).epsilon(0.05));
  CHECK(mean(half) >= 32 * 0.95);
  CHECK(mean(half) <= 32 * 1.25);
  CHECK(mean(all_of_it) <= 512 * 1.05);
  CHECK(std::accumulate(half.begin(), half.end(), 0.0) <
        std::accumulate(most.begin(), most.end(), 0.0));
  CHECK(std::accumulate(most.begin(), most.end(), 0.0) <
        std::accumulate(all_of_it.begin(), all_of_it.end(), 0.0));
  SessionOptions quest = comparing("quest", 128);
  quest.select.coverage = 0.9f;
  std::unique_ptr<Session> none;
  CHECK(Session::open(mini_model(), quest, &none).code() == Code::bad_argument);
}
