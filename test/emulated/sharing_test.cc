// Host memory of a long sequence is registered with a device in steps: answers begin at once, and
// the CPU stages the selected pages until then. Later steps send what is new alone.
#include <thread>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint64_t little = 1 << 16;  // less than an extent's pages
constexpr const char* sharing =
    "pages are being pinned, some with each step; until then the CPU stages or attends "
    "them";

}  // namespace

TEST_CASE(
    "each step registers a part of a long sequence, from a file or memory: until then the CPU "
    "stages the selected pages, and reports why") {
  const emulated::Changed less(emulated::machine().registration_bytes, little);
  const int before = emulated::machine().shared;
  TempFolder folder;
  for (const char* devices : {"cuda", "cuda:0,cuda:1"}) {
    CAPTURE(devices);
    const auto model = model_on(devices);
    const auto tokens = book_tokens(3400);
    const auto next = std::span<const Token>(tokens).subspan(3000);
    for (const bool mapped : {true, false}) {
      CAPTURE(mapped);
      std::unique_ptr<Session> session = mapped ? load(model, read_file(), bounded_options(200))
                                                : open_session(model, bounded_options(200));
      std::string file = read_file();
      if (!mapped) {
        read(session.get(), std::span<const Token>(tokens).first(3000));
        file = folder.file("a.kv");
        REQUIRE(session->save(file, nullptr, {}).ok());
        read(session.get(), next.first(16));
      }
      auto expected = load(mini_model(), file, bounded_options(200));
      if (!mapped) read(expected.get(), next.first(16));
      int steps = 0, shared = before;
      for (bool ready = false; !ready; ++steps) {
        REQUIRE(steps < 64);
        const auto asked = next.subspan(16 + static_cast<std::size_t>(steps) * 2, 2);
        const uint64_t length = session->tokens().size();
        CHECK(mean_difference(score(session.get(), asked), score(expected.get(), asked)) <
              (mapped ? 0.2 : 0.3));
        REQUIRE(session->rewind(length).ok());
        REQUIRE(expected->rewind(length).ok());
        ready = reads_pages(*session);
        CHECK(attends(*session));
        // nothing waits for the first one
        if (steps == 0) CHECK(emulated::machine().shared == before);
        if (!ready) {
          CHECK(says(*session, sharing));
          CHECK((steps < 2 || emulated::machine().shared > shared));
        }
        shared = emulated::machine().shared;
      }
      CHECK(steps > 3);
      CHECK(reads_pages(*session));
      continue_with(session.get(), 3);
      CHECK(reads_pages(*session));
      CHECK(stat_of(*session, "last_tokens_read") > 0);
      std::unique_ptr<Session> fork;
      REQUIRE(session->fork(&fork).ok());
      continue_with(fork.get(), 1);
      CHECK(reads_pages(*fork));  // what is shared already takes no time
      CHECK(emulated::machine().shared == shared);
    }
    CHECK(emulated::machine().shared == before);
  }
}

TEST_CASE("devices can be prepared ahead, which can be cancelled and also serves forks") {
  const emulated::Changed less(emulated::machine().registration_bytes, little);
  const int before = emulated::machine().shared;
  for (const char* devices : {"cuda", "cuda:0,cuda:1"}) {
    const auto model = model_on(devices);
    auto session = load(model, read_file(), bounded_options(200));
    Cancel cancel;
    cancel.fire();
    CHECK(session->prepare_devices(&cancel, {}).code() == Code::cancelled);
    CHECK(session->prepare_devices(nullptr, [](uint64_t, uint64_t) { return 1; }).code() ==
          Code::cancelled);
    CHECK_FALSE(reads_pages(*session));
    uint64_t ready = 0, all = 0;
    continue_with(session.get(), 2);  // the first shares nothing
    CHECK_FALSE(reads_pages(*session));
    CHECK(emulated::machine().shared > before);
    REQUIRE(session
                ->prepare_devices(
                    nullptr,
                    [&](uint64_t done, uint64_t total) { return ready = done, all = total, 0; })
                .ok());
    CHECK((ready == all && all == model->device_weights().size()));
    const int shared = emulated::machine().shared;
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    for (Session* s : {session.get(), fork.get()}) {
      continue_with(s, 1);
      CHECK(reads_pages(*s));
    }
    CHECK(emulated::machine().shared == shared);
    auto other = load(model, read_file(), bounded_options(200));
    const emulated::Changed now(emulated::machine().lost, 0);
    CHECK(other->prepare_devices(nullptr, {}).code() == Code::device);
    CHECK_FALSE(reads_pages(*other));
  }
}

