// How a text comes to GPUs while they read it, and what is left of a step that fails in the middle: counted, and failed, by those of emulated.h.
#include <algorithm>
#include <set>
#include <string>

#include "../session/device_helpers.h"
#include "base/checked.h"
#include "base/memory.h"
#include "emulated.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* one_and_two[] = {"cuda:0", "cuda:0,cuda:1"};

std::shared_ptr<const Model> model_on(const char* devices) {
  std::shared_ptr<const Model> model;
  const Status s = open_on(devices, 0, &model);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return model;
}

}  // namespace

TEST_CASE("pages that a step of a text seals come to the device beside its work, and the next step waits for its inputs and the window alone") {
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
    std::vector<bool> came(count);      // the last step's pages, beside its work,
    std::vector<uint32_t> ahead(count);  // and those of so many steps
    for (uint32_t step = 0; step < steps; ++step) {
      CAPTURE(step);
      uint64_t before[emulated::Machine::most], before_beside[emulated::Machine::most];
      for (int i = 0; i < emulated::Machine::most; ++i) {
        before[i] = emulated::machine().uploaded[i];
        before_beside[i] = emulated::machine().uploaded_beside[i];
      }
      const uint32_t full_extents = pages.pages() / extent_pages;
      read(session.get(), {tokens.data() + step * chunk, chunk});
      CHECK(attends(*session));
      if (step == 0) continue;  // the first pages are sealed when all of their step is known
      for (std::size_t d = 0; d < count; ++d) {
        CAPTURE(d);
        const uint64_t uploaded = emulated::machine().uploaded[d] - before[d], beside = emulated::machine().uploaded_beside[d] - before_beside[d];
        const uint64_t heads = model->device_weights()[d].layers().size() * uint64_t{model->config().kv_heads};
        const uint64_t inputs = chunk * (model->config().width + uint64_t{model->rope().dim()}) * sizeof(float) + sizeof(uint32_t);  // and a mark
        const uint64_t window = heads * 2 * round_up(o.window + page.page_tokens, 16) * page.dim * sizeof(float);
        const uint64_t addresses = 2 * sizeof(uint64_t) * (pages.extents() + pages.extents() / 4 + 2);
        CHECK(uploaded >= inputs + window);
        if (came[d]) CHECK(uploaded <= inputs + window + addresses);
        const uint64_t extents = pages.extents() - full_extents, all = extents * heads * (PageShape::pages_bytes() + page.scales_bytes());
        CHECK((beside == 0 || beside == all));
        came[d] = beside > 0;
        ahead[d] += came[d];
      }
    }
    for (const uint32_t of : ahead) CHECK(of > steps / 2);  // not where an extent begins that the device has not made room for
  }
}
