// A GPU attends every quad (attend_all) with the bits of a list that has all of them.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "device_sequence.h"

using namespace kvasir;
using namespace kvasir::test;

TEST_CASE("a device attends every quad as it attends a list of all, from where they stay or not") {
  if (!stream()) return;
  Random random(16);
  for (const uint32_t head_dim : {64u, 80u, 128u, 256u}) {
    for (const uint32_t group : {1u, 3u, 9u, 16u}) {
      for (const uint32_t pages : {0u, 1u, 2u, 60u}) {
        CAPTURE(head_dim);
        CAPTURE(group);
        CAPTURE(pages);
        const Shape s{head_dim, 2, group, pages, 30, 1, 100000, 100000, 0, 1, group == 3};
        Sequence t(s, random);
        OnDevice d(t);
        Work list(t), all(t);
        const uint32_t page_quads = t.page.page_quads(), quads = pages * page_quads;
        const std::size_t quad_bytes = quad_bytes_of(t.page.dim);
        uint32_t steps = 0;
        const auto count = [&](uint32_t changed_from, uint32_t changed_since) {
          const DeviceCounts c{pages,        s.window,      ++steps,    0,
                               changed_from, changed_since, d.first_row};
          d.counts.put(&c);
        };
        const auto finished = [&](Work& w) {
          OK(w.finish(d.kv));
          std::vector<float> out;
          for (const Guarded<float>* x : {&w.out.get(), &w.lse.get(), &w.mass.get()})
            out.insert(out.end(), x->data(), x->data() + x->size());
          return out;
        };
        count(UINT32_MAX, 0);
        OK(ops().begin_attention(stream(), d.kv, list.a, d.q.data(), d.k.data(), d.v.data()));
        OK(ops().score_sketch(stream(), d.kv, list.a));
        OK(ops().choose(stream(), d.kv, list.a));
        OK(ops().attend_chosen(stream(), d.kv, list.a));
        const std::vector<float> expected = finished(list);
        all.a.projected = nullptr, all.a.lists = nullptr, all.a.biases = nullptr;
        all.a.list_counts = nullptr, all.a.scores = nullptr;
        const auto step = [&](uint32_t changed_from = UINT32_MAX, uint32_t changed_since = 0) {
          count(changed_from, changed_since);
          OK(ops().begin_attention(stream(), d.kv, all.a, d.q.data(), d.k.data(), d.v.data()));
          all.a.reads_early = !all.a.reads_early;
          OK(ops().attend_all(stream(), d.kv, all.a));
          return finished(all);
        };
        CHECK(step() == expected);  // no quad stays
        for (const uint32_t room : {quads + hot_ways, quads / 2}) {
          if (room == 0) continue;
          CAPTURE(room);
          Memory<uint8_t> hot_quads(s.kv_heads * room * quad_bytes);
          Memory<unsigned long long> entries(std::size_t{s.kv_heads} * room);
          const std::vector<unsigned long long> none(std::size_t{s.kv_heads} * room);
          entries.put(none.data());
          all.a.hot = {room, quad_bytes, hot_quads.data(), entries.data(), nullptr};
          CHECK(step() == expected);
          CHECK(step() == expected);
          if (quads <= page_quads) continue;
          // What stays is not read again, and what has changed is.
          std::vector<uint16_t> scales(t.scales.data(), t.scales.data() + t.scales.size());
          std::fill_n(t.scales.data(), t.scales.size(), uint16_t{0x4000});
          const std::vector<float> damaged = step();
          CHECK((damaged == expected) == (room > quads));
          if (room > quads) CHECK(step(page_quads + 1, steps + 1) != expected);
          std::copy(scales.begin(), scales.end(), t.scales.data());
          CHECK(step(page_quads, steps + 1) == expected);
        }
      }
    }
  }
}
