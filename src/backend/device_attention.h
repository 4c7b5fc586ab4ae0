// Arguments of the attention kernels of a GPU, for one layer. Plain data: kernels take it by value.
//
// Decode leaves the pages in host memory, where the device reads the selected quads. The device's
// own memory holds the sinks, the window and a sketch of every key. Values that change from step to
// step (counts, budget) are read from device memory, so that one graph serves many steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/query_groups.h"

namespace kvasir {

struct DeviceCounts {
  uint32_t pages;   // sealed
  uint32_t window;  // rows before the step
  uint32_t step;    // number of the step, from 1 on
  // Entries of DeviceHotQuads are stale that are older than step `valid_since`, and those of quads
  // from `changed_from` on that are older than step `changed_since`.
  uint32_t valid_since;
  uint32_t changed_from, changed_since;
  uint32_t first_row = 0;  // where the oldest row of the window is
};

// Where row `row` of a window is, the oldest one being 0. The window is a ring of `rows` rows.
constexpr uint32_t window_row(const DeviceCounts& counts, uint32_t row, uint32_t rows) {
  row += counts.first_row;
  return row < rows ? row : row - rows;
}

// Quads that the heads of a group may select for one token: SampleSize of select/sampling.h. For
// several tokens the variance counts for so many more heads.
struct DeviceBudget {
  uint32_t min_quads, max_quads;
  float variance;
};

// One layer of a sequence. Arrays have the layouts of the store (backend/page.h,
// store/key_sketch.h), for the KV heads of the layer.
struct DeviceKv {
  uint32_t layer, kv_heads, group, head_dim, dim, page_tokens, sketch_dim;
  const DeviceCounts* counts;
  const DeviceBudget* budget;
  // [extents] addresses at which the device reads the arrays of an extent; 0: a missing block
  const uint64_t *sketch_at, *pages_at, *scales_at;
  // bytes from there to the layer's first head
  std::size_t sketch_offset, pages_offset, scales_offset;
  std::size_t sketch_size;  // bytes per head
  const float* basis;       // [kv_heads][dim][sketch_dim]
  const float* sinks;       // [kv_heads][2][page_tokens][dim]
  const float* centre;      // [kv_heads][dim]
  float* window;            // [kv_heads][2][window_rows][dim], rows as window_row() places them
  uint32_t window_rows;
  const float* sink_logits = nullptr;  // [kv_heads * group] learned scores without values, or null
};

// A cache of the quads of one layer that recent tokens selected, because the next token selects
// many of them again. A quad has hot_ways possible places; it takes the one whose quad was selected
// least recently. attend_all() gives quad i place i. Which quads stay depends on the order of
// threads where several compete for the same places; the result of attention does not.
struct DeviceHotQuads {
  uint32_t room;           // quads per KV head, a multiple of hot_ways; 0: no cache
  std::size_t quad_bytes;  // keys, values, then four scales of the keys and four of the values
  uint8_t* quads;          // [kv_heads][room][quad_bytes]
  // [kv_heads][room] upper half: the step that selected the quad last; lower half: its number.
  // 0: empty
  unsigned long long* entries;
  // [kv_heads][max_quads] for this step's list: 1 + the quad's place, with hot_present where its
  // keys and values are cached; 0: no place
  uint32_t* list_places;
};
constexpr uint32_t hot_ways = 8, hot_present = 1u << 31;

// The first of a quad's places.
constexpr uint32_t hot_place(uint32_t quad, uint32_t room) {
  return static_cast<uint32_t>((uint64_t{quad * 0x9e3779b1u} * (room / hot_ways)) >> 32) * hot_ways;
}

// Whether the cached quad of an entry is still valid.
constexpr bool is_kept(unsigned long long entry, const DeviceCounts& counts) {
  const auto quad = static_cast<uint32_t>(entry), step = static_cast<uint32_t>(entry >> 32);
  return step > 0 && step >= counts.valid_since &&
         (quad < counts.changed_from || step >= counts.changed_since);
}

// Intermediate arrays of a step of n tokens. The tokens of a block (query_groups.h) share a list of
// quads; a single token is a block.
struct DeviceAttention {
  uint32_t n, blocks;
  uint32_t selecting_rows;  // room for the query rows of a block that select: a row per head
  uint32_t extents;         // room, extents
  uint32_t max_quads;       // room of a list, quads
  float* q;                 // [kv_heads][n][group][dim] scaled by 1 / sqrt(head_dim), padded
  int8_t* q8;               // the same, rounded as by Kernels::quantize_queries
  float* q_scale;           // [kv_heads][n][group]
  // [kv_heads][n][group][sketch_dim] the queries in the sketch's coordinates, rounded likewise;
  // null: no selection by a sketch
  int8_t* projected;
  float* projected_scale;
  // [kv_heads][blocks][selecting_rows][quads of `extents`] scores; afterwards the first row of a
  // block holds the sums of their shares
  float* scores;
  // [kv_heads][blocks][selecting_rows][max_score_parts][2] per part: an upper bound of its scores,
  // and the sum of exponentials relative to it
  float* score_sums;
  uint32_t* share_counts;          // [kv_heads][blocks][share_bins] shares per size
  unsigned long long* share_sums;  // [kv_heads][blocks][share_bins] sums, units of 1 / share_unit
  // [kv_heads][blocks] thresholds of shares (select/sampling.h), where one thread block finds a
  // list's threshold for all
  float* thresholds;
  // [kv_heads][blocks][parts of choose_quads] 1 + the number of quads taken; 0: not known yet
  uint32_t* part_counts;
  // [kv_heads][blocks][max_quads] quads, ascending; null: neighbouring quads, of which list_counts
  // has the first
  uint32_t* lists;
  // [kv_heads][blocks][max_quads] PageRef::bias; 0: the quad stands for itself; null: all zero
  float* biases;
  // [kv_heads][blocks][max_quads] a bit per token of the quad that is attended; null: all four
  const uint8_t* present;
  uint32_t* list_counts;  // [kv_heads][blocks][2] quads in the list, and those cached
  // [kv_heads][n][attention_parts][group][dim + state_sums] o, m, l, and the part of l that stands
  // for itself
  float* states;
  // [kv_heads][blocks][max_quads][quad_bytes_of(dim)] the quads of the lists that are not cached,
  // laid out as in DeviceHotQuads; null: each is read where its page is
  uint8_t* gathered;
  DeviceHotQuads hot;  // for steps of one token; otherwise room 0
  uint32_t parts;      // states to merge: near_parts without selected pages, or attention_parts
  // [kv_heads][n][group][dim + state_sums] the partial of the CPU, to be merged; null: none
  const float* cpu_states;
  // [2][kv_heads][n][group] attend_sinks_and_window() also writes m, then l here; null: it does not
  float* near_sums;
  // attend_all(): no earlier kernel of the step writes quads of this layer that stay, so that they
  // may be read before earlier kernels have ended
  bool reads_early;
};

// Quads of neighbouring layers that gather_group() copies into DeviceHotQuads: the same quads in
// all layers and all KV heads.
struct DeviceGroup {
  uint32_t layers, max_quads;
  const uint32_t* count;           // quads
  const uint32_t *quads, *places;  // [count]; places from 0 on
  uint32_t room;                   // DeviceHotQuads::room
  uint8_t* to;                     // [layers][kv_heads][room][quad_bytes_of(dim)]
};

// Keys and values of a quad with their scales.
constexpr std::size_t quad_bytes_of(uint32_t dim) { return std::size_t{8} * dim + 16; }

// Sixteen sizes of shares per power of two, from 2^-43 on; smaller shares count as 0.
constexpr uint32_t max_score_parts = 128, share_bins = 768, choose_quads = 2048;
constexpr float share_unit = 0x1p56f;

// Parts of a token's attention in a KV head. Thread blocks compute them in parallel;
// finish_attention() merges them. The near part has sinks and window, the others selected pages.
constexpr uint32_t near_parts = 1, chosen_parts = 20, attention_parts = near_parts + chosen_parts;
constexpr uint32_t state_sums = 3;             // floats of a state after o
constexpr uint32_t max_attended_group = 16;    // query heads per KV head
constexpr uint32_t max_selective_tokens = 64;  // tokens of a step

// The most selecting rows of a block, over all groups and steps.
constexpr uint32_t max_selecting_rows = [] {
  uint32_t max = 0;
  for (uint32_t group = 1; group <= max_attended_group; ++group)
    for (uint32_t n = 1; n <= max_selective_tokens; ++n)
      if (const uint32_t rows = max_selecting_tokens(n, query_groups(n, group)) * group; rows > max)
        max = rows;
  return max;
}();
// Padded head dimensions. Few models have others, and the code for each is large.
constexpr uint32_t attended_dims[] = {64, 128, 256};

// What a sparse prefill attends of the text before its newest part: for each block of prefill_rows
// query rows, tiles of prefill_keys keys each. The first tile, with the sinks, is always one.
struct DevicePrefillTiles {
  uint32_t room = 0;    // tiles of a list; 0: every key is attended
  uint32_t chosen = 0;  // expected number of tiles besides the first one
  uint32_t near = 0;    // every block attends the tiles from this one on
  uint32_t seed = 0;    // of the random numbers of the layer's first KV head and block
  uint32_t heads = 0;   // KV heads whose scores are in memory at once
  uint32_t exact = 0;   // blocks of rows before this one attend every tile
  // What the choice reads: rows of tile_row_bytes() signed bytes, [kv_heads][room] of keys, each
  // group of tile_scale_keys divided by its scale, and [kv_heads][q_room] of queries. Bytes behind
  // `dim` have no meaning.
  int8_t *keys = nullptr, *q = nullptr;
  float* key_scales = nullptr;  // [kv_heads][room / tile_scale_keys]
  // [heads][blocks][choosing_rows()][room] log2 of the sum of e^score over a tile, in which
  // the best key of each group stands for it
  float* scores = nullptr;
  uint32_t* lists = nullptr;   // [kv_heads][blocks][room] tiles, ascending
  float* biases = nullptr;     // [kv_heads][blocks][room] log2 of the weight of a tile's keys
  uint32_t* counts = nullptr;  // [kv_heads][blocks] tiles in the list

