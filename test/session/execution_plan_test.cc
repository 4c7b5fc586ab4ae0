// The execution plan as data: the place of each segment of a step and the executor that attends
// it.
#include "engine/execution_plan.h"

#include <doctest/doctest.h>

using namespace kvasir;

namespace {

constexpr int gpu = 0;

SegmentFacts facts_of(AttentionMode mode) {
  SegmentFacts facts;
  facts.attention = mode;
  facts.executor = mode == AttentionMode::cpu ? on_cpu : gpu;
  facts.chosen = facts.has_pages = true;
  return facts;
}

}  // namespace

TEST_CASE(
    "a segment is attended by another executor, or read from another place, than the mode says") {
  SegmentFacts facts = facts_of(AttentionMode::cpu);
  facts.mapped = true;
  CHECK(segments_of(facts) ==
        std::vector<Segment>{{SegmentKind::sinks, Place::host, on_cpu},
                             {SegmentKind::window, Place::host, on_cpu},
                             {SegmentKind::step, Place::host, on_cpu},
                             {SegmentKind::chosen_pages, Place::mapped_file, on_cpu}});
  facts = facts_of(AttentionMode::gpu_selective);
  CHECK(segments_of(facts).back() == Segment{SegmentKind::chosen_pages, Place::pinned_host, gpu});
  facts.staged = true;
  CHECK(segments_of(facts).back() == Segment{SegmentKind::chosen_pages, Place::staging, gpu});
  facts.staged = facts.chosen = false;
  CHECK(segments_of(facts).back() == Segment{SegmentKind::all_pages, Place::gpu_copy, gpu});
  facts = facts_of(AttentionMode::gpu_prefill);
  facts.chosen = false;
  CHECK(segments_of(facts).back() == Segment{SegmentKind::all_pages, Place::gpu_copy, gpu});
  facts.has_pages = false;
  CHECK(segments_of(facts) == std::vector<Segment>{{SegmentKind::window, Place::gpu_copy, gpu},
                                                   {SegmentKind::step, Place::gpu_copy, gpu}});
}

TEST_CASE("what two executors share is more or less than all pages") {
  for (uint32_t sixteenths : {0u, 5u, 16u}) {
    CAPTURE(sixteenths);
    SegmentFacts facts = facts_of(AttentionMode::co_execution);
    facts.gpu_sixteenths = sixteenths;
    uint32_t sum = 0;
    for (const Segment& s : segments_of(facts))
      if (s.kind == SegmentKind::chosen_pages) {
        sum += s.sixteenths;
        CHECK(s.place == (s.executor == gpu ? Place::pinned_host : Place::host));
      }
    CHECK(sum == 16);
  }
}

TEST_CASE("a plan in words misses a run of layers, a share or a place") {
  LayerRun first, rest;
  SegmentFacts facts = facts_of(AttentionMode::co_execution);
  facts.gpu_sixteenths = 5;
  first.end_layer = 3, first.executor = gpu, first.segments = segments_of(facts);
  rest.first_layer = 3, rest.end_layer = 4;
  rest.segments = segments_of(facts_of(AttentionMode::cpu));
  CHECK(ExecutionPlan{{first, rest}}.text({"cuda:0"}) ==
        "layers 0-2 cuda:0: sinks cuda:0 (GPU copy), window cuda:0 (GPU copy), "
        "step cuda:0 (GPU copy), chosen pages 5/16 cuda:0 (pinned host memory), "
        "chosen pages 11/16 cpu (host memory)\n"
        "layers 3-3 cpu: sinks cpu (host memory), window cpu (host memory), "
        "step cpu (host memory), chosen pages cpu (host memory)");
}

TEST_CASE("a plan in words does not say which layers' experts are on a GPU and which on the CPU") {
  const auto text = [](bool has_experts, uint32_t experts_end) {
    LayerRun run;
    run.first_layer = 2, run.end_layer = 6, run.executor = gpu;
    run.has_experts = has_experts, run.experts_end = experts_end;
    return ExecutionPlan{{run}}.text({"cuda:0"});
  };
  CHECK(text(false, 6) == "layers 2-5 cuda:0:");
  CHECK(text(true, 6) == "layers 2-5 cuda:0:, experts cuda:0");
  CHECK(text(true, 2) == "layers 2-5 cuda:0:, experts cpu");
  CHECK(text(true, 4) ==
        "layers 2-5 cuda:0:, experts cuda:0 up to layer 3, experts cpu from layer 4");
}

TEST_CASE("GPUs do not attend a prefill where a layer is the CPU's; an empty run counts not") {
  const auto run_of = [](AttentionMode mode, uint32_t first, uint32_t end) {
    return LayerRun{.first_layer = first,
                    .end_layer = end,
                    .attention = mode,
                    .segments = segments_of(facts_of(mode))};
  };
  const LayerRun on_gpu = run_of(AttentionMode::gpu_prefill, 0, 4);
  const LayerRun recurrent{.first_layer = 4, .end_layer = 5};  // attends nothing
  CHECK_FALSE(ExecutionPlan{}.prefills_on_gpus());
  CHECK_FALSE(ExecutionPlan{{recurrent}}.prefills_on_gpus());
  CHECK(ExecutionPlan{{on_gpu, recurrent, run_of(AttentionMode::cpu, 5, 5)}}.prefills_on_gpus());
  CHECK_FALSE(ExecutionPlan{{on_gpu, run_of(AttentionMode::cpu, 4, 5)}}.prefills_on_gpus());
  CHECK_FALSE(ExecutionPlan{{run_of(AttentionMode::gpu_selective, 0, 4)}}.prefills_on_gpus());
}
