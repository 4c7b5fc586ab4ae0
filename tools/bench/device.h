// Shared by the files of bench-device: a GPU, and the time of work on it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "backend/device.h"

namespace kvasir {

struct Bench {
  static constexpr uint32_t times = 24;  // repetitions in a run

  std::shared_ptr<Device> device;
  DeviceStream* stream = nullptr;
  bool good = true;

  void check(int error) {
    if (error && std::exchange(good, false))
      std::fprintf(stderr, "%s\n", device->status(error, "measuring").message());
  }
  const DeviceKernels& ops() const { return device->kernels(); }

  // Seconds of one f(i), i = 0 .. times - 1, recorded as a graph. before() runs before each
  // measurement.
  template <class F, class Before = void (*)()>
  double median_seconds(
      F&& f, Before&& before = [] {}) {
    std::vector<double> seconds;
    DeviceGraph* graph = nullptr;
    check(ops().begin_graph(stream));
    for (uint32_t i = 0; i < times; ++i) f(i);
    check(ops().end_graph(stream, &graph));
    for (int run = 0; good && graph && run < 8; ++run) {
      before();
      const auto begin = std::chrono::steady_clock::now();
      check(ops().run_graph(stream, graph));
      check(ops().wait(stream));
      seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / times);
    }
    if (graph) check(ops().release_graph(stream, graph));
    if (seconds.empty()) return 1e9;
    seconds.erase(seconds.begin());  // the first one loads kernels
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

// Attention of one token at the end of `tokens`. copy: bytes read and written per second by a copy
// within GPU memory.
void measure_attend(Bench* bench, uint32_t tokens, double copy);

}  // namespace kvasir
