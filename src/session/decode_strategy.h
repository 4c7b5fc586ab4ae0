// The decode strategy: the plan of the newest step, the selector and its memory.
#pragma once

#include <memory>

#include "engine/step.h"
#include "select/plan.h"

namespace kvasir {

class DecodeStrategy {
 public:
  // Returns true if the strategy has changed: its selector is new and has no selection.
  bool set_plan(const Plan& plan) {
    const bool is_new = !planned_ || plan.strategy != plan_.strategy;
    if (is_new) {
      selector_ = plan.strategy->make ? plan.strategy->make() : nullptr;
      memory_ = selector_ ? selector_->make_memory() : nullptr;
      has_chosen_ = false;
    }
    plan_ = plan;
    planned_ = true;
    return is_new;
  }
  void fill(ForwardStep* step) const {
    step->plan = plan_;
    step->selector = selector_.get();
    step->memory = memory_.get();
  }

  // Call when options have changed: the next plan starts from scratch.
  void forget_plan() { planned_ = has_chosen_ = false; }
  const Plan& plan() const { return plan_; }  // after set_plan()
  const Selector* selector() const { return selector_.get(); }
  StepMemory* memory() const { return memory_.get(); }

  // True if memory() has the selection of a strategy that chooses once.
  bool has_chosen() const { return has_chosen_; }
  void set_chosen(bool chosen) { has_chosen_ = chosen; }

 private:
  std::unique_ptr<const Selector> selector_;
  std::unique_ptr<StepMemory> memory_;
  Plan plan_;
  bool planned_ = false;
  bool has_chosen_ = false;
};

}  // namespace kvasir
