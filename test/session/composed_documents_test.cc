// The documents of a composition: how they are mapped, damaged, and attended by each strategy.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>

#include "compose_helpers.h"
#include "sequence_helpers.h"

using namespace kvasir;
using namespace kvasir::test;
using format::SectionKind;

namespace {

// Changes a byte of a section.
void damage(const std::string& path, SectionKind kind, uint64_t at = 0) {
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  REQUIRE(at < file->find(kind)->bytes);
  const auto place = static_cast<long>(file->find(kind)->offset + at);
  const int byte = std::to_integer<int>(file->bytes(kind)[at]);
  file.reset();
  std::FILE* out = std::fopen(path.c_str(), "r+b");
  REQUIRE(out);
  REQUIRE(std::fseek(out, place, SEEK_SET) == 0);
  std::fputc(byte ^ 0x20, out);
  std::fclose(out);
}

// Copies a document; a number of a section, at a part of its floats, is none.
void put_nan(std::size_t document, const std::string& path, SectionKind kind, double part,
             uint64_t bytes = 0) {
  rewrite_section(saved().paths[document], path, kind, [&](std::vector<std::byte>* b, uint32_t*) {
    const float wrong = std::numeric_limits<float>::quiet_NaN();
    const auto floats = (bytes > 0 ? bytes : b->size()) / sizeof wrong;
    const auto at = static_cast<std::size_t>(part * static_cast<double>(floats));
    std::memcpy(b->data() + at * sizeof wrong, &wrong, sizeof wrong);
  });
}

// `count` documents in files of their own.
std::vector<std::string> copies(const TempFolder& folder, std::size_t count) {
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < count; ++i) {
    paths.push_back(folder.file(std::to_string(i) + ".kv"));
    std::filesystem::copy_file(saved().paths[i % 3], paths.back());
  }
  return paths;
}

bool names(const Status& s, const std::string& what) {
  return std::string(s.message()).find(what) != std::string::npos;
}

double furthest_of(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(a[i] - b[i])));
  return most;
}

SessionOptions selecting(const char* strategy, uint64_t tokens, float alpha = 0) {
  SessionOptions o = options_of(strategy);
  o.select.dense_layers = 0;
  o.select.share_heads = false;  // a shared list weighs heads by their attention to all tokens
  o.select.budget_tokens = std::string(strategy) == "window" ? 0 : tokens;
  if (std::string(strategy) == "dipr") o.select.alpha = alpha;
  return o;
}

}  // namespace

TEST_CASE("documents that cannot be used are named in the order of their paths") {
  const TempFolder folder;
  std::vector<std::string> paths = copies(folder, 6);
  std::filesystem::remove(paths[1]);
  damage(paths[3], SectionKind::centre);
  std::filesystem::resize_file(paths[5], 5000);
  for (const uint32_t threads : {1u, 3u}) {
    SessionOptions options = options_of("auto");
    options.threads = threads;
    std::vector<std::string> left_out;
    std::size_t room = 3;
    Session::ComposeRequest request{.paths = paths};
    request.leaves_out = [&](const std::string& path, const Status&) {
      left_out.push_back(path);
      return left_out.size() <= room;
    };
    std::unique_ptr<Session> session;
    REQUIRE(Session::compose(mini_model(), request, options, &session).ok());
    CHECK(left_out == std::vector<std::string>{paths[1], paths[3], paths[5]});
    REQUIRE(session->documents().size() == 3);
    for (std::size_t i = 0; i < 3; ++i)
      CHECK(std::string(session->documents()[i].path) == paths[2 * i]);
    session.reset(), left_out.clear(), room = 1;
    Status s = Session::compose(mini_model(), request, options, &session);
    CHECK(s.code() == Code::corrupt);
    CHECK_MESSAGE(names(s, paths[3]), s.message());
    CHECK(left_out.size() == 2);
    request.leaves_out = nullptr;
    s = Session::compose(mini_model(), request, options, &session);
    CHECK(s.code() == Code::not_found);
    CHECK_MESSAGE(names(s, paths[1]), s.message());
    Cancel cancel;
    cancel.fire();
    request.cancel = &cancel, left_out.clear();
    request.leaves_out = [&](const std::string& path, const Status&) {
      left_out.push_back(path);
      return true;
    };
    CHECK(Session::compose(mini_model(), request, options, &session).code() == Code::cancelled);
    CHECK(left_out.empty());
    CHECK(!session);
  }
}

