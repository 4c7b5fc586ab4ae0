// Strategies that carry something from layer to layer and from step to step, in whole sessions.
#include <cmath>
#include <fstream>

#include "helpers.h"
#include "replacing.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

SessionOptions filtering(FilterWindow window, std::vector<uint32_t> layers = {1, 5},
                         uint64_t budget = 200) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = "filter-layers";
  o.select.budget_tokens = budget;
  o.select.filter_layers = std::move(layers);
  o.select.filter_window = window;
  return o;
}

constexpr FilterWindow windows[] = {FilterWindow::last, FilterWindow::exponential,
                                    FilterWindow::uniform};

}  // namespace

TEST_CASE("filter layers: one thread and several give the same bits" *
          doctest::test_suite("slow")) {
  const auto tokens = book_tokens(1500);
  for (FilterWindow window : windows) {
    SessionOptions one = filtering(window), three = one;
    one.threads = 1;
    three.threads = 3;
    auto a = open_session(mini_model(), one), b = open_session(mini_model(), three);
    read(a.get(), tokens);
    read(b.get(), tokens);
    CHECK(continue_with(a.get(), 40) == continue_with(b.get(), 40));
    GenerateOptions keep;
    keep.keep = true;
    CHECK(ask(a.get(), "What is said of the door and of the man who came?", keep) ==
          ask(b.get(), "What is said of the door and of the man who came?", keep));
    CHECK(logits_after(a.get(), 100) == logits_after(b.get(), 100));
  }
}

TEST_CASE("filter layers: saving and loading at any moment is continuing, also into a fork" *
          doctest::test_suite("slow")) {
  const auto tokens = book_tokens(1200);
  TempFolder folder;
  for (FilterWindow window : windows)
    for (std::size_t n : {1u, 20u, 96u, 97u, 700u, 1200u}) {
      CAPTURE(n);
      const SessionOptions o = filtering(window, {1, 5}, 60);
      auto session = open_session(mini_model(), o);
      read(session.get(), {tokens.data(), n});
      continue_with(session.get(), 5);
      REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
      std::unique_ptr<Session> loaded, fork;
      REQUIRE(Session::load(mini_model(), folder.file("a.kv"), o, true, nullptr, {}, &loaded).ok());
      REQUIRE(session->fork(&fork).ok());
      const auto next = continue_with(session.get(), 40);  // seals a page on the way
      CHECK(continue_with(loaded.get(), 40) == next);
      CHECK(continue_with(fork.get(), 40) == next);
      const auto logits = logits_after(session.get(), 7);
      CHECK(logits_after(loaded.get(), 7) == logits);
      CHECK(logits_after(fork.get(), 7) == logits);
    }
}

TEST_CASE("filter layers: a question leaves no trace, and going back within the window is exact") {
  const auto tokens = book_tokens(1000);
  const SessionOptions o = filtering(FilterWindow::uniform, {1, 5}, 60);
  auto session = open_session(mini_model(), o), straight = open_session(mini_model(), o);
  read(session.get(), tokens);
  read(straight.get(), tokens);
  ask(session.get(), "What is said of the door?");
  CHECK(continue_with(session.get(), 12) == continue_with(straight.get(), 12));
  const std::size_t at = session->tokens().size() - 6;
  const auto expected = continue_with(straight.get(), 4);
  continue_with(session.get(), 4);
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  for (Session* s : {session.get(), fork.get()}) {  // the same steps again, from the same place
    REQUIRE(s->rewind(at + 4).ok());
    continue_with(s, 6);
  }
  CHECK(logits_after(session.get(), 9) == logits_after(fork.get(), 9));
}

TEST_CASE("filter layers: with a budget of everything it is full attention") {
  const auto tokens = book_tokens(1500);
  SessionOptions full;
  full.select.strategy = "full";
  auto a = open_session(mini_model(), full),
       b = open_session(mini_model(), filtering(FilterWindow::last, {0}, 1u << 20));
  read(a.get(), tokens);
  read(b.get(), tokens);
  CHECK(continue_with(a.get(), 20) == continue_with(b.get(), 20));
}

