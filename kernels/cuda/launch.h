// How operations launch kernels: names, grids, and the shapes of blocks of products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "driver.h"
#include "layout.h"

namespace kvasir::cuda {

// The suffix of the kernels for a type of weights.
inline const char* suffix_of(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return "f32";
    case TensorType::f16:
      return "f16";
    case TensorType::bf16:
      return "bf16";
#define KVASIR_SUFFIX(name) \
  case TensorType::name:    \
    return #name;
      KVASIR_QUANTISED_TYPES(KVASIR_SUFFIX)
#undef KVASIR_SUFFIX
  }
  return "";
}

inline bool is_quantised(TensorType type) { return layout_of(type).low_bits != 0; }

inline unsigned blocks_for(std::size_t n, unsigned each) {
  return static_cast<unsigned>((n + each - 1) / each);
}

// Launches a kernel; the arguments have exactly the types of its parameters. From compute
// capability 9.0 on it may start before the previous one has ended: dependent.h.
struct Grid {
  // shared: dynamic shared memory per block, bytes.
  unsigned x, y = 1, z = 1, shared = 0;
};
template <class... Args>
int launch(DeviceStream* s, const char* name, Grid grid, unsigned threads, Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return 0;
  const Current current(s->context);
  if (current.error()) return current.error();
  void* parameters[] = {&args...};
  CUlaunchAttribute early{};
  early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  early.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = grid.x, config.gridDimY = grid.y, config.gridDimZ = grid.z;
  config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = grid.shared;
  config.hStream = s->stream;
  config.attrs = &early;
  config.numAttrs = s->context->major >= 9 ? 1 : 0;
  const auto kernel = s->context->kernels.find(name);
  return kernel == s->context->kernels.end()
             ? CUDA_ERROR_NOT_FOUND
             : driver().cuLaunchKernelEx(&config, kernel->second, parameters, nullptr);
}

struct Name {
  char text[32];
  Name(const char* kind, TensorType type) {
    std::snprintf(text, sizeof text, "%s%s", kind, suffix_of(type));
  }
};

struct AttentionName {
  char text[32];
  AttentionName(const char* part, uint32_t dim) {
    std::snprintf(text, sizeof text, "attention_%s_%u", part, dim);
  }
};

struct PrefillName {
  char text[32];
  // wide: of compute capability 9.0.
  PrefillName(bool wide, bool windowed, uint32_t dim) {
    std::snprintf(text, sizeof text, "prefill_%s_%u",
                  wide       ? windowed ? "wide_window" : "wide"
                  : windowed ? "window"
                             : "attend",
                  dim);
  }
};

struct LayOutName {
  char text[32];
  explicit LayOutName(uint32_t dim) { std::snprintf(text, sizeof text, "prefill_lay_out_%u", dim); }
};

struct TilesName {
  char text[32];
  TilesName(bool wide, uint32_t dim) {
    std::snprintf(text, sizeof text, wide ? "prefill_wide_tiles_%u" : "prefill_sum_tiles_%u", dim);
  }
};

struct WindowName {
  char text[32];
  explicit WindowName(uint32_t dim) { std::snprintf(text, sizeof text, "window_attend_%u", dim); }
};

struct NearestName {
  char text[32];
  explicit NearestName(uint32_t dim) { std::snprintf(text, sizeof text, "nearest_groups_%u", dim); }
};

inline Planes planes_of(const DeviceMatrix& m) {
  return planes_at(m.type, std::size_t{m.rows} * m.cols / 32, const_cast<std::byte*>(m.data),
                   nullptr);
}

// Rows of a block: 64 where that gives as many blocks as the device runs at a time, because the
// inputs are read once per block; else fewer, so that enough blocks keep the memory busy.
// blocks(rows): their number.
template <class Blocks>
unsigned few_rows(const DeviceContext& c, Blocks&& blocks) {
  return blocks(64) >= 2 * c.multiprocessors ? 64 : 2 * blocks(32) >= c.multiprocessors ? 32 : 16;
}

// Steps of the ring that a block copies to: as many as leave room for the blocks of a
// multiprocessor, up to two. step, sums: bytes.
inline unsigned ring_steps(const DeviceContext& c, unsigned step, unsigned sums, unsigned blocks) {
  constexpr unsigned own = 1024;  // bytes of shared memory that a block uses besides
  const unsigned half = c.shared_bytes / 2 - own;
  const unsigned room =
      blocks > c.multiprocessors && half >= 2 * step + sums ? half : c.block_shared_bytes;
  const unsigned steps = (room - sums) / step;
  return steps >= max_few_steps ? max_few_steps : std::clamp(steps, 2u, 4u);
}

}  // namespace kvasir::cuda
