// Attention of prefill on a GPU: of all tokens, or, by a sparse plan, of the tiles that the GPU
// chooses (kernels/cuda/prefill_tiles.cu). GPU memory has a copy of the sealed pages, which grows
// with the text. Each step copies the window, and the sinks when they change. A layer's pages that
// are missing, as all are after a load, are copied while the layers before it are computed. The
// store's stamps identify the copied data.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "backend/thread_pool.h"
#include "base/status.h"
#include "model/config.h"
#include "offload/fallback.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

// Bytes of pages that are copied together. Tests set fewer.
inline std::size_t prefill_piece_bytes = std::size_t{16} << 20;

class GpuPrefillAttention {
 public:
  // Arguments as for GpuSelectiveAttention.
  GpuPrefillAttention(const std::shared_ptr<Device>& device, const HeadShape& heads,
                      const StoreShape& shape, uint32_t first, uint32_t layers);
  ~GpuPrefillAttention() { release(); }

  // [layers] DeviceKv::sink_logits; empty: none.
  void set_sink_logits(std::vector<const float*> logits) { sink_logits_ = std::move(logits); }
  // Changes the layers, from another first one on. Nothing of theirs is copied yet.
  void move_to(uint32_t first) {
    first_ = first, sinks_stamp_ = 0, centred_ = false;
    std::fill(stamps_.begin(), stamps_.end(), 0);
  }
  // Returns the reason why the CPU must attend a step of n tokens; none: the GPU can.
  Fallback refuses(const KvStore& store, uint32_t n) const;
  // Makes room and copies what is in full precision. The caller has waited for all work of this
  // object. plan: of the step.
  // Where it is sparse, the blocks of rows with the first `exact` tokens attend every token.
  // follows: tokens that are known to follow, which get their room now where there is so much.
  // Code::no_memory: the text exceeds GPU memory, and the caller must release(). Code::device.
  Status prepare(const KvStore& store, const Plan& plan, uint32_t exact, uint32_t n,
                 uint64_t follows, ThreadPool* pool, DeviceStream* stream);
  // Copies the pages of a layer that are missing, on streams of its own. Later work of `stream`
  // waits for them. Code::corrupt (a damaged page of a mapped file). Code::no_memory. Code::device.
  // Code::cancelled: pages copied so far stay.
  Status bring(const KvStore& store, uint32_t layer, ThreadPool* pool, const CancelLatch& cancel,
               DeviceStream* stream);
  // After bring() with the same stream: enqueues the attention of a layer. All arrays are in GPU
  // memory, with shapes as in GpuSelectiveAttention; lse: [n][heads]. Returns an error code of
  // DeviceKernels.
  int enqueue(DeviceStream* stream, uint32_t layer, const float* q, const float* k, const float* v,
              float* out, float* lse) const;
  // Copies pages of a layer that the store sealed ahead of its commit(), after the stream has
  // computed that layer. The next prepare() then copies less. Does not wait. The caller waits for
  // the stream before the next call of the same turn, one of `turns`. Returns an error code of
  // DeviceKernels. Call committed() after the store has committed the whole step.
  static constexpr std::size_t turns = 3;
  int put_ahead(const KvStore& store, uint32_t layer, std::size_t turn, ThreadPool* pool,
                DeviceStream* stream);
  void committed(const KvStore& store);
  // Frees all GPU memory. No work may be enqueued.
  void release();
  bool holds_memory() const { return !blocks_.empty() || window_.get(); }

