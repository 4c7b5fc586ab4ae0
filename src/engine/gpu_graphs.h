// Work of a step of one token, or of a few, recorded once as graphs and launched again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "backend/device.h"

namespace kvasir {

class GpuGraphs {
 public:
  GpuGraphs(const DeviceKernels& ops, std::size_t parts) : ops_(ops), graphs_(parts) {}

  // Launches the graph of a part, and returns false. Where there is none, returns true: the caller
  // enqueues the part's work, which is recorded, then calls end(). *error keeps its first error.
  bool begin(DeviceStream* stream, std::size_t part, int* error) {
    if (!graphs_[part]) return ++recordings_, note(ops_.begin_graph(stream), error), true;
    note(ops_.run_graph(stream, graphs_[part]), error);
    return false;
  }

  // Launches what was recorded. False: there was no memory to keep it, and the caller enqueues the
  // part's work once more.
  bool end(DeviceStream* stream, std::size_t part, int* error) {
    DeviceGraph* graph = nullptr;
    note(ops_.end_graph(stream, &graph), error);
    if (*error) return release(stream, graph), true;  // something is missing in it
    if (!graph) return false;
    graphs_[part] = graph;
    note(ops_.run_graph(stream, graph), error);
    return true;
  }

  // In place of end(): drops what was recorded.
  void abandon(DeviceStream* stream) {
    DeviceGraph* graph = nullptr;
    (void)ops_.end_graph(stream, &graph);
    release(stream, graph);
  }

  // Comes before memory goes that graphs use, and at the end.
  void forget(DeviceStream* stream) {
    for (DeviceGraph*& graph : graphs_) release(stream, std::exchange(graph, nullptr));
  }

  uint64_t recordings() const { return recordings_; }  // so far

 private:
  static void note(int e, int* error) { *error = *error ? *error : e; }
  void release(DeviceStream* stream, DeviceGraph* graph) {
    if (graph) (void)ops_.release_graph(stream, graph);
  }

  const DeviceKernels& ops_;
  std::vector<DeviceGraph*> graphs_;
  uint64_t recordings_ = 0;
};

}  // namespace kvasir
