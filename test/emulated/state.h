// Contexts and streams of emulated devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "backend/device.h"

namespace kvasir::emulated {

using Work = std::function<int()>;

// Adds the operations.
void fill_operations(DeviceKernels* table);
void fill_attention(DeviceKernels* table);  // of new tokens
void fill_experts(DeviceKernels* table);
void fill_recurrent(DeviceKernels* table);
int quantize(DeviceStream* stream, const DeviceActivations& x, const DeviceCheck& check);
int find_nearest(DeviceStream* stream, const DeviceNearest& n);
int attend_window(DeviceStream* stream, const DeviceWindow& w, const float* q, const float* k,
                  const float* v, float* out);
int keep_window(DeviceStream* stream, const DeviceWindow& w, const float* k, const float* v);
// Gives an operation to a stream; an error of it is the device's from then on.
int enqueue(DeviceStream* stream, Work work);
// Where the CPU has what a device sees at `seen`: memory that is its own, of allocate_host(), or
// shared. Null where that is not so.
const std::byte* followed(DeviceContext* context, uint64_t seen, std::size_t size);

}  // namespace kvasir::emulated

namespace kvasir {

struct DeviceContext {
  int index = 0;
  std::mutex mutex;
  std::map<uintptr_t, std::size_t> memory, released;  // address, bytes
  int working = 0;       // streams whose work is being done: the memory can be touched meanwhile
  uint64_t waiting = 0;  // work of all streams that is not done
  uint32_t rests = 0;
  bool is_closed = false;
  int error = 0;  // that it is lost by
};

struct DeviceGraph {
  std::deque<emulated::Work> work;
};

struct StreamState {
  std::deque<emulated::Work> work;
  uint64_t given = 0, done = 0;
  DeviceGraph* kept = nullptr;  // between begin_graph() and end_graph()
  bool computes = false;        // has been given an operation
};

struct DeviceStream {
  DeviceContext* context;
  std::shared_ptr<StreamState> state;
};

}  // namespace kvasir
