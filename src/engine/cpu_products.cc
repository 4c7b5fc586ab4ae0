#include "engine/cpu_products.h"

#include <algorithm>

#include "base/checked.h"
#include "engine/cpu_tasks.h"
#include "os/os.h"

namespace kvasir {

// A block of inputs: more than eight, as matmul then rounds the same whatever the block.
constexpr uint32_t task_inputs = tile_inputs;

void CpuProducts::consider(const WeightView& w) {
  if (!w.data) return;
  const std::size_t size = kernels_.matmul_scratch(w.type, ProductMethod::tiles);
  scratch_size_ = std::max(scratch_size_, round_up(size, 64));
}

void CpuProducts::resize(uint32_t n, std::size_t widest) {
  quants_ = {}, scales_ = {}, sums_ = {}, lanes_ = {}, tiles_ = {};  // never old and new together
  quants_ = make_buffer<int8_t>(n * widest);
  scales_ = make_buffer<float>(n * ceil_div(widest, 32));
  sums_ = make_buffer<int16_t>(n * ceil_div(widest, 16));
  lanes_ = make_buffer<std::byte>(
      kernels_.lane_bytes(std::min(n, max_lane_inputs), static_cast<uint32_t>(widest)));
  const std::size_t tile_bytes = kernels_.tile_bytes(n, static_cast<uint32_t>(widest));
  tiles_ = make_buffer<std::byte>(tile_bytes);
  os::prefer_huge_pages(tiles_.get(), tile_bytes);
}

// Makes the tiles of x. Without tiles, makes its quants, and its lanes for few inputs.
void CpuProducts::prepare(Activations* x) {
  const bool few = method_of(*x) == ProductMethod::few,
             tiles = !few && kernels_.tile_bytes(x->n, x->cols) > 0,
             lanes = few && kernels_.lane_bytes(x->n, x->cols) > 0;
  if (tiles) x->method = ProductMethod::tiles, x->tiles = tiles_.get();
  if (lanes) x->lanes = lanes_.get();
  const Activations from = *x;
  for_blocks(pool_, *cancel_, 0, x->n, [&](std::size_t first, uint32_t count, uint32_t) {
    const auto row = static_cast<uint32_t>(first);
    if (tiles) return kernels_.to_tiles(from, row, count, tiles_.get());
    const std::size_t at = first * from.cols;
    kernels_.quantize(from.f32 + at, count, from.cols, quants_.get() + at, scales_.get() + at / 32,
                      sums_.get() + at / 16);
    if (lanes) kernels_.to_lanes(from, row, count, lanes_.get());
  });
}

// A pass of tiles reads all inputs from the second-level cache. So its tasks are as large as an
// even load of the threads allows.
uint32_t CpuProducts::rows_of_task(std::initializer_list<Product> products, const Activations& x,
                                   uint32_t blocks) const {
  uint64_t rows = 0;
  for (const Product& p : products) rows += p.linear->w.rows;
  const uint64_t max_rows = task_products / (uint64_t{std::min(x.n, task_inputs)} * x.cols),
                 even_rows = ceil_div(rows, uint64_t{pool_->threads()} * tasks_per_thread);
  const auto small = static_cast<uint32_t>(
      round_up(std::clamp<uint64_t>(max_rows, 1, even_rows), kernels_.matmul_rows));
  if (!x.tiles) return small;
  constexpr uint32_t input_cost = 64;  // what reading the inputs costs, in rows
  uint64_t lowest_cost = UINT64_MAX;
  uint32_t best = small;
  for (uint32_t per_task = tile_pass_rows; per_task >= small; per_task -= kernels_.matmul_rows) {
    uint64_t tasks = 0;
    for (const Product& p : products) tasks += ceil_div(p.linear->w.rows, per_task) * blocks;
    const uint64_t cost = ceil_div(tasks, pool_->threads()) * (per_task + input_cost);
    if (cost < lowest_cost) lowest_cost = cost, best = per_task;
  }
  return best;
}

void CpuProducts::multiply(const float* x, uint32_t n, uint32_t cols,
                           std::initializer_list<Product> products) {
  const auto is_float = [](const Product& p) {
    return tensor_type_info(p.linear->w.type)->block_elements == 1;
  };
  Activations input{n, cols, x, quants_.get(), scales_.get(), sums_.get(), method_};
  if (!std::all_of(products.begin(), products.end(), is_float)) prepare(&input);

  const uint32_t blocks = std::max(1u, n / task_inputs);  // the last one takes what is left
  const uint32_t per_task = rows_of_task(products, input, blocks);
  uint32_t tasks = 0;
  for (const Product& p : products)
    tasks += static_cast<uint32_t>(ceil_div(p.linear->w.rows, per_task));

  pool_->run(tasks * blocks, [&](uint32_t task, uint32_t worker) {
    if (cancel_->fired()) return;
    const uint32_t block = task % blocks, first = block * task_inputs,
                   count = block + 1 == blocks ? n - first : task_inputs;
    task /= blocks;
    const Product* p = products.begin();
    for (uint32_t own; task >= (own = static_cast<uint32_t>(ceil_div(p->linear->w.rows, per_task)));
         ++p)
      task -= own;
    const WeightView& w = p->linear->w;
    const uint32_t begin = task * per_task, end = std::min(w.rows, begin + per_task);
    float* y = p->y + std::size_t{first} * w.rows;
    kernels_.matmul(w, rows_of(input, first, count), y, w.rows, begin, end,
                    scratch_.get() + worker * scratch_size_);
    if (p->linear->bias.empty()) return;
    for (uint32_t i = 0; i < count; ++i, y += w.rows)
      for (uint32_t r = begin; r < end; ++r) y[r] += p->linear->bias[r];
  });
}

}  // namespace kvasir
