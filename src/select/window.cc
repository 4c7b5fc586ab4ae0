// `window`: sinks and the newest tokens only (StreamingLLM, arXiv 2309.17453, section 3.2). Selects
// no page.
#include "select/blocks.h"

namespace kvasir {
namespace {

class WindowSelector final : public Selector {
 public:
  void choose(const SelectorQuery&, SelectorScratch*, Selection* out) const override {
    begin_selection(1, out);
  }

 protected:
  void choose_together(const SelectorQuery&, SelectorScratch*, Selection* out) const override {
    begin_selection(1, out);
  }
};

}  // namespace

std::unique_ptr<const Selector> make_window_selector() {
  return std::make_unique<WindowSelector>();
}

}  // namespace kvasir
