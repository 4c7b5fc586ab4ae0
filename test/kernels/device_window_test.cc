// A GPU's attention of layers whose queries see a window, against the reference. Without a GPU the
// cases pass and say so.
#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/page.h"
#include "base/checked.h"
#include "device_support.h"
#include "device_values.h"
#include "reference/reference.h"
#include "support.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct WindowShape {
  uint32_t heads, kv_heads, head_dim, window;
};

// Attends steps of different sizes one after another: each reads what the others kept.
void check_steps(const WindowShape& shape, bool chunked, bool with_sinks, float softcap,
                 Random& random) {
  const std::size_t kv_width = std::size_t{shape.kv_heads} * shape.head_dim,
                    q_width = std::size_t{shape.heads} * shape.head_dim;
  const uint32_t room = shape.window, most = 70;
  const std::vector<float> sinks = normals(shape.heads, random);
  Memory<float> ring(2 * room * kv_width), dsinks(sinks.data(), sinks.size()), out(most * q_width),
      states(std::max(window_state_floats(most, shape.heads, shape.head_dim),
                      window_state_floats(16, shape.heads, shape.head_dim)));
  Memory<uint64_t> dposition(1);
  std::vector<float> expected_ring(2 * room * kv_width);
  uint64_t position = 0;
  for (const uint32_t n : {1u, 5u, 1u, 70u, 1u, 17u, 2u}) {
    CAPTURE(n);
    const std::vector<float> q = normals(n * q_width, random), k = normals(n * kv_width, random),
                             v = normals(n * kv_width, random);
    Memory<float> dq(q.data(), q.size()), dk(k.data(), k.size()), dv(v.data(), v.size());
    dposition.put(&position);
    const DeviceWindow w{.n = n,
                         .heads = shape.heads,
                         .kv_heads = shape.kv_heads,
                         .head_dim = shape.head_dim,
                         .window = shape.window,
                         .chunked = chunked,
                         .room = room,
                         .position = dposition.data(),
                         .ring = ring.data(),
                         .sinks = with_sinks ? dsinks.data() : nullptr,
                         .softcap = softcap,
                         .states = states.data()};
    OK(ops().attend_window(stream(), w, dq.data(), dk.data(), dv.data(), out.data()));
    OK(ops().keep_window(stream(), w, dk.data(), dv.data()));
    DeviceWindow host = w;
    host.sinks = with_sinks ? sinks.data() : nullptr;
    std::vector<double> expected(n * q_width);
    reference::attend_window(host, position, q.data(), k.data(), v.data(), expected_ring.data(),
                             expected.data());
    CHECK(test::relative_error(out.get().data(), expected.data(), expected.size()) < 1e-5);
    for (uint32_t t = n - std::min(n, room); t < n; ++t)
      for (uint32_t h = 0; h < shape.kv_heads; ++h)
        for (uint32_t d = 0; d < shape.head_dim; ++d) {
          const std::size_t from = (std::size_t{t} * shape.kv_heads + h) * shape.head_dim + d;
          float* to =
              &expected_ring[(std::size_t{h} * 2 * room + (position + t) % room) * shape.head_dim +
                             d];
          to[0] = k[from], to[std::size_t{room} * shape.head_dim] = v[from];
        }
    position += n;
    const float* kept = ring.get().data();
    if (position >= room) CHECK(std::equal(expected_ring.begin(), expected_ring.end(), kept));
  }
}

