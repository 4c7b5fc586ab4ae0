// The progress line of a long call: finished work, speed, time left.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "terminal.h"

namespace tool {

enum class Unit { tokens, bytes };

// Progress of one call of the library, which receives `callback` and this object. Draws at most ten
// times a second.
class Progress {
 public:
  // `before`: tokens already in the sequence; they make each further one slower.
  Progress(Terminal& terminal, std::string label, Unit unit, uint64_t before = 0);
  ~Progress() { terminal_.erase(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  static int32_t callback(int32_t phase, uint64_t done, uint64_t total, void* progress);

  uint64_t total() const { return total_; }  // of the call; 0 while unknown
  double seconds() const;                    // since construction

 private:
  void update(uint64_t done, uint64_t total);
  void prepare(uint64_t done, uint64_t total);  // of an index
  void learn(double elapsed);
  double seconds_left() const;
  std::string line(int columns) const;
  std::string bar(int columns) const;
  double share() const;
  double cost_in_tokens(uint64_t done) const;
  double cost_in_pairs(uint64_t done) const;

  Terminal& terminal_;
  std::string label_;
  Unit unit_;
  uint64_t before_, done_ = 0, total_ = 0;
  std::chrono::steady_clock::time_point start_;
  double drawn_at_ = 0;
  // The newest speed, since a mark that moves every second.
  double mark_seconds_ = 0, speed_ = 0;
  uint64_t mark_done_ = 0;
  // Sums of the least-squares fit: u tokens, v token pairs, t seconds.
  double uu_ = 0, uv_ = 0, vv_ = 0, ut_ = 0, vt_ = 0;
};

}  // namespace tool
