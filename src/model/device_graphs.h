// What a stage gives a device for a step of one token, kept: it is the same every time, and is given again by one call.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "compute/device.h"

namespace kvasir {

class DeviceGraphs {
 public:
  DeviceGraphs(const DeviceKernels& ops, std::size_t parts) : ops_(ops), graphs_(parts) {}

  // Gives a part of the step to the stream, by give() where it is not kept yet. *error: the step's first one; give() notes its own there.
  template <class F>
  void run(DeviceStream* stream, std::size_t part, int* error, F&& give) {
    const auto note = [&](int e) { *error = *error ? *error : e; };
    if (!graphs_[part]) {
      note(ops_.begin_graph(stream));
      give();
      DeviceGraph* graph = nullptr;
      note(ops_.end_graph(stream, &graph));
      if (*error) return graph ? (void)ops_.release_graph(stream, graph) : void();  // something is missing in it
      if (!graph) return give();
      graphs_[part] = graph;
    }
    note(ops_.run_graph(stream, graphs_[part]));
  }

  // Comes before memory that the work is done with goes, and at the end.
  void forget(DeviceStream* stream) {
    for (DeviceGraph*& graph : graphs_)
      if (DeviceGraph* old = std::exchange(graph, nullptr)) (void)ops_.release_graph(stream, old);
  }

 private:
  const DeviceKernels& ops_;
  std::vector<DeviceGraph*> graphs_;
};

}  // namespace kvasir
