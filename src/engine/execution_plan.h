// What a step does where. The plan is data: it is made once a step, before the step's work, and
// executors carry it out. Nothing else branches on devices.
//
// Attention of a layer is a set of segments. Each segment has a place where its keys and values
// are and an executor that turns it into a partial (o, m, l); the partials are merged.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "offload/fallback.h"

namespace kvasir {

// Which tokens a segment covers.
enum class SegmentKind : uint8_t {
  sinks,         // the first tokens, in full precision
  window,        // the newest tokens before the step, in full precision
  step,          // the step's own tokens
  all_pages,     // every sealed page behind the sinks
  chosen_pages,  // those that the strategy chose
};

// Where its keys and values are read from.
enum class Place : uint8_t { host, mapped_file, pinned_host, gpu_copy, staging };

// How a run of layers attends.
enum class AttentionMode : uint8_t {
  cpu,            // the CPU attends every segment
  gpu_selective,  // the GPU chooses by its sketch and attends every segment
  // the GPU attends sinks, window and a share of the pages; the CPU attends the rest
  co_execution,
  gpu_prefill,  // the GPU attends everything, over its copy of the pages
};

constexpr int on_cpu = -1;  // an executor: this, or a GPU's number in Model::device_weights()

struct Segment {
  SegmentKind kind;
  Place place;
  int executor;
  uint32_t sixteenths = 16;  // of the pages, where two executors share them
  bool operator==(const Segment&) const = default;
};

// Consecutive layers that one executor computes and that attend in one way.
struct LayerRun {
  uint32_t first_layer = 0, end_layer = 0;
  int executor = on_cpu;
  AttentionMode attention = AttentionMode::cpu;
  Fallback fallback = Fallback::none;  // why the GPU does not attend all of it
  Fallback staging = Fallback::none;   // why the GPU that attends does not read pages itself
  std::string share;                   // co-execution: how the pages are shared, for people
  // Of a GPU whose layers have experts: the routed ones of its layers before experts_end are there,
  // the CPU computes the others.
  bool has_experts = false;
  uint32_t experts_end = 0;
  // Layers whose queries see a window; windows_executor attends them.
  bool has_windows = false;
  int windows_executor = on_cpu;
  // Of a span: the layers whose weights, or experts, come to the GPU when their turn comes.
  bool by_layers = false;
  uint32_t streamed_layers = 0;
  std::vector<Segment> segments;
};

// What the segments of a run follow from.
struct SegmentFacts {
  AttentionMode attention = AttentionMode::cpu;
  int executor = on_cpu;
  bool chosen = false;          // a strategy chooses pages
  bool has_pages = false;       // there are sealed pages
  bool mapped = false;          // pages are in a mapped file
  bool staged = false;          // the GPU does not read pages from pinned host memory
  uint32_t gpu_sixteenths = 0;  // co-execution: the GPU's share of the pages
};
std::vector<Segment> segments_of(const SegmentFacts& facts);

struct ExecutionPlan {
  std::vector<LayerRun> runs;  // in the order of the layers
  // Whether GPUs attend, in a prefill, all layers whose queries see every token.
  bool prefills_on_gpus() const;
  // One line a run: "layers 0-15 cuda:0: sinks cuda:0 (GPU copy), ...". names: of the GPUs.
  std::string text(const std::vector<std::string>& names) const;
};

}  // namespace kvasir