TEST_CASE(
    "one registration covers several arrays if the device allows its size; the last is shorter") {
  std::vector<std::vector<int>> shared_by_step;
  for (const uint64_t most : {uint64_t{1} << 16, uint64_t{5} << 19, uint64_t{3} << 20}) {
    const emulated::Changed less(emulated::machine().registration_bytes, most);
    const int before = emulated::machine().shared;
    for (const char* devices : {"cuda", "cuda:0,cuda:1"}) {
      auto session = load(model_on(devices), read_file(), bounded_options(200));
      std::vector<int> shared;
      for (int step = 0; step < 40 && !reads_pages(*session); ++step) {
        continue_with(session.get(), 1);
        shared.push_back(emulated::machine().shared - before);
      }
      CHECK(reads_pages(*session));
      CHECK(shared.front() == 0);
      continue_with(session.get(), 2);
      shared_by_step.push_back(shared);
    }
    CHECK(emulated::machine().shared == before);
  }
  CHECK(shared_by_step[0].back() > shared_by_step[2].back());  // fewer pieces, of more
  CHECK(shared_by_step[2].back() >= shared_by_step[4].back());
}

TEST_CASE("another text in the same session begins without a wait too") {
  const emulated::Changed less(emulated::machine().registration_bytes, little);
  const int before = emulated::machine().shared;
  auto session = load(model_on("cuda"), read_file(), bounded_options(200));
  REQUIRE(session->prepare_devices(nullptr, {}).ok());
  REQUIRE(session->rewind(0).ok());
  read(session.get(), book_tokens(2200));
  CHECK(emulated::machine().shared == before);
  continue_with(session.get(), 1);
  CHECK_FALSE(reads_pages(*session));
  CHECK(emulated::machine().shared == before);
  continue_with(session.get(), 1);
  CHECK(emulated::machine().shared > before);
}

TEST_CASE("a sequence that is closed before all of it is registered leaves nothing") {
  const emulated::Changed less(emulated::machine().registration_bytes, little);
  const int before = emulated::machine().shared;
  auto session = load(model_on("cuda"), read_file(), bounded_options(200));
  continue_with(session.get(), 3);
  CHECK_FALSE(reads_pages(*session));
  CHECK(emulated::machine().shared > before);
  SelectOptions quest = bounded_options(200).select;
  quest.strategy = "quest";
  REQUIRE(session->set_select(quest).ok());
  continue_with(session.get(), 1);
  CHECK(says(*session, "the GPU does not choose by this strategy"));
  CHECK(emulated::machine().shared == before);
  REQUIRE(session->set_select(bounded_options(200).select).ok());
  continue_with(session.get(), 3);
  CHECK(emulated::machine().shared > before);
  session.reset();
  CHECK(emulated::machine().shared == before);
}

TEST_CASE(
    "forks that begin at the same time have one sketch of many blocks, and attend as each alone") {
  emulated::Changed small(emulated::machine().block_bytes, 1);  // every extent is a block
  const auto open = [] {
    std::shared_ptr<const Model> model;
    REQUIRE(open_on("cuda", 0, &model).ok());
    return model;
  };
  std::vector<Token> text = book_tokens(4200);
  text.erase(text.begin(), text.begin() + 3000);
  struct Outcome {
    std::vector<Token> answer, then;
    bool attended = false;
  };
  const auto take_steps = [&](Session* session, std::size_t i) {
    Outcome out;
    out.answer = continue_with(session, 3);
    // its own: it writes to the last block
    read(session, std::span<const Token>(text).subspan(100 * i, 100));
    out.then = continue_with(session, 3);
    out.attended = attends(*session);
    return out;
  };
  constexpr std::size_t count = 3;
  std::vector<Outcome> alone;
  uint64_t taken = 0;
  {
    const auto model = open();
    const auto base = load(model, read_file(), bounded_options(200));
    const uint64_t before = emulated::machine().bytes[0];
    std::vector<std::unique_ptr<Session>> forks(count);
    for (std::size_t i = 0; i < count; ++i) {
      REQUIRE(base->fork(&forks[i]).ok());
      alone.push_back(take_steps(forks[i].get(), i));
    }
    taken = emulated::machine().bytes[0] - before;
  }
  for (int time = 0; time < 3; ++time) {
    const auto model = open();
    const auto base = load(model, read_file(), bounded_options(200));
    const uint64_t before = emulated::machine().bytes[0];
    std::vector<std::unique_ptr<Session>> forks(count);
    for (auto& fork : forks) REQUIRE(base->fork(&fork).ok());
    std::vector<Outcome> got(count);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < count; ++i)
      threads.emplace_back([&, i] { got[i] = take_steps(forks[i].get(), i); });
    for (std::thread& t : threads) t.join();
    CHECK(emulated::machine().bytes[0] - before == taken);
    for (std::size_t i = 0; i < count; ++i) {
      CAPTURE(i);
      CHECK(got[i].attended);
      CHECK(got[i].answer == alone[i].answer);
      CHECK(got[i].then == alone[i].then);
    }
  }
}

