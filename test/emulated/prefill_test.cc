// Transfers to GPUs during prefill, and the state after a step that fails in the middle. The
// emulated GPUs of emulated.h count the transfers and make the failures.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "../session/device_helpers.h"
#include "base/checked.h"
#include "base/memory.h"
#include "emulated.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* one_and_two[] = {"cuda:0", "cuda:0,cuda:1"};

// What a session has before a text and after it, as files, and what it makes of what comes next.
struct Left {
  std::string before, after;
  std::vector<float> next;
};

std::atomic<uint64_t> allocations{0}, failing_allocation{0};  // of the library's own; 0: none fails

bool allocation_fails(std::size_t) { return ++allocations == failing_allocation; }

enum class Failure { device, device_memory, cancelled, memory };

}  // namespace

TEST_CASE(
    "pages that a step seals, or that are missing, are transferred during its work; the next step "
    "waits only for its inputs and the window") {
  constexpr uint32_t chunk = 300, steps = 12;
  const auto tokens = book_tokens(steps * chunk);
  for (const char* devices : one_and_two) {
    CAPTURE(std::string(devices));
    const auto model = model_on(devices);
    SessionOptions o = bounded_options(200);
    o.prefill_chunk = chunk;
    auto session = open_session(model, o);
    const PageStore& pages = session->store().pages();
    const PageShape& page = model->store_shape().page;
    const std::size_t count = model->device_weights().size();
    std::vector<bool> came(count);       // the last step's pages, during its work,
    std::vector<uint32_t> ahead(count);  // and those of so many steps
    for (uint32_t step = 0; step < steps; ++step) {
      CAPTURE(step);
      uint64_t before[emulated::Machine::most], before_beside[emulated::Machine::most];
      for (int i = 0; i < emulated::Machine::most; ++i) {
        before[i] = emulated::machine().uploaded[i];
        before_beside[i] = emulated::machine().uploaded_beside[i];
      }
      const uint32_t full_extents = pages.pages() / extent_pages, extents_before = pages.extents();
      read(session.get(), {tokens.data() + step * chunk, chunk});
      CHECK(attends(*session));
      if (step == 0) came.assign(count, true);  // the second step finds the pages of the first
      for (std::size_t d = 0; d < count && step > 0; ++d) {
        CAPTURE(d);
        const uint64_t uploaded = emulated::machine().uploaded[d] - before[d],
                       meanwhile = emulated::machine().uploaded_beside[d] - before_beside[d];
        const uint64_t heads =
            model->device_weights()[d].layers().size() * uint64_t{model->config().kv_heads};
        // and a mark
        const uint64_t inputs =
            chunk * (model->config().width + uint64_t{2 * model->config().angles()}) *
                sizeof(float) +
            sizeof(uint32_t);
        const uint64_t window =
            heads * 2 * round_up(o.window + page.page_tokens, 16) * page.dim * sizeof(float);
        const uint64_t addresses = 2 * sizeof(uint64_t) * heads / model->config().kv_heads *
                                   (2 * uint64_t{pages.extents()} + 66);
        CHECK(uploaded >= inputs + window);
        // the sinks and the centre come once
        const uint64_t once =
            step > 1 ? 0 : heads * (2 * page.page_tokens + 1) * page.dim * sizeof(float);
        if (came[d]) CHECK(uploaded <= inputs + window + addresses + once);
        const uint64_t extents = pages.extents() - full_extents,
                       size = heads * (PageShape::pages_bytes() + page.scales_bytes()),
                       missing = came[d] ? 0 : extents_before * size;
        CHECK((meanwhile == missing || meanwhile == missing + extents * size));
        came[d] = meanwhile > missing;
        ahead[d] += came[d];
      }
    }
    for (const uint32_t of : ahead) CHECK(of == steps - 1);
  }
}

TEST_CASE("a text goes on next to a fork, whose pages come in many pieces") {
  const auto tokens = book_tokens(3000);
  for (const char* devices : one_and_two) {
    CAPTURE(std::string(devices));
    const auto model = model_on(devices);
    const SessionOptions o = bounded_options(200);
    auto a = open_session(model, o), whole = open_session(model, o);
    for (Session* session : {a.get(), whole.get()}) read(session, {tokens.data(), 2700});
    std::unique_ptr<Session> b;  // has no pages on the GPUs yet
    REQUIRE(a->fork(&b).ok());
    const SmallPieces small;
    for (Session* session : {a.get(), b.get(), whole.get()}) {
      read(session, {tokens.data() + 2700, 300});
      CHECK(attends(*session));
    }
    const std::vector<float> expected = score(whole.get(), {tokens.data(), 40});
    CHECK(score(a.get(), {tokens.data(), 40}) == expected);
    CHECK(score(b.get(), {tokens.data(), 40}) == expected);
  }
}