TEST_CASE("filter layers: the layers after one read its choice, for all of their heads") {
  const auto tokens = book_tokens(1510);
  // neither question nor answer seals a page
  auto session = open_session(mini_model(), filtering(FilterWindow::last, {1, 6}, 60));
  read(session.get(), tokens);
  GenerateOptions o;
  o.max_tokens = 2;
  Answer answer;
  REQUIRE(session->generate("Why?", o, {}, &answer).ok());
  // Attention over everything in layers 0, 1, 2, 6 and 7, over 60 tokens in the five others, the
  // last of which attends for the last token of a step.
  const uint64_t steps = answer.question_tokens + answer.answer_tokens - 1,
                 heads = mini_model()->config().kv_heads;
  const uint64_t stored =
                     session->store().sealed_tokens() - session->store().shape().page.page_tokens,
                 spared = answer.question_tokens - 1;
  CHECK(answer.read.tokens_read == heads * (steps * 5 * stored + (steps * 5 - spared) * 60));
  CHECK(answer.read.tokens_present == heads * (steps * 10 - spared) * stored);
  const std::string stats = session->stats_json();
  CHECK(stats.find("\"filter_layers\":[1,6]") != std::string::npos);
  CHECK(stats.find("\"dense_layers\":[0,1,2,6,7]") != std::string::npos);
}