  // As sample_seed() of select/sampling.h has it.
  constexpr uint32_t seed_of(uint32_t head, uint32_t block) const {
    return seed + head * 0x85ebca6bu + block * 0xc2b2ae3du;
  }
};

// A step of prefill in one layer: n tokens attend all tokens before them and themselves, or some.
// Pages are in device memory, or in host memory that the device reads.
struct DevicePrefill {
  uint32_t kv_heads, group, head_dim, dim, page_tokens;
  uint32_t n;                               // tokens of the step
  uint32_t pages, window;                   // sealed pages and rows of the window before the step
  const uint64_t *pages_at, *scales_at;     // as in DeviceKv
  std::size_t pages_offset, scales_offset;  // as in DeviceKv
  const float *sinks, *centre;  // as in DeviceKv; centre null: keys of the step are not centred
  const float* window_rows;     // [kv_heads][2][window_room][dim]
  uint32_t window_room;
  // rows of the arrays below: all tokens in whole tiles of prefill_keys, n * group in whole blocks
  // of prefill_rows
  uint32_t room, q_room;
  // In half precision, for the device alone: room * dim numbers of each KV head, and q_room * dim.
  uint16_t *keys, *values, *q;
  float* q_scale;                      // [kv_heads][q_room]
  float* largest;                      // [kv_heads][2] largest magnitude of keys, of values
  const float* sink_logits = nullptr;  // as in DeviceKv
  float* sink_scores = nullptr;        // [kv_heads][q_room] those of each row; null without them
  // Of a layer whose queries see a window of `seen` tokens (0: of others): as DeviceWindow has it.
  // It has no pages. The window's rows are in a ring, [kv_heads][2][window_room][head_dim]:
  // those before the step from row ring_first on.
  uint32_t seen = 0, ring_first = 0;
  bool chunked = false;
  uint64_t position = 0;  // of the step's first token
  // Scratch of steps that are too small to occupy the device, of which blocks divide the keys; no
  // step needs it. prefill_part_floats() for each row of a part, in whole blocks of prefill_rows.
  float* parts = nullptr;
  uint32_t part_room = 0;  // rows
  DevicePrefillTiles tiles = {};
};
constexpr uint32_t prefill_rows = 128, prefill_keys = 128;
// One of so many neighbouring query rows chooses for a block. Where heads share keys each token
// chooses by one of them or more, and neighbouring tokens by different ones. Otherwise every second
// token chooses.
constexpr uint32_t choosing_stride(uint32_t group) { return group < 2 ? 2 : group > 4 ? 4 : group; }
constexpr uint32_t max_choosing_rows = prefill_rows / choosing_stride(1);
constexpr uint32_t choosing_rows(uint32_t group) {  // of a block
  return (prefill_rows + choosing_stride(group) - 1) / choosing_stride(group);
}
constexpr uint32_t prefill_tile_groups = prefill_keys / 8, tile_scale_keys = 32;
// Tensor cores read tiles whose rows have 128 bytes.
constexpr uint32_t tile_row_bytes(uint32_t dim) { return dim > 128 ? dim : 128; }
constexpr uint32_t tile_group_of(uint32_t key) {  // of a tile
  return key / 32 * 4 + key % 8 / 2;
}
constexpr uint32_t max_prefill_tiles = 12288;  // before `near`: they are in shared memory
// Of all rows that choose, number i: choosing_rows() of each block. Where each token has one, they
// begin with the block's first whole token. A last block without a whole token attends every tile.
constexpr uint32_t choosing_row(uint32_t i, uint32_t group) {
  const uint32_t stride = choosing_stride(group), rows = choosing_rows(group),
                 begin = i / rows * prefill_rows, own = i % rows;
  const uint32_t turns = group % stride == 0                 ? stride
                         : group % 2 == 0 && stride % 2 == 0 ? 2
                                                             : 1,
                 first = group == stride ? (group - begin % group) % group : 0,
                 row = first + own * stride + own / (group / turns) % turns;
  return begin + (row < prefill_rows ? row : prefill_rows - 1);
}
// What a row leaves of a part of the keys: its output, maximum and sum.
constexpr std::size_t prefill_part_floats(uint32_t dim) { return dim + std::size_t{2}; }
constexpr uint32_t max_prefill_part_rows = 512 * prefill_rows;  // of a layer in a step

}  // namespace kvasir
