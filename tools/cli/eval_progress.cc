#include "eval_progress.h"

#include <algorithm>
#include <utility>

#include "number_text.h"

namespace tool {

void Estimate::done(Work work, double cost, double seconds) {
  Part& p = part(work);
  p.ahead = std::max(p.ahead - cost, 0.0);
  p.behind += cost;
  p.seconds += seconds;
}

double Estimate::seconds_left() const {
  const double cost = parts_[0].behind + parts_[1].behind,
               seconds = parts_[0].seconds + parts_[1].seconds;
  const double rate = cost > 0 ? seconds / cost : 0;
  return parts_[0].left(rate) + parts_[1].left(rate);
}

double Estimate::share() const {
  const double before = parts_[0].seconds + parts_[1].seconds, left = seconds_left();
  return before > 0 ? before / (before + left) : 0;
}

double prefill_cost(uint64_t tokens) {
  const auto n = static_cast<double>(tokens);
  return n * (1 + n / 2 / 16384);
}

double decode_cost(uint64_t steps, uint64_t document_tokens) {
  return static_cast<double>(steps) * (1 + static_cast<double>(document_tokens) / 16384);
}

void EvalProgress::begin(std::string label) {
  label_ = std::move(label);
  last_step_ = Clock::now();
}

void EvalProgress::step(Work work, double cost) {
  const Clock::time_point now = Clock::now();
  estimate_->done(work, cost, std::chrono::duration<double>(now - last_step_).count());
  last_step_ = now;
  if (!terminal_.draws() || now - drawn_at_ < std::chrono::milliseconds(100)) return;
  drawn_at_ = now;
  const std::string line = string_printf("%3.0f%%  ", 100 * estimate_->share()) +
                           clock_time(estimate_->seconds_left()) + " left  " + label_;
  terminal_.draw(line.substr(0, static_cast<size_t>(std::max(terminal_.columns() - 1, 0))));
}

}  // namespace tool
