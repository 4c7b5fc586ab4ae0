// A GPU's attention of layers whose queries see a window, against the reference. Without a GPU the
// cases pass and say so.
#include <algorithm>
#include <cmath>
#include <vector>

#include "device_support.h"
#include "reference/reference.h"
#include "support.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::vector<float> normals(std::size_t n, Random& random) {
  std::vector<float> x(n);
  for (float& v : x) v = random.normal();
  return x;
}

struct Shape {
  uint32_t heads, kv_heads, head_dim, window;
};

// Attends steps of different sizes one after another: each reads what the others kept.
void check_steps(const Shape& shape, bool chunked, bool with_sinks, float softcap, Random& random) {
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

}  // namespace

TEST_CASE("a device's attention through windows agrees with the reference") {
  if (!stream()) return;
  Random random(11);
  for (const Shape& shape : {Shape{8, 2, 64, 33}, Shape{4, 4, 128, 64}, Shape{6, 1, 80, 7},
                             Shape{4, 2, 256, 20}, Shape{2, 1, 512, 40}, Shape{5, 1, 32, 1}}) {
    CAPTURE(shape.head_dim);
    for (const bool chunked : {false, true})
      for (const bool with_sinks : {false, true})
        for (const float softcap : {0.0f, 1.5f})
          check_steps(shape, chunked, with_sinks, softcap, random);
  }
}
