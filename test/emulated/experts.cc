// The operations on experts.
#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "alignment.h"
#include "backend/device_operations.h"
#include "backend/kernels.h"
#include "emulated.h"
#include "engine/expert_routing.h"
#include "state.h"
#include "work.h"

namespace kvasir::emulated {
namespace {

int route(DeviceStream* s, const DeviceRouting& r, const float* logits, const DeviceCheck& check,
          const DeviceExpertRows& rows) {
  return enqueue(s, [=] {
    ExpertConfig c;
    c.count = r.experts, c.used = r.used, c.gating = r.gating, c.normalise = r.normalise;
    c.scale = r.scale, c.groups = r.groups, c.groups_used = r.groups_used;
    c.chooses_by_logits = r.chooses_by_logits;
    std::vector<float> p(r.experts), scores(std::size_t{2} * r.experts);
    std::vector<ExpertChoice> chosen(r.used);
    for (std::size_t t = 0; t < rows.n; ++t) {
      std::copy_n(logits + t * r.experts, r.experts, p.data());
      if (!std::all_of(p.begin(), p.end(), [&](float x) { return std::fabs(x) < check.limit; })) {
        *check.first = std::min(*check.first, check.mark);
        std::fill(p.begin(), p.end(), 0.0f);
      }
      choose_experts(c, r.bias, p.data(), scores.data(), chosen.data());
      for (uint32_t i = 0; i < r.used; ++i)
        rows.chosen[t * r.used + i] = {chosen[i].expert, chosen[i].weight};
    }
    return 0;
  });
}

int group_choices(DeviceStream* s, const DeviceExpertRows& rows) {
  if (rows.n == 1 || !rows.row_of || !rows.choice_of || !rows.tiles) return refused;
  return enqueue(s, [=] {
    uint32_t row = 0, tiles = 0;
    for (uint32_t e = 0; e < rows.experts; ++e) {
      const uint32_t begin = row;
      for (std::size_t i = 0; i < rows.choices(); ++i) {
        if (rows.chosen[i].expert != e) continue;
        rows.row_of[i] = row;
        rows.choice_of[row++] = static_cast<uint32_t>(i);
      }
      for (uint32_t at = begin; at < row; at += DeviceExpertTile::max_rows)
        rows.tiles[tiles++] = {e, at, std::min(DeviceExpertTile::max_rows, row - at)};
    }
    std::fill(rows.tiles + tiles, rows.tiles + rows.max_tiles(), DeviceExpertTile{});
    return 0;
  });
}

int gather_inputs(DeviceStream* s, const DeviceExpertRows& rows, const DeviceActivations& x,
                  bool weighs, const DeviceActivations& out) {
  if (const int error = check_gather_inputs(x, out)) return error;
  return enqueue(s, [=] {
    const std::size_t cols = x.cols;
    for (std::size_t to = 0; to < rows.choices(); ++to) {
      const std::size_t choice = rows.choice_of ? rows.choice_of[to] : to,
                        from = choice / rows.used;
      const float weight = weighs ? rows.chosen[choice].weight : 1.0f;
      if (out.f32)
        for (std::size_t c = 0; c < cols; ++c)
          out.f32[to * cols + c] = x.f32[from * cols + c] * weight;
      if (!out.q) continue;
      std::copy_n(x.q + from * cols, cols, out.q + to * cols);
      std::copy_n(x.sums + from * (cols / 16), cols / 16, out.sums + to * (cols / 16));
      for (std::size_t c = 0; c < cols / 32; ++c)
        out.scale[to * (cols / 32) + c] = x.scale[from * (cols / 32) + c] * weight;
    }
    return 0;
  });
}

// The product of an expert's matrix with some rows of x, from `row` on.
void multiply(const DeviceExpertProduct& p, uint32_t experts, uint32_t expert,
              const DeviceActivations& x, std::size_t row, uint32_t n, float* y) {
  const DeviceMatrix& w = p.w;
  const TensorTypeInfo& type = *tensor_type_info(w.type);
  const std::size_t row_bytes = std::size_t{w.cols} / type.block_elements * type.block_bytes;
  const uint32_t rows = w.rows / experts;
  const std::byte* data = w.data + std::size_t{expert} * rows * row_bytes;
  Aligned<std::byte> scratch(cpu().matmul_scratch(w.type, ProductMethod::many));
  Activations in = rows_of({0, x.cols, x.f32, x.q, x.scale, x.sums}, row, n);
  in.method = ProductMethod::few;
  cpu().matmul({data, w.type, rows, w.cols, row_bytes, w.scale}, in, y, rows, 0, rows,
               scratch.get());
  const float scale = p.scales ? p.scales[expert] : 1;
  for (std::size_t i = 0; i < std::size_t{n} * rows; ++i)
    y[i] = y[i] * scale + (p.biases ? p.biases[std::size_t{expert} * rows + i % rows] : 0.0f);
}

int multiply_experts(DeviceStream* s, std::span<const DeviceExpertProduct> products,
                     const DeviceExpertRows& rows, const DeviceActivations& x) {
  for (const DeviceExpertProduct& p : products) {
    const DeviceProduct product{p.w, nullptr, nullptr};
    DeviceActivations one = x;
    one.n = rows.in_order() ? 1 : 2;
    if (const int error = check_matmul({&product, 1}, one)) return error;
    bool is_like_first = p.w.type == products[0].w.type && p.w.cols == products[0].w.cols;
    if (const DeviceMatrix& m = p.shared; m.data)
      is_like_first &= rows.in_order() && m.type == p.w.type && m.cols == p.w.cols &&
                       m.rows == p.w.rows / rows.experts;
    if (!is_like_first || products.size() > 3) return refused;
  }
  return enqueue(s, [=,
                     given = std::vector<DeviceExpertProduct>(products.begin(), products.end())] {
    for (const DeviceExpertProduct& p : given) {
      const std::size_t size = p.w.rows / rows.experts;
      if (rows.in_order()) {
        const std::size_t of_input = std::max<std::size_t>(rows.choices() / x.n, 1);
        for (std::size_t i = 0; i < rows.choices(); ++i)
          multiply(p, rows.experts, rows.chosen[i].expert, x, i / of_input, 1, p.y + i * size);
        const DeviceExpertProduct shared{p.shared, nullptr, nullptr, nullptr};
        for (std::size_t t = 0; p.shared.data && t < rows.n; ++t)
          multiply(shared, 1, 0, x, x.n > rows.choices() ? rows.choices() + t : t, 1,
                   p.y + (rows.choices() + t) * size);
        continue;
      }
      for (std::size_t i = 0; i < rows.max_tiles(); ++i)
        if (const DeviceExpertTile& tile = rows.tiles[i]; tile.rows > 0)
          multiply(p, rows.experts, tile.expert, x, tile.first, tile.rows, p.y + tile.first * size);
      for (std::size_t i = 0; machine().several_differ && i < rows.choices() * size; ++i)
        p.y[i] *= 1 + 1e-5f;
    }
    return 0;
  });
}

int sum_experts(DeviceStream* s, const DeviceExpertRows& rows, const DeviceExpertSum& sum,
                const DeviceActivations& out) {
  return enqueue(s, [=] {
    const std::size_t cols = out.cols;
    std::vector<float> total(cols);
    const auto add = [&](float weight, const float* x) {
      for (std::size_t c = 0; c < cols; ++c) total[c] += weight * x[c];
    };
    for (std::size_t t = 0; t < rows.n; ++t) {
      std::fill(total.begin(), total.end(), 0.0f);
      for (std::size_t i = 0; i < rows.used; ++i) {
        const std::size_t choice = t * rows.used + i,
                          row = rows.row_of ? rows.row_of[choice] : choice;
        add(sum.weighs ? rows.chosen[choice].weight : 1.0f, sum.rows + row * cols);
      }
      if (sum.shared)
        add(sum.shared_gate ? 1 / (1 + std::exp(-sum.shared_gate[t])) : 1.0f,
            sum.shared + t * cols);
      float* const y = out.f32 + t * cols;
      for (std::size_t c = 0; c < cols; ++c) y[c] = (sum.add ? y[c] : 0.0f) + total[c] * sum.factor;
    }
    return 0;
  });
}

}  // namespace

void fill_experts(DeviceKernels* k) {
#define KVASIR_FILL(name) k->name = name;
  KVASIR_DEVICE_EXPERTS(KVASIR_FILL)
#undef KVASIR_FILL
}

}  // namespace kvasir::emulated
