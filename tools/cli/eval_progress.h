// Progress of an evaluation over all prefill and decode, with the time that is left.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "terminal.h"

namespace tool {

enum class Work { prefill, decode };

// Costs are in units that take about equally long within a kind of work. The time of a unit is
// measured from the finished work of its kind, or of the other kind while there is none.
class Estimate {
 public:
  void expect(Work work, double cost) { part(work).ahead += cost; }
  void drop(Work work, double cost) { part(work).ahead -= cost; }  // finished by an earlier run
  void done(Work work, double cost, double seconds);

  double seconds_left() const;
  double share() const;  // of the whole time, 0 to 1

 private:
  struct Part {
    double ahead = 0, behind = 0, seconds = 0;
    double left(double default_rate) const {
      return ahead * (behind > 0 ? seconds / behind : default_rate);
    }
  };
  Part& part(Work work) { return parts_[static_cast<size_t>(work)]; }

  std::array<Part, 2> parts_;
};

// Cost of prefill. Weights cost the same for each token; attention grows with the tokens before it.
// Both cost the same at a length that depends on the model; 16K tokens is in the middle of the
// measured ones.
double prefill_cost(uint64_t tokens);
// Cost of decoding `steps` tokens over a document.
double decode_cost(uint64_t steps, uint64_t document_tokens);

// The progress line on the terminal.
class EvalProgress {
 public:
  EvalProgress(Terminal& terminal, Estimate* estimate) : terminal_(terminal), estimate_(estimate) {}

  void begin(std::string label);
  // Adds `cost` of finished work since the last call, of the work that begin() named.
  void step(Work work, double cost);

 private:
  using Clock = std::chrono::steady_clock;
  Terminal& terminal_;
  Estimate* estimate_;
  std::string label_;
  Clock::time_point last_step_ = Clock::now(), drawn_at_{};
};

}  // namespace tool
