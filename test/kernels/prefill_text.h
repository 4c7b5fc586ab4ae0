// A step of prefill with random keys and values, as the store has them, on a device.
#pragma once

#include <algorithm>
#include <vector>

#include "backend/kernels.h"
#include "base/checked.h"
#include "device_support.h"

namespace kvasir::test {

struct PrefillShape {
  uint32_t head_dim, kv_heads, group, pages, window, n;
  float key_size = 1, value_size = 1;  // magnitudes
  bool has_sink_logits = false;
  bool divided = false;  // there is room for parts of the keys
};

struct PrefillText {
  PrefillText(const PrefillShape& of, Random& random)
      : s(of), page(PageShape::of(s.head_dim)), extents(s.pages / extent_pages + 1),
        before(s.pages * page.page_tokens + s.window), all(before + s.n),
        keys(std::size_t{s.kv_heads} * all * page.dim), values(keys.size()),
        pages(std::size_t{extents} * s.kv_heads * PageShape::pages_bytes()),
        scales(std::size_t{extents} * s.kv_heads * page.scales_bytes() / 2),
        sinks(std::size_t{s.kv_heads} * 2 * page.page_tokens * page.dim),
        centre(std::size_t{s.kv_heads} * page.dim),
        window(std::size_t{s.kv_heads} * 2 * (s.window + 3) * page.dim),
        q(std::size_t{s.n} * s.kv_heads * s.group * s.head_dim),
        k(std::size_t{s.n} * s.kv_heads * s.head_dim), v(k.size()) {
    const uint32_t dim = page.dim, tokens = page.page_tokens;
    const auto row = [&](float* to, float size) {
      for (uint32_t d = 0; d < dim; ++d)
        to[d] = d < s.head_dim ? size * random.normal() * (d % 11 == 5 ? 6.0f : 1.0f) : 0.0f;
    };
    for (float& x : q) x = random.normal() * 2 / s.key_size;
    for (uint32_t h = 0; h < s.kv_heads * s.group; ++h) sink_logits.push_back(4 * random.normal());
    if (s.n > 4) std::fill_n(q.data(), s.head_dim, 0.0f);  // a query that asks for nothing
    for (std::size_t i = 0; i < centre.size(); ++i)
      centre[i] = i % dim < s.head_dim ? s.key_size * random.normal() : 0.0f;
    Guarded<float> rows(std::size_t{2} * tokens * dim), unsealed(rows.size());
    Guarded<int8_t> bounds(page.bounds_bytes());
    for (uint32_t h = 0; h < s.kv_heads; ++h) {
      float *its_keys = keys.data() + std::size_t{h} * all * dim,
            *its_values = values.data() + std::size_t{h} * all * dim;
      for (uint32_t p = 0; p < s.pages; ++p) {
        const float size = p % 7 == 3 ? 2.5f : 1.0f;
        for (uint32_t t = 0; t < tokens; ++t)
          row(rows.data() + t * dim, size * s.key_size),
              row(rows.data() + (tokens + t) * dim, size * s.value_size);
        const std::size_t at = std::size_t{p / extent_pages} * s.kv_heads + h;
        int8_t* data = pages.data() + at * PageShape::pages_bytes();
        uint16_t* its_scales = scales.data() + at * page.scales_bytes() / 2;
        cpu_kernels().seal_page(page, rows.data(), rows.data() + std::size_t{tokens} * dim,
                                p % extent_pages, data, its_scales, bounds.data());
        cpu_kernels().unseal_page(page, data + std::size_t{p % extent_pages} * page_bytes,
                                  its_scales + p % extent_pages * std::size_t{2} * tokens,
                                  unsealed.data(), unsealed.data() + std::size_t{tokens} * dim);
        const float* from = p == 0 ? rows.data() : unsealed.data();
        if (p == 0)
          std::copy_n(rows.data(), rows.size(), sinks.data() + std::size_t{h} * rows.size());
        std::copy_n(from, tokens * dim, its_keys + std::size_t{p} * tokens * dim);
        std::copy_n(from + tokens * dim, tokens * dim, its_values + std::size_t{p} * tokens * dim);
      }
      float* at = window.data() + std::size_t{h} * 2 * (s.window + 3) * dim;
      for (uint32_t t = before - s.window; t < all; ++t) {
        float *key = its_keys + std::size_t{t} * dim, *value = its_values + std::size_t{t} * dim;
        row(key, s.key_size), row(value, s.value_size);
        if (t < before) {
          std::copy_n(key, dim, at + std::size_t{t + s.window - before} * dim);
          std::copy_n(value, dim, at + std::size_t{s.window + 3 + t + s.window - before} * dim);
          continue;
        }
        const std::size_t to = (std::size_t{t - before} * s.kv_heads + h) * s.head_dim;
        for (uint32_t d = 0; d < s.head_dim; ++d)
          k[to + d] = key[d] + centre[h * dim + d], key[d] = k[to + d] - centre[h * dim + d];
        std::copy_n(value, s.head_dim, v.data() + to);
      }
    }
  }