TEST_CASE("the small parts of a document are verified when it is composed") {
  const TempFolder folder;
  for (const SectionKind kind : {SectionKind::state, SectionKind::tokens, SectionKind::centre}) {
    CAPTURE(format::name_of(kind));
    std::vector<std::string> paths = copies(folder, 2);
    damage(paths[1], kind);
    const Status s = refused(paths, options_of("auto"));
    CHECK(s.code() == Code::corrupt);
    CHECK_MESSAGE((names(s, paths[1]) && names(s, format::name_of(kind))), s.message());
    for (const std::string& path : paths) std::filesystem::remove(path);
  }
  const std::vector<std::string> wrong = copies(folder, 2);
  put_nan(1, wrong[1], SectionKind::centre, 0.5);
  const Status s = refused(wrong, options_of("auto"));
  CHECK(s.code() == Code::corrupt);
  CHECK_MESSAGE((names(s, wrong[1]) && names(s, "not finite")), s.message());
  for (const std::string& path : wrong) std::filesystem::remove(path);
  // what only the document's own session needs
  std::vector<std::string> paths = copies(folder, 2);
  damage(paths[1], SectionKind::queries);
  damage(paths[1], SectionKind::logits);
  auto session = compose(mini_model(), paths, options_of("auto"));
  CHECK(knows(session.get(), 1));
}

// Each of them alone would have it whole.
TEST_CASE("documents that are attended divide the least budget of one sequence") {
  SessionOptions options = options_of("quest");
  options.select.dense_layers = 0;
  auto session = compose(mini_model(), saved().long_paths, options, 3);
  Answer answer;
  REQUIRE(session->generate(question_of(1), briefly(), {}, &answer).ok());
  uint64_t tokens = 0;
  for (const DocumentReport& document : session->documents())
    if (document.is_chosen) tokens += document.tokens;
  REQUIRE(tokens > 3000);
  const double part = static_cast<double>(answer.read.tokens_read) /
                      static_cast<double>(answer.read.tokens_present);
  CHECK(part * static_cast<double>(tokens) < 1.1 * 512);
  CHECK(part * static_cast<double>(tokens) > 0.9 * 512);
}

TEST_CASE("documents of a composition take no memory for what is in their files") {
  for (const bool exact : {false, true}) {
    CAPTURE(exact);
    auto session =
        compose(mini_model(), exact ? saved().exact_paths : saved().long_paths, options_of("auto"));
    CHECK(session->stats().private_bytes < 1'000'000);
  }
}

TEST_CASE("rows and bases of a document are verified at their first use, and harm no other") {
  const uint64_t bases = mini_model()->store_shape().heads_total() * 2 * sizeof(float) *
                         mini_model()->store_shape().page.dim *
                         mini_model()->store_shape().page.sketch_dim();
  const struct {
    SectionKind kind;
    double part;     // of its bytes, in the middle of the last layer but one
    uint64_t bytes;  // 0: the whole section
  } all[] = {{SectionKind::sinks, 0.85, 0},
             {SectionKind::window, 0.85, 0},
             {SectionKind::sketch, 0.93, bases}};
  for (const auto& [kind, part, bytes] : all)
    for (const bool finite : {true, false}) {
      CAPTURE(format::name_of(kind));
      CAPTURE(finite);
      const TempFolder folder;
      const std::vector<std::string> paths = copies(folder, 12);
      std::shared_ptr<const CacheFile> file;
      REQUIRE(CacheFile::open(paths[7], &file).ok());
      const uint64_t size = bytes > 0 ? bytes : file->find(kind)->bytes;
      file.reset();
      if (finite) damage(paths[7], kind, static_cast<uint64_t>(part * static_cast<double>(size)));
      else put_nan(1, paths[7], kind, part, bytes);
      auto session = compose(mini_model(), paths, options_of("bounded"), 12);
      Answer answer;
      for (int again = 0; again < 2; ++again) {
        const Status s = session->generate(question_of(1), briefly(), {}, &answer);
        CHECK(s.code() == Code::corrupt);
        CHECK_MESSAGE((names(s, paths[7]) && names(s, format::name_of(kind))), s.message());
        if (!finite) CHECK_MESSAGE(names(s, "not finite"), s.message());
        CHECK(session->tokens().empty());
      }
      std::vector<uint32_t> others;
      for (uint32_t i = 0; i < paths.size(); ++i)
        if (i != 7) others.push_back(i);
      REQUIRE(session->set_candidates(others).ok());
      for (std::size_t i = 0; i < 3; ++i) CHECK(knows(session.get(), i));
    }
}