TEST_CASE(
    "the only step of a text finds the sketch while the GPU computes, with the bits of one that is "
    "found afterwards") {
  const auto tokens = book_tokens(2600);
  const TempFolder folder;
  for (const char* devices : one_and_two) {
    CAPTURE(std::string(devices));
    const auto model = model_on(devices);
    SessionOptions o = bounded_options(200);
    o.prefill_chunk = 2000;
    const StoreShape& shape = model->store_shape();
    const auto saved = [&](bool fails) {
      auto session = open_session(model, o);
      read(session.get(), {tokens.data(), 900});  // too few for a sketch
      REQUIRE(attends(*session));
      // Memory that lacks within the step is tried again after it. After it that is an error.
      failing_size = fails ? shape.page.sketch_bytes() * shape.heads_total() : 0;
      allocation_fault = first_of_size_fails;
      read(session.get(), {tokens.data() + 900, 1700});
      allocation_fault = nullptr;
      CHECK(failing_size == 0);
      CHECK(session->store().sketch().built_pages() == session->store().pages().pages());
      REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
      std::ifstream in(folder.file("a.kv"), std::ios::binary);
      return std::string{std::istreambuf_iterator<char>(in), {}};
    };
    const std::string during = saved(false), afterwards = saved(true);
    CHECK(during == afterwards);
  }
}

TEST_CASE(
    "a step that fails anywhere leaves nothing: prefill of another text then has the same bits as "
    "in an undisturbed session") {
  // The step that fails brings an extent that has just begun, and puts more of it ahead.
  constexpr uint32_t chunk = 100, before = 520, step_at = before + chunk;
  const auto tokens = book_tokens(1000);
  TempFolder folder;
  SessionOptions o = bounded_options(64);
  o.threads = 1;
  o.prefill_chunk = chunk;
  for (const char* devices : one_and_two) {
    CAPTURE(std::string(devices));
    const auto model = model_on(devices);
    auto base = open_session(model, o);
    read(base.get(), {tokens.data(), before});
    const auto open = [&] {  // a fork, which reads on, so that the devices have its pages
      std::unique_ptr<Session> session;
      REQUIRE(base->fork(&session).ok());
      read(session.get(), {tokens.data() + before, chunk});
      REQUIRE(attends(*session));
      return session;
    };
    const auto step = [&](Session* session, const Cancel* cancel) {
      uint64_t done = 0;
      Status s = session->prefill_tokens({tokens.data() + 900, chunk}, nullptr, cancel, {}, &done);
      CHECK(done == (s.ok() ? chunk : 0));
      CHECK(session->tokens().size() == step_at + done);
      return s;
    };
    const auto saved = [&](Session* session) {
      REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
      std::ifstream in(folder.file("a.kv"), std::ios::binary);
      return std::string{std::istreambuf_iterator<char>(in), {}};
    };
    const auto go_on = [&](Session* session) {
      Left left;
      left.before = saved(session);
      read(session, {tokens.data() + step_at, chunk + 70});
      CHECK(attends(*session));
      left.after = saved(session);
      left.next = score(session, {tokens.data() + 800, 4});
      return left;
    };
    const Left expected = go_on(open().get());
    auto undisturbed = open();
    const uint64_t first_call = emulated::machine().calls;
    allocations = failing_allocation = 0;
    allocation_fault = allocation_fails;
    REQUIRE(step(undisturbed.get(), nullptr).ok());
    allocation_fault = nullptr;
    const uint64_t calls = emulated::machine().calls - first_call, allocated = allocations;
    const auto fails = [&](Failure failure, uint64_t at) {
      CAPTURE(static_cast<int>(failure));
      CAPTURE(at);
      auto session = open();
      Cancel cancel;
      const emulated::Changed fired(emulated::machine().fires, &cancel);
      const int error = failure == Failure::device          ? emulated::refused
                        : failure == Failure::device_memory ? emulated::out_of_memory
                                                            : 0;
      emulated::machine().fails_with = error;
      if (failure == Failure::memory)
        allocations = 0, failing_allocation = at, allocation_fault = allocation_fails;
      else emulated::machine().fails_at = emulated::machine().calls + at;
      const Status s = step(session.get(), &cancel);
      emulated::machine().fails_at = 0;
      allocation_fault = nullptr;
      if (s.ok()) return false;  // made up for
      const Code code = failure == Failure::device      ? Code::device
                        : failure == Failure::cancelled ? Code::cancelled
                                                        : Code::no_memory;
      CHECK_MESSAGE(s.code() == code, std::string(s.message()));
      const Left found = go_on(session.get());
      CHECK((found.before == expected.before));  // files are not printed
      CHECK((found.after == expected.after));
      CHECK(found.next == expected.next);
      return true;
    };
    for (const Failure failure :
         {Failure::device, Failure::device_memory, Failure::cancelled, Failure::memory}) {
      // of what comes before the layers
      const uint64_t all = failure == Failure::memory ? allocated : calls,
                     each = failure == Failure::device ? 12 : 4;
      uint32_t failed = 0, cases = 0;
      for (uint64_t at = 1; at <= all; at += at < each ? 1 : emulated::fault_step(all, 9))
        ++cases, failed += fails(failure, at);
      CHECK(failed + 4 >= cases);
    }
  }
}

