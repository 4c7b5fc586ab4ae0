// What attention of new tokens on a GPU reads and writes, in one layer. Plain data: the kernels
// take it by value.
//
// The pages stay in host memory, where the device reads the chosen ones; in its own are the newest
// and the first tokens and a sketch of every key. What changes from step to step (counts, budget)
// is read from the device's memory, so that a graph of the work can be run again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/query_groups.h"

namespace kvasir {

struct DeviceCounts {
  uint32_t pages;   // sealed
  uint32_t window;  // rows before the step
  uint32_t step;    // its number, from 1 on
  uint32_t since;   // what DeviceHotQuads has of steps before this one is not what it was,
  // nor what it has of quads from the former on of steps before the latter
  uint32_t changed_from, changed_since;
};

// Quads that a token's heads of a group may choose together: as SampleSize of select/sampling.h has
// it. For several tokens the variance is that of so many more heads.
struct DeviceBudget {
  uint32_t least, most;
  float variance;
};

// One layer of a sequence. Arrays are as the store has them (backend/page.h, store/key_sketch.h),
// of the layer's KV heads.
struct DeviceKv {
  uint32_t layer, kv_heads, group, head_dim, dim, page_tokens, sketch_dim;
  const DeviceCounts* counts;
  const DeviceBudget* budget;
  // [extents] where the device reads the arrays of an extent; of a block that is not there: 0,
  const uint64_t *sketch_at, *pages_at, *scales_at;
  // and where in them the layer's first head is
  std::size_t sketch_offset, pages_offset, scales_offset;
  std::size_t sketch_size;  // of a head
  const float* basis;       // [kv_heads][dim][sketch_dim]
  const float* sinks;       // [kv_heads][2][page_tokens][dim]
  const float* centre;      // [kv_heads][dim]
  float* window;            // [kv_heads][2][window_rows][dim]
  uint32_t window_rows;
};

// Quads that stay in the device's memory from one token to the next, which chooses many of them
// again: a cache of those that were chosen last, of one layer. A quad may have one of hot_ways
// places, by its number; of these it takes the one whose quad was not chosen for longest. Which
// quads stay where several want the same places depends on which thread comes first; what is
// attended does not.
struct DeviceHotQuads {
  uint32_t room;           // quads of a KV head that stay, a multiple of hot_ways; 0: none
  std::size_t quad_bytes;  // of its keys, its values, then the keys' and the values' four scales
  uint8_t* quads;          // [kv_heads][room][quad_bytes]
  // [kv_heads][room] the step that chose the quad last in the upper half, its number in the lower;
  // 0: none
  unsigned long long* entries;
  // [kv_heads][most] of this step's list: 1 + the quad's place, and hot_is_there where its keys and
  // values are there; 0: it has none
  uint32_t* found;
};
constexpr uint32_t hot_ways = 8, hot_is_there = 1u << 31;

// The first of a quad's places.
constexpr uint32_t hot_place(uint32_t quad, uint32_t room) {
  return static_cast<uint32_t>((uint64_t{quad * 0x9e3779b1u} * (room / hot_ways)) >> 32) * hot_ways;
}

// Whether what the cache has of an entry's quad is what it was.
constexpr bool is_kept(unsigned long long entry, const DeviceCounts& counts) {
  const auto quad = static_cast<uint32_t>(entry), step = static_cast<uint32_t>(entry >> 32);
  return step > 0 && step >= counts.since &&
         (quad < counts.changed_from || step >= counts.changed_since);
}

// What the operations hand on, of a step of n tokens. Those of a block (askers.h) share a list; one
// token is a block.
struct DeviceAttention {
  uint32_t n, blocks;
  // that there is room for, of the askers of a block: each has a row a head of the group
  uint32_t asking_rows;
  uint32_t extents, most;  // that there is room for, and quads of a list
  float* q;                // [kv_heads][n][group][dim] by 1 / sqrt(head_dim), padded
  int8_t* q8;              // the same, rounded as Kernels::quantize_queries has it,
  float* q_scale;          // [kv_heads][n][group]
  // [kv_heads][n][group][sketch_dim] in the sketch's coordinates, likewise; null: nothing is chosen
  // by a sketch
  int8_t* projected;
  float* projected_scale;
  // [kv_heads][blocks][asking_rows][quads of `extents`] then, in the first row of a block, the sums
  // of their shares
  float* scores;
  // [kv_heads][blocks][asking_rows][max_score_parts][2] of parts of them a number that is not below
  // any, and the sum of exponentials relative to it
  float* score_sums;
  // [kv_heads][blocks][share_bins] how many shares are of a size,
  uint32_t* share_counts;
  unsigned long long* share_sums;  // and their sums, in units of 1 / share_unit
  // [kv_heads][blocks] of shares, as select/sampling.h has them, where one block of threads finds a
  // list's for all
  float* thresholds;
  // [kv_heads][blocks][parts of choose_quads] 1 + how many of them are taken; 0: not known yet
  uint32_t* part_counts;
  // [kv_heads][blocks][most] quads, ascending; null: neighbouring ones, of which list_counts has
  // the first
  uint32_t* lists;
  // [kv_heads][blocks][most] as PageRef::bias; 0: the quad stands for itself; null: all do
  float* biases;
  // [kv_heads][blocks][most] the tokens of a quad that are attended, a bit each; null: all four
  const uint8_t* present;
  // [kv_heads][blocks][2] quads in the list, and those of DeviceHotQuads
  uint32_t* list_counts;
  // [kv_heads][n][attention_parts][group][dim + state_sums] o, m, l, and what of l stands for
  // itself
  float* states;
  // [kv_heads][blocks][most][quad_bytes_of(dim)] the lists' quads, as DeviceHotQuads has them, but
  // for those that it has; null: each is read where its page lies
  uint8_t* gathered;
  DeviceHotQuads hot;  // of steps of one token; room 0 in others
  // of the states that finish_attention() merges: near_parts where no pages are attended, or
  // attention_parts,
  uint32_t parts;
  // [kv_heads][n][group][dim + state_sums] and what the CPU has attended, as a state; null: nothing
  const float* beside;
  // [2][kv_heads][n][group] where attend_sinks_and_window() also writes its m, and its l; null:
  // nowhere
  float* near_sums;
};

// Quads of some neighbouring layers that are put to their places of DeviceHotQuads together: the
// same ones in all of them and in all KV heads.
struct DeviceGroup {
  uint32_t layers, most;           // most: quads
  const uint32_t* count;           // of the quads
  const uint32_t *quads, *places;  // [count]; places from 0 on
  uint32_t room;                   // as DeviceHotQuads has it,
  // and so are its quads, of all the layers: [layers][kv_heads][room][quad_bytes_of(dim)]
  uint8_t* to;
};

// A quad of keys and values with its scales.
constexpr std::size_t quad_bytes_of(uint32_t dim) { return std::size_t{8} * dim + 16; }

// Sixteen sizes of shares from one power of two to the next, from 2^-43 on: what is less counts as
// nothing.
constexpr uint32_t max_score_parts = 128, share_bins = 768, choose_quads = 2048;
constexpr float share_unit = 0x1p56f;

// Parts of a token's attention in a KV head, which blocks of threads compute side by side and
// finish_attention() merges: sinks and window, and chosen pages.
constexpr uint32_t near_parts = 1, chosen_parts = 20, attention_parts = near_parts + chosen_parts;
constexpr uint32_t state_sums = 3;           // of a state, behind o
constexpr uint32_t max_attended_group = 16;  // query heads a KV head
constexpr uint32_t max_asking_tokens = 64;   // of a step

// Rows of a block's askers, of any group and step.
constexpr uint32_t max_asking_rows = [] {
  uint32_t most = 0;
  for (uint32_t group = 1; group <= max_attended_group; ++group)
    for (uint32_t n = 1; n <= max_asking_tokens; ++n)
      if (const uint32_t rows = max_selecting(n, question_blocks(n, group)) * group; rows > most)
        most = rows;
  return most;
}();
// of heads, padded: models of other sizes are few, and the code of each is large
constexpr uint32_t attended_dims[] = {64, 128};

// A step of a text that is read, in one layer: n tokens that attend all tokens before them and
// their own. Pages may lie in the device's memory or where it reads the CPU's.
struct DeviceReading {
  uint32_t kv_heads, group, head_dim, dim, page_tokens;
  // tokens of the step; sealed pages and rows of the window before it
  uint32_t n, pages, window;
  const uint64_t *pages_at, *scales_at;  // as DeviceKv has them, and so are
  std::size_t pages_offset, scales_offset;
  // these; centre null: nothing is taken off the step's keys
  const float *sinks, *centre;
  const float* window_rows;  // [kv_heads][2][window_room][dim]
  uint32_t window_room;
  // rows of the arrays behind: all tokens in whole tiles of reading_keys, n * group in whole blocks
  // of reading_rows
  uint32_t room, q_room;
  uint16_t *keys, *values;  // half precision [kv_heads][room][dim]
  uint16_t* q;              // half precision [kv_heads][q_room][dim]
  float* q_scale;           // [kv_heads][q_room]
  float* largest;           // [kv_heads][2] magnitude of keys, of values
};
constexpr uint32_t reading_rows = 128, reading_keys = 64;

}  // namespace kvasir
