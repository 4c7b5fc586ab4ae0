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
  // What becomes of a part's work.
  enum class Turn {
    launched,  // its graph does it
    enqueued,  // the caller enqueues it
    recorded   // the caller enqueues it, then calls end()
  };

  GpuGraphs(const DeviceKernels& ops, std::size_t parts) : ops_(ops), parts_(parts) {}

  // A part is recorded after `wait` uses: to record takes longer than to enqueue. *error keeps its
  // first error.
  Turn begin(DeviceStream* stream, std::size_t part, uint32_t wait, int* error) {
    Part& p = parts_[part];
    if (p.graph) return note(ops_.run_graph(stream, p.graph), error), Turn::launched;
    if (p.uses < wait) return ++p.uses, Turn::enqueued;
    ++recordings_;
    note(ops_.begin_graph(stream), error);
    return Turn::recorded;
  }

  // Launches what was recorded. False: there was no memory to keep it, and the caller enqueues the
  // part's work once more.
  bool end(DeviceStream* stream, std::size_t part, int* error) {
    DeviceGraph* graph = nullptr;
    note(ops_.end_graph(stream, &graph), error);
    if (*error) return release(stream, graph), true;  // something is missing in it
    if (!graph) return false;
    parts_[part].graph = graph;
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
    for (Part& part : parts_) release(stream, std::exchange(part.graph, nullptr));
  }

  uint64_t recordings() const { return recordings_; }  // so far

 private:
  struct Part {
    DeviceGraph* graph = nullptr;
    uint32_t uses = 0;  // without it
  };
  static void note(int e, int* error) { *error = *error ? *error : e; }
  void release(DeviceStream* stream, DeviceGraph* graph) {
    if (graph) (void)ops_.release_graph(stream, graph);
  }

  const DeviceKernels& ops_;
  std::vector<Part> parts_;
  uint64_t recordings_ = 0;
};

}  // namespace kvasir