TEST_CASE("a new sketch replaces the one before, also one of a closed fork") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda", 0, &model).ok());
  auto session = load(model, read_file(), bounded_options(200));
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  (void)continue_with(session.get(), 2);
  (void)continue_with(fork.get(), 2);
  CHECK((attends(*session) && attends(*fork)));
  fork.reset();
  const StoreShape& shape = model->store_shape();
  const uint64_t extent = shape.heads_total() * shape.page.sketch_bytes(),
                 sketch = session->store().pages().extents() * extent;
  std::vector<Token> text = book_tokens(4200);
  text.erase(text.begin(), text.begin() + 3000);
  const uint64_t built = session->store().sketch().basis_stamp();
  const uint64_t before = emulated::machine().bytes[0];
  emulated::Changed full(emulated::machine().max_bytes[0], before + sketch / 2);
  for (std::size_t at = 0; at < text.size(); at += 400)
    read(session.get(), {text.data() + at, 400});
  CHECK(session->store().sketch().basis_stamp() != built);
  (void)continue_with(session.get(), 2);
  CHECK(attends(*session));
}

TEST_CASE("a rewind over a full extent leaves no unused memory registered") {
  std::shared_ptr<const Model> model;
  REQUIRE(open_on("cuda:0", 0, &model).ok());
  const uint64_t extent = model->store_shape().page.extent_tokens();
  auto session = open_session(model, bounded_options(64));
  const auto tokens = book_tokens(3000);
  read(session.get(), {tokens.data(), static_cast<std::size_t>(3 * extent - 100)});
  const std::size_t document = session->tokens().size();
  std::vector<int> shared;
  for (int i = 0; i < 4; ++i) {
    continue_with(session.get(), 300);
    CHECK(attends(*session));
    shared.push_back(emulated::machine().shared);
    REQUIRE(session->rewind(document).ok());
  }
  CHECK(session->store().pages().extents() == 3);
  CHECK(shared[3] == shared[1]);
}

TEST_CASE(
    "the workspace of prefill is released for attention if other programs use the rest of the "
    "memory") {
  for (const char* strategy : {"bounded", "quest"}) {  // alone, and in co-execution
    CAPTURE(strategy);
    const auto model = model_on("cuda");
    SessionOptions options = bounded_options(200);
    options.select.strategy = strategy;
    auto session = load(model, read_file(), options);
    read(session.get(), book_tokens(1200));
    SessionOptions certified = bounded_options(200);
    certified.select.strategy = "quest", certified.select.certify = true;
    REQUIRE(session->set_select(certified.select).ok());
    continue_with(session.get(), 1);  // by the CPU: the GPU has no more than the workspace
    CHECK_FALSE((attends(*session) || says(*session, "\"gpu_coexecutes\":true")));
    const std::shared_ptr<Device>& device = model->device_weights()[0].device();
    const uint64_t unit = uint64_t{2} << 20;
    DeviceBuffer<std::byte> others;
    REQUIRE(others.allocate(device, device->left() / unit * unit, "others").ok());
    REQUIRE(session->set_select(options.select).ok());
    continue_with(session.get(), 2);
    CHECK((attends(*session) || says(*session, "\"gpu_coexecutes\":true")));
  }
}

TEST_CASE("a page that is sealed sends nothing of the window to the device again") {
  const auto model = model_on("cuda");
  const ModelConfig& c = model->config();
  const uint64_t row = uint64_t{c.layers} * c.kv_heads * 2 * c.head_dim * sizeof(float);
  const auto uploaded = [] {
    return emulated::machine().uploaded[0] + emulated::machine().uploaded_beside[0];
  };
  for (const SessionOptions& o :
       {bounded_options(200), SessionOptions{.select = {.strategy = "full"}}}) {
    CAPTURE(o.select.strategy);
    const auto session = load(model, read_file(), o);
    REQUIRE(session->prepare_devices(nullptr, {}).ok());
    continue_with(session.get(), 2);
    const uint64_t window = row * stat_of(*session, "window_tokens");
    uint64_t most = 0;
    for (int token = 0; token < 100; ++token) {  // the ring begins again
      const uint64_t before = uploaded();
      continue_with(session.get(), 1);
      most = std::max(most, uploaded() - before);
    }
    CHECK(attends(*session));
    CHECK(most > 0);
    CHECK(most < window / 2);
  }
}
