#include "engine/cpu_products.h"

#include <algorithm>

#include "base/checked.h"
#include "engine/cpu_tasks.h"

namespace kvasir {

// a block of inputs; more than eight, as matmul then rounds the same whatever the block
constexpr uint32_t task_inputs = 512;

void CpuProducts::consider(const WeightView& w) {
  if (!w.data) return;
  const std::size_t size = kernels_.matmul_scratch(w.type, w.cols);
  scratch_size_ = std::max(scratch_size_, round_up(size, 64));
}

void CpuProducts::resize(uint32_t n, std::size_t widest) {
  quants_ = {}, scales_ = {}, sums_ = {}, lanes_ = {};  // never old and new together
  quants_ = make_buffer<int8_t>(n * widest);
  scales_ = make_buffer<float>(n * ceil_div(widest, 32));
  sums_ = make_buffer<int16_t>(n * ceil_div(widest, 16));
  lanes_ = make_buffer<std::byte>(
      kernels_.lane_bytes(std::min(n, max_lane_inputs), static_cast<uint32_t>(widest)));
}

// Fills the quants of x. Returns their second order, or null where products do not use it.
const std::byte* CpuProducts::quantize(Activations x) {
  const bool few =
      (x.method == ProductMethod::by_count ? method_of(x.n) : x.method) == ProductMethod::few;
  std::byte* const lanes = few && kernels_.lane_bytes(x.n, x.cols) > 0 ? lanes_.get() : nullptr;
  for_blocks(pool_, *cancel_, 0, x.n, [&](std::size_t first, uint32_t count, uint32_t) {
    const std::size_t at = first * x.cols;
    kernels_.quantize(x.f32 + at, count, x.cols, quants_.get() + at, scales_.get() + at / 32,
                      sums_.get() + at / 16);
    if (lanes) kernels_.to_lanes(x, static_cast<uint32_t>(first), count, lanes);
  });
  return lanes;
}

void CpuProducts::multiply(const float* x, uint32_t n, uint32_t cols,
                           std::initializer_list<Product> products) {
  const auto is_float = [](const Product& p) {
    return tensor_type_info(p.linear->w.type)->block_elements == 1;
  };
  Activations input{n, cols, x, quants_.get(), scales_.get(), sums_.get(), method_};
  if (!std::all_of(products.begin(), products.end(), is_float)) input.lanes = quantize(input);

  uint64_t rows = 0;
  for (const Product& p : products) rows += p.linear->w.rows;
  const uint32_t blocks = std::max(1u, n / task_inputs);  // the last one takes what is left
  const uint64_t most = task_products / (uint64_t{std::min(n, task_inputs)} * cols);
  const uint64_t even = ceil_div(rows, uint64_t{pool_->threads()} * tasks_per_thread);
  const auto per_task =
      static_cast<uint32_t>(round_up(std::clamp<uint64_t>(most, 1, even), kernels_.matmul_rows));
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
                    scratch_.data() + worker * scratch_size_);
    if (p->linear->bias.empty()) return;
    for (uint32_t i = 0; i < count; ++i, y += w.rows)
      for (uint32_t r = begin; r < end; ++r) y[r] += p->linear->bias[r];
  });
}

}  // namespace kvasir
