#include "launch_wide.h"

#include <algorithm>

#include "launch.h"
#include "matmul_wide.h"

namespace kvasir::cuda {
namespace {

constexpr uint32_t least_inputs = 512;
// Halves of weights at a time: at least so many bytes, and rows.
constexpr std::size_t slice_bytes = std::size_t{128} << 20;
constexpr std::size_t slice_rows = 4096;

bool has_wide(const DeviceContext& c) { return c.kernels.contains("multiply_wide"); }

uint32_t steps_of(uint32_t cols) { return blocks_for(cols, wide_columns); }
std::size_t tile_bytes(uint32_t rows) { return std::size_t{rows} * wide_columns * 2; }

// Tiles of rows of a slice of weights.
uint32_t slice_tiles(uint32_t cols) {
  const std::size_t tile = steps_of(cols) * tile_bytes(wide_rows);
  return static_cast<uint32_t>(std::max(slice_bytes / tile, slice_rows / wide_rows));
}

std::size_t weights_bytes(uint32_t cols) {
  return slice_tiles(cols) * steps_of(cols) * tile_bytes(wide_rows);
}
std::size_t inputs_bytes(uint32_t n, uint32_t cols) {
  return blocks_for(n, wide_inputs) * steps_of(cols) * tile_bytes(wide_inputs);
}

uint32_t row_tiles_of(std::span<const DeviceProduct> products) {
  uint32_t sum = 0;
  for (const DeviceProduct& p : products) sum += blocks_for(p.w.rows, wide_rows);
  return sum;
}

}  // namespace

std::size_t halves_bytes(DeviceContext* c, uint32_t n, uint32_t cols) {
  if (n < least_inputs || !has_wide(*c)) return 0;
  // fewer columns may take more for weights: their slices have whole tiles
  return weights_bytes(cols) + slice_bytes / 8 + inputs_bytes(n, cols) + n * sizeof(float);
}

std::size_t kept_bytes(DeviceContext* c, const DeviceMatrix& w) {
  if (!has_wide(*c) || !is_quantised(w.type)) return 0;
  return blocks_for(w.rows, wide_rows) * steps_of(w.cols) * tile_bytes(wide_rows);
}

// Of all products, or null where some are not kept.
static std::byte* kept_of(std::span<const DeviceProduct> products) {
  std::byte* const first = products[0].halves ? products[0].halves->memory : nullptr;
  std::byte* at = first;
  for (const DeviceProduct& p : products) {
    if (!p.halves || p.halves->memory != at) return nullptr;
    at += p.halves->bytes;
  }
  return first;
}

bool is_wide(const DeviceContext& c, std::span<const DeviceProduct> products,
             const DeviceActivations& x) {
  return x.halves && x.n >= least_inputs &&
         4 * row_tiles_of(products) * blocks_for(x.n, wide_inputs) >= 3 * c.multiprocessors;
}

// Of products in pairs; null: none.
static const char* kernel_of(Activation f) {
  switch (f) {
#define KVASIR_KERNEL(name) \
  case Activation::name:    \
    return "multiply_wide_" #name;
    KVASIR_WIDE_ACTIVATIONS(KVASIR_KERNEL)
#undef KVASIR_KERNEL
    default:
      return nullptr;
  }
}

bool is_wide_gated(const DeviceContext& c, std::span<const DeviceProduct> products,
                   const DeviceActivations& x, Activation f, const DeviceActivations& out) {
  if (products.size() != 2 || products[0].bias || products[1].bias || out.f32) return false;
  const TensorType type = products[0].w.type;
  return type == products[1].w.type && is_quantised(type) && kernel_of(f) &&
         is_wide(c, products, x);
}

// multiply(slice, grid): launches a product of a slice of the weights.
template <class Multiply>
static int multiply_slices(DeviceStream* s, std::span<const DeviceProduct> given,
                           const DeviceActivations& x, const Products& products,
                           Multiply&& multiply) {
  const TensorType type = given[0].w.type;
  const uint32_t units = x.cols / 32, steps = steps_of(x.cols),
                 all = products.in_pairs ? blocks_for(given[0].w.rows, pair_rows)
                                         : row_tiles_of(given);
  auto* const kept = reinterpret_cast<uint8_t*>(kept_of(given));
  const auto is_made = [&](const DeviceProduct& p) {
    return p.halves->is_made && p.halves->in_pairs == products.in_pairs;
  };
  const bool makes = !kept || !std::all_of(given.begin(), given.end(), is_made);
  const uint32_t most = kept ? all : slice_tiles(x.cols);
  auto* const weights = kept ? kept : reinterpret_cast<uint8_t*>(x.halves);
  uint8_t* const inputs = reinterpret_cast<uint8_t*>(x.halves) + weights_bytes(x.cols);
  auto* const scales = reinterpret_cast<float*>(inputs + inputs_bytes(x.n, x.cols));
  int error = launch(s, "halves_of_inputs", Grid{x.n}, wide_halves_threads, units, x.q, x.scale,
                     inputs, scales, weight_factor(type));
  for (uint32_t first = 0; first < all && !error; first += most) {
    const uint32_t count = std::min(most, all - first);
    if (makes)
      error =
          launch(s, Name("halves_", type).text,
                 Grid{count, blocks_for(std::size_t{wide_rows} * 2 * steps, wide_halves_threads)},
                 wide_halves_threads, products, units, first, weights);
    if (error) break;
    const WideSlice slice{first, count, steps, x.n, weights, inputs, scales};
    const uint32_t blocks =
        std::min(count * blocks_for(x.n, wide_inputs), s->context->multiprocessors);
    error = multiply(slice, Grid{blocks, 1, 1, wide_shared_bytes});
  }
  if (kept && !error)
    for (const DeviceProduct& p : given)
      p.halves->is_made = true, p.halves->in_pairs = products.in_pairs;
  return error;
}

static Products products_of(std::span<const DeviceProduct> given) {
  Products products{};
  for (Product& p : products.list) p.begin = UINT32_MAX;
  uint32_t tiles = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto& [w, bias, y, halves] = given[i];
    products.list[i] = {planes_of(w), w.rows, tiles, bias, y, w.scale};
    tiles += blocks_for(w.rows, wide_rows);
  }
  return products;
}

int multiply_wide(DeviceStream* s, std::span<const DeviceProduct> given, const DeviceActivations& x,
                  bool add) {
  Products products = products_of(given);
  products.add = add;
  return multiply_slices(s, given, x, products, [&](const WideSlice& slice, const Grid& grid) {
    return launch(s, "multiply_wide", grid, wide_threads, products, slice);
  });
}

int multiply_wide_gated(DeviceStream* s, std::span<const DeviceProduct> given,
                        const DeviceActivations& x, Activation f, const DeviceCheck& check,
                        const DeviceActivations& out) {
  Products products = products_of(given);
  products.in_pairs = true;
  return multiply_slices(s, given, x, products, [&](const WideSlice& slice, const Grid& grid) {
    return launch(s, kernel_of(f), grid, wide_threads, products, slice, WideGated{check, out});
  });
}

}  // namespace kvasir::cuda
