// Sessions over several documents of a model on GPUs: they multiply weights, the CPU attends.
#include <algorithm>

#include "compose_helpers.h"
#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

TEST_CASE("a model on GPUs attends several documents as one on the CPU") {
  for (const char* devices : {"cuda", "cuda:0,cuda:1"}) {
    if (!device_model()) return;
    std::shared_ptr<const Model> model;
    if (!open_on(devices, 0, &model).ok()) continue;  // there is one GPU
    CAPTURE(devices);
    for (const char* strategy : {"full", "bounded"}) {
      auto on_cpu = compose(mini_model(), saved().long_paths, options_of(strategy)),
           session = compose(model, saved().long_paths, options_of(strategy));
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK(knows(session.get(), i));
        CHECK(knows(on_cpu.get(), i));
        const auto chosen = session->documents(), expected = on_cpu->documents();
        for (std::size_t d = 0; d < chosen.size(); ++d) {
          CHECK(chosen[d].is_chosen == expected[d].is_chosen);
          CHECK(chosen[d].score == doctest::Approx(expected[d].score).epsilon(0.1));
        }
      }
      CHECK(says(*session, "several documents are attended"));
      CHECK_FALSE(attends(*session));
      // A conversation, and what follows it: as near as the products of a GPU are.
      ask(session.get(), question_of(0), keeping(1)), ask(on_cpu.get(), question_of(0), keeping(1));
      REQUIRE(std::ranges::equal(session->tokens(), on_cpu->tokens()));
      const auto tokens = book_tokens(12);
      CHECK(mean_difference(scores_of(session.get(), tokens), scores_of(on_cpu.get(), tokens)) <
            0.3);
      REQUIRE(session->prepare_devices(nullptr, {}).ok());
      CHECK(knows(session.get(), 2, keeping(24)));
    }
    auto listing = compose(model, numbered().paths, options_of("bounded"));
    GenerateOptions traced = briefly();
    traced.max_tokens = 60, traced.trace = true;
    const std::string answer = ask(listing.get(), numbers_question, traced);
    for (const char* number : numbers) CHECK(answer.find(number) != std::string::npos);
    std::vector<Passage> passages;
    REQUIRE(listing->passages(&passages).ok());
    CHECK(!passages.empty());
  }
}