TEST_CASE("a damaged page of one of many documents is named, and harms no other document") {
  for (const char* strategy : {"full", "bounded"}) {
    CAPTURE(strategy);
    const TempFolder folder;
    const std::vector<std::string> paths = copies(folder, 12);
    damage(paths[7], SectionKind::pages, 5 * 4096 + 7);
    auto session = compose(mini_model(), paths, options_of(strategy), 12);
    Answer answer;
    const auto fails = [&] {
      const Status s = session->generate(question_of(1), briefly(), {}, &answer);
      CHECK(s.code() == Code::corrupt);
      CHECK_MESSAGE((names(s, paths[7]) && names(s, "pages")), s.message());
      CHECK(session->tokens().empty());
    };
    fails();
    std::vector<uint32_t> others;
    for (uint32_t i = 0; i < paths.size(); ++i)
      if (i != 7) others.push_back(i);
    REQUIRE(session->set_candidates(others).ok());
    for (std::size_t i = 0; i < 3; ++i) CHECK(knows(session.get(), i));
    REQUIRE(session->set_candidates({}).ok());
    fails();
  }
}

// The question seals no page of the document that it is appended to, so that both attend the same.
// The model's weights are float32: others round what they multiply.
struct Selected {
  const std::shared_ptr<const Model> model = open_model(FIXTURES "/models/llama-f32.gguf");
  const TempFolder folder;
  static constexpr std::size_t tokens = 768;
  std::vector<std::string> paths;

  Selected() {
    for (uint32_t i = 0; i < 2; ++i) {
      auto session = open_session(model, options_of("auto"));
      read(session.get(), some_tokens(tokens, 11 + i));
      REQUIRE(session->store().window_count() == session->store().window_tokens());
      paths.push_back(folder.file(std::to_string(i)));
      REQUIRE(session->save(paths.back(), nullptr, {}).ok());
    }
  }
  static std::vector<float> scores(Session* session) {
    ask(session, "a", keeping(1));
    return scores_of(session, some_tokens(8, 3));
  }
};

TEST_CASE("each strategy attends a document of a composition as it attends the document alone") {
  const Selected s;
  const std::vector<uint32_t> one = {1};
  std::vector<std::vector<float>> all;
  for (const char* strategy : {"window", "quest", "flat", "dipr", "full"}) {
    CAPTURE(std::string(strategy));
    const SessionOptions options = selecting(strategy, 128);
    auto composed = compose(s.model, s.paths, options);
    REQUIRE(composed->set_candidates(one).ok());
    std::unique_ptr<Session> alone;
    REQUIRE(Session::load(s.model, s.paths[1], options, false, nullptr, {}, &alone).ok());
    all.push_back(s.scores(composed.get()));
    const std::vector<float> wanted = s.scores(alone.get());
    REQUIRE(composed->tokens().size() + s.tokens == alone->tokens().size());
    // of dipr, the best score is that of the document, not of the question's tokens with it
    CHECK(furthest_of(all.back(), wanted) < (std::string(strategy) == "dipr" ? 0.2 : 1e-3));
  }
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t k = 0; k < i; ++k) {
      CHECK(furthest_of(all[i], all[k]) > 2e-3);
    }
}

TEST_CASE("strategies that select every token attend documents as full attention does") {
  const Selected s;
  const auto scores = [&](const SessionOptions& options) {
    return s.scores(compose(s.model, s.paths, options, 2).get());
  };
  const std::vector<float> full = scores(options_of("full"));
  for (const char* strategy : {"quest", "flat", "dipr"}) {
    CAPTURE(std::string(strategy));
    CHECK(furthest_of(scores(selecting(strategy, 1 << 20, 1e-30f)), full) < 1e-3);
    CHECK(furthest_of(scores(selecting(strategy, 64, 0.5f)), full) > 2e-3);
  }
}

// Nothing is appended to a document, so its share of a limit has no room for a step.
TEST_CASE("a memory limit counts of documents what stays of them, and no rows to come") {
  SessionOptions options = options_of("bounded");
  uint64_t appendable = open_session(mini_model(), options)->store().min_bytes(4096);
  for (const std::string& path : saved().long_paths) {
    auto session = load_session(path, options);
    appendable += session->store().min_bytes(session->tokens().size());
  }
  options.memory.bytes = appendable / 2;
  std::unique_ptr<Session> session;
  const Status s = Session::compose(mini_model(), {.paths = saved().long_paths}, options, &session);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  CHECK(knows(session.get(), 1));
  options.memory.bytes = 1 << 20;
  CHECK(refused(saved().long_paths, options).code() == Code::limit);
}
