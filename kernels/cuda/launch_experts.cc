// The operations on experts: which kernel runs, on how many blocks.
#include "launch_experts.h"

#include "backend/device_operations.h"
#include "launch.h"

namespace kvasir::cuda {

constexpr unsigned max_grid_rows = 65535;

int route(DeviceStream* s, const DeviceRouting& routing, const float* logits,
          const DeviceCheck& check, const DeviceExpertRows& rows) {
  constexpr unsigned numbers = 3;  // of an expert
  const unsigned shared = route_warps * numbers * routing.experts * sizeof(float);
  return launch(s, "experts_route", Grid{blocks_for(rows.n, route_warps), 1, 1, shared},
                route_warps * 32, routing, rows.n, logits, check, rows.chosen);
}

int group_choices(DeviceStream* s, const DeviceExpertRows& rows) {
  const int error = launch(s, "experts_tiles", Grid{1}, tiles_threads, rows);
  return error ? error : launch(s, "experts_place", Grid{rows.experts}, expert_threads, rows);
}

int gather_inputs(DeviceStream* s, const DeviceExpertRows& rows, const DeviceActivations& x,
                  bool weighs, const DeviceActivations& out) {
  return launch(s, "experts_gather", Grid{static_cast<unsigned>(rows.choices())}, expert_threads,
                rows, x, uint32_t{weighs}, out);
}

namespace {

// Rows of a block that multiplies with a tile of an expert's rows, and steps of its ring.
struct FewShape {
  unsigned rows, inputs, steps, shared;
  FewShape(const DeviceContext& c, std::span<const DeviceExpertProduct> products,
           const DeviceExpertRows& of) {
    const TensorType type = products[0].w.type;
    const unsigned tiles = static_cast<unsigned>(std::min<std::size_t>(of.max_tiles(), 1 << 16));
    const auto blocks = [&](unsigned each) {
      unsigned sum = 0;
      for (const DeviceExpertProduct& p : products) sum += blocks_for(p.w.rows / of.experts, each);
      return sum * tiles;
    };
    rows = few_rows(c, blocks);
    inputs = blocks_for(std::min(of.n, DeviceExpertTile::max_rows), 8) * 8;
    const unsigned step = few_step_bytes(type, rows, inputs), sums = few_sum_bytes(rows, inputs);
    steps = ring_steps(c, step, sums, blocks(rows));
    shared = sums + steps * step;
  }
};

}  // namespace

int multiply_experts(DeviceStream* s, std::span<const DeviceExpertProduct> products,
                     const DeviceExpertRows& of, const DeviceActivations& x) {
  const TensorType type = products[0].w.type;
  const bool quantised = is_quantised(type), one = of.in_order(), few = quantised && !one;
  const FewShape shape(*s->context, products, of);
  const unsigned one_rows = quantised ? row_warps * 32 / chosen_lanes(x.cols / 32) : row_warps,
                 rows = one   ? one_rows
                        : few ? shape.rows
                              : tile_rows;
  ExpertProducts given{};
  unsigned blocks = 0;
  for (Product& p : given.products.list) p.begin = UINT32_MAX;
  for (std::size_t i = 0; i < products.size(); ++i) {
    const auto& [w, biases, scales, y, shared] = products[i];
    const auto planes = [&](const DeviceMatrix& m) {
      return quantised ? planes_of(m)
                       : Planes{reinterpret_cast<uint8_t*>(const_cast<std::byte*>(m.data)), nullptr,
                                nullptr, nullptr};
    };
    const uint32_t its_rows = w.rows / of.experts;
    given.products.list[i] = {planes(w), its_rows, blocks, biases, y, w.scale};
    given.scales[i] = scales;
    given.shared[i] = planes(shared), given.shared_scales[i] = shared.scale;
    blocks += blocks_for(its_rows, rows);
  }
  if (one) {
    const Name name("experts_row_", type);
    const auto choices = static_cast<uint32_t>(of.choices());
    const bool shares = products[0].shared.data != nullptr, has_rows = x.n > choices;
    const Grid grid{blocks, choices + (shares ? of.n : 0)};
    const uint32_t of_input = has_rows ? 1 : choices / std::max(x.n, 1u);
    given.choices = choices, given.shared_input = has_rows ? choices : 0;
    if (!quantised)
      return launch(s, name.text, grid, row_warps * 32, given, of.chosen, of_input, x.cols, x.f32);
    return launch(s, name.text, grid, row_warps * 32, given, of.chosen, of_input, x.cols / 32, x.q,
                  x.scale, x.sums);
  }
  const Name name(few ? "experts_few_" : "experts_tile_", type);
  for (std::size_t first = 0; first < of.max_tiles(); first += max_grid_rows) {
    const auto count =
        static_cast<unsigned>(std::min<std::size_t>(of.max_tiles() - first, max_grid_rows));
    const DeviceExpertTile* tiles = of.tiles + first;
    const int error =
        few ? launch(s, name.text, Grid{blocks, count, 1, shape.shared}, few_threads, given, tiles,
                     x.cols / 32, x.q, x.scale, x.sums, shape.rows, shape.steps)
            : launch(s, name.text, Grid{blocks, count}, tile_threads, given, tiles, x.cols, x.f32);
    if (error) return error;
  }
  return 0;
}

int sum_experts(DeviceStream* s, const DeviceExpertRows& rows, const DeviceExpertSum& sum,
                const DeviceActivations& out) {
  return launch(s, "experts_sum", Grid{rows.n, blocks_for(out.cols, expert_threads)},
                expert_threads, rows, sum, out.f32, out.cols);
}

}  // namespace kvasir::cuda