TEST_CASE("a text of several steps has the embeddings of the next one on the way, in any order") {
  const auto model = model_on("cuda:0");
  const auto tokens = book_tokens(1200);
  const uint64_t row = model->config().width * sizeof(float);
  SessionOptions o = bounded_options(200);
  o.prefill_chunk = 300, o.select.strategy = "full";
  auto whole = open_session(model, o), parts = open_session(model, o);
  const auto uploaded = [] { return emulated::machine().uploaded[0].load(); };
  const uint64_t before = uploaded();
  for (uint32_t at = 0; at < 1200; at += 300) read(parts.get(), {tokens.data() + at, 300});
  const uint64_t by_parts = uploaded() - before;
  read(whole.get(), tokens);
  CHECK(uploaded() - before - by_parts + 900 * row <= by_parts);
  const std::vector<float> expected = score(parts.get(), {tokens.data(), 40});
  CHECK(score(whole.get(), {tokens.data(), 40}) == expected);
  // After a step back the text goes on otherwise than the embeddings that had come.
  for (const uint32_t at : {600u, 300u}) {
    uint64_t done = 0;
    const Status s = whole->rewind(0);
    REQUIRE(s.ok());
    CHECK(whole
              ->prefill_tokens(
                  {tokens.data(), 1200}, nullptr, nullptr,
                  [&](uint64_t now, uint64_t) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(110));
                    return now >= at;
                  },
                  &done)
              .code() == Code::cancelled);
    REQUIRE(done == at);
    auto same = open_session(model, o);
    read(same.get(), {tokens.data(), at});
    for (Session* session : {whole.get(), same.get()}) read(session, {tokens.data() + 7, 650});
    CHECK(score(whole.get(), {tokens.data(), 40}) == score(same.get(), {tokens.data(), 40}));
  }
}

TEST_CASE("a long text keeps weights in half precision where half of the GPU stays free") {
  const auto tokens = book_tokens(1200);
  const emulated::Changed halves(emulated::machine().has_halves, 1);
  SessionOptions o = bounded_options(200);
  o.prefill_chunk = 300;
  const auto read_on = [&](uint64_t budget, uint32_t n, uint64_t* reads) {
    std::shared_ptr<const Model> model;
    REQUIRE(open_on("cuda:0", budget, &model).ok());
    auto session = open_session(model, o);
    const uint64_t before = emulated::machine().kept_reads;
    read(session.get(), {tokens.data(), n});
    *reads = emulated::machine().kept_reads - before;
    return score(session.get(), {tokens.data(), 40});
  };
  uint64_t reads = 0, none = 0;
  const std::vector<float> kept = read_on(0, 1200, &reads);
  CHECK(reads > 0);
  const std::vector<float> made = read_on(uint64_t{100} << 20, 1200, &none);
  CHECK(none == 0);
  CHECK(kept == made);
  (void)read_on(0, 600, &none);  // two steps
  CHECK(none == 0);
  // Nothing of them stays where the text ends or is stopped.
  const auto model = model_on("cuda:0");
  for (const uint64_t end : {600u, 1200u}) {
    CAPTURE(end);
    const auto left_by = [&](int has_halves) {
      emulated::machine().has_halves = has_halves;
      auto session = open_session(model, o);
      uint64_t done = 0;
      const auto stops = [&](uint64_t now, uint64_t) {
        std::this_thread::sleep_for(std::chrono::milliseconds(110));
        return now >= end;
      };
      (void)session->prefill_tokens(tokens, nullptr, nullptr, stops, &done);
      CHECK(done == end);
      return emulated::machine().bytes[0].load();
    };
    const uint64_t without = left_by(0), with = left_by(1);
    CHECK(with <= without + 4096);  // DeviceActivations::halves
  }
}
