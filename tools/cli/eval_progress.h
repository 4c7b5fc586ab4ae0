// How far an evaluation is, over all reading and answering, and how long the rest will take.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "terminal.h"

namespace tool {

enum class Work { reading, answering };

// Costs are in units that take about equally long within a kind of work. What a unit takes is
// learned as work is done; until some was done of a kind, a unit of it takes as long as one of the
// other.
class Estimate {
 public:
  void expect(Work work, double cost) { part(work).ahead += cost; }
  void drop(Work work, double cost) { part(work).ahead -= cost; }  // it was done before
  void done(Work work, double cost, double seconds);

  double seconds_left() const;
  double share() const;  // of everything, in time: 0 to 1

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

// Of reading tokens: the weights cost the same for each, attention grows with what is before. Where
// both cost the same depends on the model; 16K tokens is in the middle of those measured.
double reading_cost(uint64_t tokens);
// Of decoding so many tokens over a document.
double answering_cost(uint64_t steps, uint64_t document_tokens);

// The line on the terminal.
class EvalProgress {
 public:
  EvalProgress(Terminal& terminal, Estimate* estimate) : terminal_(terminal), estimate_(estimate) {}

  void begin(std::string label);
  // Inside the work that begin() named: `cost` more of it was done since the last call.
  void step(Work work, double cost);

 private:
  using Clock = std::chrono::steady_clock;
  Terminal& terminal_;
  Estimate* estimate_;
  std::string label_;
  Clock::time_point last_step_ = Clock::now(), drawn_at_{};
};

}  // namespace tool
