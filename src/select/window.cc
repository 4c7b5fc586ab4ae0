// `window`: sinks and the newest tokens only (StreamingLLM, arXiv 2309.17453, section 3.2). Reads no page.
#include "select/selector.h"

namespace kvasir {
namespace {

class WindowSelector final : public Selector {
 public:
  void choose(const SelectorQuery&, SelectorScratch*, Selection* out) const override {
    out->lists.resize(1);
    out->page_numbers.resize(1);
    out->lists[0].clear();
    out->page_numbers[0].clear();
    out->tokens = 0;
    out->summary_bytes = out->keys_scanned = out->head_keys = 0;
    out->intact = true;
  }
};

}  // namespace

std::unique_ptr<const Selector> make_window_selector() { return std::make_unique<WindowSelector>(); }

}  // namespace kvasir