  const PrefillShape s;
  const PageShape page;
  const uint32_t extents, before, all;
  std::vector<float> keys, values;  // what attention is defined by: [kv_heads][all][dim]
  std::vector<int8_t> pages;
  std::vector<uint16_t> scales;
  std::vector<float> sinks, centre, window, q, k, v, sink_logits;
};

// Of a sparse step; the device fills the lists.
struct Tiles {
  uint32_t chosen, near, seed = 5, heads = 1, exact = 0;
  uint32_t room = 0, blocks = 0;
  std::vector<uint32_t> lists = {}, counts = {};
  std::vector<float> biases = {};
};

struct Attended {
  std::vector<float> out, lse;
};

inline Attended attend(const PrefillText& t, Tiles* tiles = nullptr) {
  const PrefillShape& s = t.s;
  const uint32_t room = static_cast<uint32_t>(round_up(t.all, prefill_keys)) + prefill_keys,
                 q_room = static_cast<uint32_t>(round_up(s.n * s.group, prefill_rows));
  const std::size_t extent_bytes = s.kv_heads * PageShape::pages_bytes(),
                    extent_scales = s.kv_heads * t.page.scales_bytes();
  Memory<int8_t> pages(t.pages.data(), t.pages.size());
  Memory<uint16_t> scales(t.scales.data(), t.scales.size());
  std::vector<uint64_t> pages_at, scales_at;
  for (uint32_t e = 0; e < t.extents; ++e) {
    pages_at.push_back(reinterpret_cast<uint64_t>(pages.data()) + e * extent_bytes);
    scales_at.push_back(reinterpret_cast<uint64_t>(scales.data()) + e * extent_scales);
  }
  Memory<uint64_t> device_pages_at(pages_at.data(), t.extents),
      device_scales_at(scales_at.data(), t.extents);
  Memory<float> sinks(t.sinks.data(), t.sinks.size()), centre(t.centre.data(), t.centre.size()),
      window(t.window.data(), t.window.size());
  Memory<float> q(t.q.data(), t.q.size()), k(t.k.data(), t.k.size()), v(t.v.data(), t.v.size());
  Memory<uint16_t> keys(std::size_t{s.kv_heads} * room * t.page.dim), values(keys.get().size()),
      half_q(std::size_t{s.kv_heads} * q_room * t.page.dim);
  Memory<float> q_scale(std::size_t{s.kv_heads} * q_room), largest(std::size_t{s.kv_heads} * 2),
      out(t.q.size()), lse(std::size_t{s.n} * s.kv_heads * s.group),
      sink_logits(t.sink_logits.data(), t.sink_logits.size()),
      sink_scores(std::size_t{s.kv_heads} * q_room);
  const uint32_t part_room = s.divided ? 16 * s.kv_heads * q_room : 0;
  Memory<float> parts(std::max(1u, part_room) * prefill_part_floats(t.page.dim));
  const std::size_t blocks = q_room / prefill_rows, tile_room = room / prefill_keys,
                    lists = tiles ? s.kv_heads * blocks * tile_room : 1;
  Memory<float> tile_scores(tiles ? tiles->heads * blocks * choosing_rows(s.group) * tile_room : 1),
      tile_biases(lists);
  const std::size_t row_bytes = tiles ? s.kv_heads * tile_row_bytes(t.page.dim) : 0;
  Memory<int8_t> tile_keys(std::max(row_bytes * room, std::size_t{1})),
      tile_q(std::max(row_bytes * q_room, std::size_t{1}));
  Memory<float> tile_key_scales(std::size_t{s.kv_heads} * (room / tile_scale_keys));
  Memory<uint32_t> tile_lists(lists), tile_counts(s.kv_heads * blocks);
  DevicePrefill r{s.kv_heads,
                  s.group,
                  s.head_dim,
                  t.page.dim,
                  t.page.page_tokens,
                  s.n,
                  s.pages,
                  s.window,
                  device_pages_at.data(),
                  device_scales_at.data(),
                  0,
                  0,
                  sinks.data(),
                  centre.data(),
                  window.data(),
                  s.window + 3,
                  room,
                  q_room,
                  keys.data(),
                  values.data(),
                  half_q.data(),
                  q_scale.data(),
                  largest.data(),
                  s.has_sink_logits ? sink_logits.data() : nullptr,
                  s.has_sink_logits ? sink_scores.data() : nullptr,
                  0,
                  0,
                  false,
                  0,
                  s.divided ? parts.data() : nullptr,
                  part_room};
  if (tiles)
    r.tiles = {static_cast<uint32_t>(tile_room),
               tiles->chosen,
               tiles->near,
               tiles->seed,
               tiles->heads,
               tiles->exact,
               tile_keys.data(),
               tile_q.data(),
               tile_key_scales.data(),
               tile_scores.data(),
               tile_lists.data(),
               tile_biases.data(),
               tile_counts.data()};
  OK(ops().prepare_prefill(stream(), r, q.data(), k.data(), v.data()));
  if (tiles) OK(ops().choose_prefill(stream(), r));
  OK(ops().attend_prefill(stream(), r, out.data(), lse.data()));
  const Guarded<float>&out_values = out.get(), &out_lse = lse.get();
  if (tiles) {
    const auto copy = [](auto& memory, auto* to) {
      const auto& from = memory.get();
      to->assign(from.data(), from.data() + from.size());
    };
    copy(tile_lists, &tiles->lists), copy(tile_counts, &tiles->counts);
    copy(tile_biases, &tiles->biases), (void)tile_scores.get();
    tile_keys.get(), tile_q.get(), tile_key_scales.get();
    tiles->room = r.tiles.room, tiles->blocks = static_cast<uint32_t>(blocks);
  }
  keys.get(), values.get(), half_q.get(), q_scale.get(), largest.get();  // guards
  return {{out_values.data(), out_values.data() + out_values.size()},
          {out_lse.data(), out_lse.data() + out_lse.size()}};
}

}  // namespace kvasir::test
