// How many tokens of a prefill go through a layer before the next one, by what memory holds.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvasir {

struct SpanSize {
  static constexpr uint64_t min_tokens = 8192, max_tokens = 65536;
  static constexpr uint64_t max_stream = uint64_t{512} << 20;  // bytes

  // Bytes.
  uint64_t weights = 0;    // of the model
  uint64_t text = 0;       // that the text to come takes in the stores
  uint64_t stream = 1;     // of a span's token: its residual stream and its angles
  uint64_t windows = 0;    // of a span's token: its pages of windowed layers, which the end drops
  uint64_t available = 0;  // of host memory

  // Whether the CPU would read weights from the file again with each chunk. What a text takes would
  // evict them too.
  bool weights_exceed() const { return weights > available || text > available - weights; }
  // A multiple of chunk. A text's last span may have a quarter more.
  uint64_t tokens(uint32_t chunk) const {
    const uint64_t room = std::min(max_stream / stream, available / 8 / (stream + windows));
    return std::clamp(room, min_tokens, max_tokens) / chunk * chunk;
  }
};

}  // namespace kvasir
