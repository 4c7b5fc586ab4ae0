// kvasir bench --compare: the same measurements by llama.cpp's llama-bench, in turns.
#pragma once

#include <string>
#include <vector>

#include "bench_measure.h"

namespace tool {

// What llama-bench measured at a depth.
struct OtherSpeeds {
  uint64_t depth = 0;
  Samples prefill, decode;  // tokens per second
};

struct OtherProgram {
  std::vector<std::string> command;
  std::string version;  // build_commit and build_number
  std::vector<OtherSpeeds> depths;
  Json runs = Json::array();  // what each run printed
};

// Measures in each repetition the other program at all depths, then Kvasir. The model is closed
// while the other program runs, so that each has the memory of the machine and of its GPUs.
std::vector<DepthResult> measure_compared(Console& console, BenchModel* model,
                                          const BenchArguments& arguments, OtherProgram* other);

// One row for each step that both measured.
struct ComparedStep {
  std::string step;
  double other = 0, kvasir = 0;  // tokens per second
};
std::vector<ComparedStep> compared_steps(const std::vector<DepthResult>& results,
                                         const OtherProgram& other,
                                         const BenchArguments& arguments);

Json compared_json(const OtherProgram& other, const std::vector<ComparedStep>& steps);

}  // namespace tool
