#include "engine/execution_plan.h"

#include <algorithm>

namespace kvasir {

std::vector<Segment> segments_of(const SegmentFacts& f) {
  const Place host_pages = f.mapped ? Place::mapped_file : Place::host;
  const bool gpu_attends = f.attention != AttentionMode::cpu;
  const Place near = gpu_attends ? Place::gpu_copy : Place::host;
  const int near_executor = gpu_attends ? f.executor : on_cpu;
  std::vector<Segment> out;
  if (f.has_pages) out.push_back({SegmentKind::sinks, near, near_executor});
  out.push_back({SegmentKind::window, near, near_executor});
  out.push_back({SegmentKind::step, near, near_executor});
  if (!f.has_pages) return out;
  const SegmentKind pages = f.chosen ? SegmentKind::chosen_pages : SegmentKind::all_pages;
  switch (f.attention) {
    case AttentionMode::cpu:
      out.push_back({pages, host_pages, on_cpu});
      break;
    case AttentionMode::gpu_prefill:
      out.push_back({pages, Place::gpu_copy, f.executor});
      break;
    case AttentionMode::gpu_selective:
      out.push_back({pages,
                     f.staged   ? Place::staging
                     : f.chosen ? Place::pinned_host
                                : Place::gpu_copy,
                     f.executor});
      break;
    case AttentionMode::co_execution:
      if (f.gpu_sixteenths > 0)
        out.push_back({pages, Place::pinned_host, f.executor, f.gpu_sixteenths});
      if (f.gpu_sixteenths < 16) out.push_back({pages, host_pages, on_cpu, 16 - f.gpu_sixteenths});
      break;
  }
  return out;
}

static const char* name_of(SegmentKind kind) {
  switch (kind) {
    case SegmentKind::sinks:
      return "sinks";
    case SegmentKind::window:
      return "window";
    case SegmentKind::step:
      return "step";
    case SegmentKind::all_pages:
      return "all pages";
    case SegmentKind::chosen_pages:
      return "chosen pages";
  }
  return "";
}

static const char* name_of(Place place) {
  switch (place) {
    case Place::host:
      return "host memory";
    case Place::mapped_file:
      return "mapped file";
    case Place::pinned_host:
      return "pinned host memory";
    case Place::gpu_copy:
      return "GPU copy";
    case Place::staging:
      return "staging buffer";
  }
  return "";
}

bool ExecutionPlan::prefills_on_gpus() const {
  const auto attends = [](const LayerRun& run) {
    return run.first_layer < run.end_layer && !run.segments.empty();
  };
  return std::any_of(runs.begin(), runs.end(), attends) &&
         std::all_of(runs.begin(), runs.end(), [&](const LayerRun& run) {
           return !attends(run) || run.attention == AttentionMode::gpu_prefill;
         });
}

std::string ExecutionPlan::text(const std::vector<std::string>& names) const {
  const auto executor = [&](int number) {
    return number == on_cpu ? std::string("cpu") : names[static_cast<std::size_t>(number)];
  };
  std::string out;
  for (const LayerRun& run : runs) {
    if (run.first_layer == run.end_layer) continue;
    out += (out.empty() ? "layers " : "\nlayers ") + std::to_string(run.first_layer) + "-" +
           std::to_string(run.end_layer - 1) + " " + executor(run.executor) + ":";
    for (const Segment& s : run.segments) {
      out += (&s == &run.segments.front() ? " " : ", ") + std::string(name_of(s.kind));
      if (s.sixteenths < 16) out += " " + std::to_string(s.sixteenths) + "/16";
      out += " " + executor(s.executor) + " (" + name_of(s.place) + ")";
    }
    if (run.by_layers) out += ", layer by layer";
    if (run.streamed_layers > 0)
      out += ", weights of " + std::to_string(run.streamed_layers) + " layers streamed";
    if (run.has_windows) out += ", sliding windows " + executor(run.windows_executor);
    if (!run.has_experts) continue;
    if (run.experts_end > run.first_layer) out += ", experts " + executor(run.executor);
    if (run.experts_end > run.first_layer && run.experts_end < run.end_layer)
      out += " up to layer " + std::to_string(run.experts_end - 1);
    if (run.experts_end < run.end_layer) out += ", experts cpu";
    if (run.experts_end > run.first_layer && run.experts_end < run.end_layer)
      out += " from layer " + std::to_string(run.experts_end);
  }
  return out;
}

}  // namespace kvasir