// A step of many tokens, by the kernels of exact prefill.
void check_prefill(const WindowShape& shape, bool chunked, bool with_sinks, uint64_t position,
                   uint32_t n, Random& random) {
  CAPTURE(position);
  CAPTURE(n);
  const uint32_t group = shape.heads / shape.kv_heads, room = shape.window,
                 dim = PageShape::of(shape.head_dim).dim,
                 rows = static_cast<uint32_t>(round_up(room - 1 + n, prefill_keys)),
                 q_rows = static_cast<uint32_t>(round_up(n * group, prefill_rows));
  const std::size_t kv_width = std::size_t{shape.kv_heads} * shape.head_dim,
                    q_width = std::size_t{shape.heads} * shape.head_dim;
  const std::vector<float> q = normals(n * q_width, random), k = normals(n * kv_width, random),
                           v = normals(n * kv_width, random),
                           ring = normals(2 * room * kv_width, random),
                           sinks = normals(shape.heads, random);
  Memory<float> dq(q.data(), q.size()), dk(k.data(), k.size()), dv(v.data(), v.size()),
      dring(ring.data(), ring.size()), dsinks(sinks.data(), sinks.size()), out(q.size()),
      lse(std::size_t{n} * shape.heads), q_scale(std::size_t{shape.kv_heads} * q_rows),
      largest(std::size_t{2} * shape.kv_heads), scores(std::size_t{shape.kv_heads} * q_rows);
  Memory<uint16_t> keys(std::size_t{shape.kv_heads} * rows * dim), values(keys.size()),
      half_q(std::size_t{shape.kv_heads} * q_rows * dim);
  const DeviceWindow w{.n = n,
                       .heads = shape.heads,
                       .kv_heads = shape.kv_heads,
                       .head_dim = shape.head_dim,
                       .window = shape.window,
                       .chunked = chunked,
                       .room = room,
                       .sinks = with_sinks ? sinks.data() : nullptr};
  const uint64_t first = first_seen_of(w, position);
  DevicePrefill r{};
  r.kv_heads = shape.kv_heads, r.group = group, r.head_dim = shape.head_dim, r.dim = dim;
  r.page_tokens = PageShape::of(shape.head_dim).page_tokens, r.n = n;
  r.window = static_cast<uint32_t>(position - first);
  r.window_rows = dring.data(), r.window_room = room;
  r.room = rows, r.q_room = q_rows;
  r.keys = keys.data(), r.values = values.data(), r.q = half_q.data();
  r.q_scale = q_scale.data(), r.largest = largest.data();
  if (with_sinks) r.sink_logits = dsinks.data(), r.sink_scores = scores.data();
  r.seen = shape.window, r.ring_first = static_cast<uint32_t>(first % room);
  r.chunked = chunked, r.position = position;
  OK(ops().prepare_prefill(stream(), r, dq.data(), dk.data(), dv.data()));
  OK(ops().attend_prefill(stream(), r, out.data(), lse.data()));
  keys.get(), values.get(), half_q.get(), q_scale.get(), largest.get(), scores.get(), lse.get();
  std::vector<double> expected(q.size());
  reference::attend_window(w, position, q.data(), k.data(), v.data(), ring.data(), expected.data());
  // Halves round by 2^-12 of the largest number.
  CHECK(test::relative_error(out.get().data(), expected.data(), expected.size()) < 5e-3);
}

}  // namespace

TEST_CASE("a device's attention through windows agrees with the reference") {
  if (!stream()) return;
  Random random(11);
  for (const WindowShape& shape :
       {WindowShape{8, 2, 64, 33}, WindowShape{4, 4, 128, 64}, WindowShape{6, 1, 80, 7},
        WindowShape{4, 2, 256, 20}, WindowShape{2, 1, 512, 40}, WindowShape{5, 1, 32, 1}}) {
    CAPTURE(shape.head_dim);
    for (const bool chunked : {false, true})
      for (const bool with_sinks : {false, true})
        for (const float softcap : {0.0f, 1.5f})
          check_steps(shape, chunked, with_sinks, softcap, random);
  }
}

TEST_CASE("a device attends a text that is read through windows as the reference does") {
  if (!stream()) return;
  Random random(12);
  for (const WindowShape& shape :
       {WindowShape{8, 2, 64, 33}, WindowShape{4, 4, 128, 64}, WindowShape{6, 1, 80, 7},
        WindowShape{4, 2, 256, 200}, WindowShape{4, 1, 64, 1000}, WindowShape{7, 1, 128, 1}}) {
    CAPTURE(shape.head_dim);
    CAPTURE(shape.window);
    for (const bool chunked : {false, true})
      for (const bool with_sinks : {false, true})
        for (const uint64_t position : {uint64_t{0}, uint64_t{5}, uint64_t{1000}, uint64_t{4001}})
          for (const uint32_t n : {65u, 300u})
            check_prefill(shape, chunked, with_sinks, position, n, random);
  }
}