 private:
  Status make_room(const KvStore& store, uint64_t follows, ThreadPool* pool);
  Status make_step_room(const KvStore& store, uint64_t follows);
  Status make_key_room(uint32_t rows);
  void make_part_room(uint32_t n);
  Status make_tile_room(const Plan& plan);
  void release_tiles();
  DevicePrefillTiles tiles_of(uint32_t layer) const;
  Status make_window_room(const KvStore& store);
  Status make_extent_room(const KvStore& store, uint64_t follows);
  Status make_address_room(uint32_t extents);
  Status make_staging_room(ThreadPool* pool);
  uint32_t missing_extents(const PageStore& pages) const;
  Status make_piece_room(uint32_t extents, ThreadPool* pool);
  Status bring_piece(const KvStore& store, uint32_t layer, uint32_t first, uint32_t end,
                     ThreadPool* pool);
  int wait_for_pieces();
  Status place(DeviceStream* stream);
  Status put_rows(const KvStore& store, ThreadPool* pool, DeviceStream* stream);
  std::size_t heads_total() const { return std::size_t{layers_} * shape_.kv_heads; }
  std::size_t first_head() const { return std::size_t{first_} * shape_.kv_heads; }
  // Bytes of an extent in one layer.
  std::size_t pages_size() const { return shape_.kv_heads * PageShape::pages_bytes(); }
  std::size_t scales_size() const { return shape_.kv_heads * shape_.page.scales_bytes(); }
  // Some extents: [layers][count][pages_size()], then [layers][count][scales_size()].
  struct Block {
    DeviceBuffer<std::byte> memory;
    uint32_t first = 0, count = 0;
  };
  const Block& block_of(uint32_t extent) const;
  std::byte* pages_of(const Block& b, uint32_t layer, uint32_t extent) const {
    return b.memory.get() + (std::size_t{layer} * b.count + extent - b.first) * pages_size();
  }
  std::byte* scales_of(const Block& b, uint32_t layer, uint32_t extent) const {
    return b.memory.get() + std::size_t{layers_} * b.count * pages_size() +
           (std::size_t{layer} * b.count + extent - b.first) * scales_size();
  }
  uint32_t extents_room() const {
    return blocks_.empty() ? 0 : blocks_.back().first + blocks_.back().count;
  }
  uint64_t& stamp_of(uint32_t layer, uint32_t extent) { return stamps_[extent * layers_ + layer]; }

  const std::shared_ptr<Device> device_;
  const DeviceKernels& ops_;
  const HeadShape heads_;
  const StoreShape shape_;
  uint32_t first_;
  const uint32_t layers_;
  std::vector<const float*> sink_logits_;
  uint32_t n_ = 0, pages_ = 0, window_count_ = 0;  // of the step
  bool sparse_ = false;
  bool centred_ = false;
  std::vector<Block> blocks_;
  std::vector<uint64_t> stamps_;  // [extents][layers] of the copied data; 0: nothing copied yet
  uint32_t placed_ = 0;           // extents whose addresses are on the GPU
  uint32_t ahead_ = 0;            // layers of the step that put_ahead() has copied
  DeviceBuffer<uint64_t> pages_at_, scales_at_;  // [layers][address_room_] addresses
  uint32_t room_ = 0, q_room_ = 0, part_room_ = 0, window_room_ = 0, address_room_ = 0;
  uint64_t sinks_stamp_ = 0;
  DeviceBuffer<uint16_t> keys_, values_, q_;
  DeviceBuffer<float> q_scale_, largest_, sinks_, centre_, window_, sink_scores_, parts_;
  // Of a sparse step: DevicePrefillTiles, of room_ and q_room_ rows; tile_heads_ 0: no room yet.
  uint32_t tile_heads_ = 0, chosen_tiles_ = 0, near_tile_ = 0, exact_blocks_ = 0;
  uint64_t draw_ = 0;
  DeviceBuffer<int8_t> tile_keys_, tile_q_;
  DeviceBuffer<float> tile_key_scales_, tile_scores_, tile_biases_;
  DeviceBuffer<uint32_t> tile_lists_, tile_counts_;
  PinnedBuffer<std::byte> staging_;
  std::size_t staging_room_ = 0;  // bytes
  // Of bring(): pieces are filled in turn while those before them are copied.
  static constexpr std::size_t piece_count = 3;
  PinnedBuffer<std::byte> pieces_;
  std::size_t piece_room_ = 0;  // bytes of a piece
  DeviceStream* piece_streams_[piece_count] = {};
  std::size_t piece_ = 0;
};

}  // namespace kvasir