TEST_CASE(
    "filter layers: a damaged page of a mapped file is found in a layer that reads what another "
    "chose") {
  const auto tokens = book_tokens(1500);
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const SessionOptions o = filtering(FilterWindow::exponential, {1}, 1u << 20);
  auto session = open_session(mini_model(), o);
  read(session.get(), tokens);
  REQUIRE(session->save(path, nullptr, {}).ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  const uint32_t heads = mini_model()->config().kv_heads;
  {
    std::fstream damage(path, std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(static_cast<std::streamoff>(file->find(format::SectionKind::pages)->offset +
                                             (5 * heads * extent_pages + 3) * page_bytes + 99));
    damage.put('\x55');
  }
  std::unique_ptr<Session> loaded;
  REQUIRE(Session::load(mini_model(), path, o, false, nullptr, {}, &loaded).ok());
  Token token = 0;
  bool end = false;
  CHECK(loaded->next({}, nullptr, &token, &end).code() == Code::corrupt);
  CHECK(loaded->tokens().size() == tokens.size());
}

TEST_CASE("saved queries of a wrong size, or that are no numbers, are refused" *
          doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  auto session = open_session(mini_model());
  read(session.get(), book_tokens(200));
  REQUIRE(session->save(path, nullptr, {}).ok());
  std::unique_ptr<Session> loaded;
  const auto other =
      [&](const std::function<void(format::SectionKind, std::vector<std::byte>*)>& change) {
        std::shared_ptr<const CacheFile> file;
        REQUIRE(CacheFile::open(path, &file).ok());
        std::unique_ptr<CacheWriter> writer;
        REQUIRE(CacheWriter::create(folder.file("b.kv"), file->identity(), &writer).ok());
        std::vector<std::vector<std::byte>> contents;
        for (const CacheFile::Section& s : file->sections()) {
          const auto bytes = file->bytes(s.kind);
          contents.emplace_back(bytes.begin(), bytes.end());
          change(s.kind, &contents.back());
          REQUIRE(writer->add_section(s.kind, s.version, contents.back().size()).ok());
        }
        REQUIRE(writer->begin().ok());
        for (const auto& bytes : contents) REQUIRE(writer->write(bytes.data(), bytes.size()).ok());
        REQUIRE(writer->finish().ok());
        return Session::load(mini_model(), folder.file("b.kv"), {}, false, nullptr, {}, &loaded)
            .code();
      };
  const auto queries = [](auto change) {
    return [=](format::SectionKind kind, std::vector<std::byte>* bytes) {
      if (kind == format::SectionKind::queries) change(bytes);
    };
  };
  CHECK(other(queries([](auto*) {})) == Code::ok);
  CHECK(other(queries([](auto* b) { b->clear(); })) == Code::ok);
  CHECK(other(queries([](auto* b) { b->resize(b->size() - 4); })) == Code::corrupt);
  CHECK(other(queries([](auto* b) {
          b->insert(b->end(), b->begin(), b->begin() + static_cast<std::ptrdiff_t>(b->size() / 32));
        })) == Code::corrupt);
  CHECK(other(queries([](auto* b) { std::fill_n(b->begin() + 400, 4, std::byte{0xff}); })) ==
        Code::corrupt);
}

TEST_CASE(
    "the totals of attention are the logarithms of its sums, before and after keys are centred") {
  for (uint32_t n : {40u, 700u}) {
    CAPTURE(n);
    const auto model = mini_model();
    const ModelConfig& c = model->config();
    SessionOptions o;
    o.prefill_chunk = 1000;  // read at once: the keys are centred after the queries were written
    auto session = open_session(model, o);
    read(session.get(), book_tokens(n));
    TempFolder folder;
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    std::shared_ptr<const CacheFile> file;
    REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
    const auto floats = [&](format::SectionKind kind) {
      return reinterpret_cast<const float*>(file->bytes(kind).data());
    };
    const PageShape page = model->store_shape().page;
    SavedSequence saved;
    CachePeek peek;
    REQUIRE(CachePeek::open(folder.file("a.kv"), &peek).ok());
    REQUIRE(read_saved(peek, &saved).ok());
    PageStore pages(model->store_shape());
    REQUIRE(PageStore::map(model->store_shape(), file, saved.pages, &pages).ok());
    RecentQueries queries(c.layers, c.heads, c.head_dim);
    REQUIRE(file->find(format::SectionKind::queries)->bytes ==
            32 * queries.token_floats() * sizeof(float));
    queries.restore(32, n);
    for (uint64_t i = 0; i < queries.saved_rows(); ++i)
      std::copy_n(floats(format::SectionKind::queries) + i * queries.width(), queries.width(),
                  queries.saved_row(i));
    for (uint32_t l : {0u, 6u, c.layers - 1})
      for (uint32_t h : {0u, c.heads - 1}) {
        const uint32_t kv = h / c.group();
        const float* window =
            floats(format::SectionKind::window) +
            (std::size_t{l} * c.kv_heads + kv) * 2 * saved.window_count * page.dim;
        for (uint64_t position : {uint64_t{n} - 32, uint64_t{n} - 1}) {
          const float* q = queries.query(l, position) + h * c.head_dim;
          double sum = 0;
          const auto add = [&](const float* k) {
            double dot = 0;
            for (uint32_t d = 0; d < c.head_dim; ++d)
              dot += static_cast<double>(q[d]) * static_cast<double>(k[d]);
            sum += std::exp(dot / std::sqrt(static_cast<double>(c.head_dim)));
          };
          Array<float> k(page.page_tokens * page.dim), v(k.size());
          for (uint32_t p = 0; p < saved.pages; ++p) {
            REQUIRE(pages.intact_page(l, kv, p));
            const PageRef ref = pages.page(l, kv, p);
            cpu_kernels().unseal_page(page, ref.data, ref.scales, k.data(), v.data());
            for (uint32_t t = 0; t < page.page_tokens; ++t) add(k.data() + t * page.dim);
          }
          for (uint32_t t = 0; t < saved.window_count && saved.sealed_tokens() + t <= position; ++t)
            add(window + t * page.dim);
          CHECK(static_cast<double>(queries.lse(l, position)[h]) ==
                doctest::Approx(std::log(sum)).epsilon(0.003));
        }
      }
  }
}
