#include "offload/filter_group_cache.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>

#include "base/checked.h"

namespace kvasir {

constexpr const char* in_groups = "what filter layers choose";

// A filter layer's group is what chooses nothing itself up to the next dense layer (Plan::dense).
void FilterGroupCache::find_groups(const Plan& plan) {
  std::vector<std::unique_ptr<Group>> found;
  uint32_t before = 0;
  for (uint32_t filter = first_, end = first_ + layers_; filter < end; ++filter) {
    if (!plan.is_filter(filter)) continue;
    uint32_t from = filter + 1;
    while (from < end && plan.is_dense(from) && !plan.is_filter(from)) ++from;
    uint32_t to = from;
    while (to < end && !plan.is_dense(to)) ++to;
    if (to == from) continue;
    found.push_back(std::make_unique<Group>());
    found.back()->filter = filter, found.back()->begin = from, found.back()->end = to,
    found.back()->before = before;
    before += to - from;
  }
  const auto same = [](const auto& a, const auto& b) {
    return a->filter == b->filter && a->begin == b->begin && a->end == b->end;
  };
  if (std::equal(found.begin(), found.end(), groups_.begin(), groups_.end(), same)) return;
  release();
  groups_ = std::move(found);
}

void FilterGroupCache::release() {
  if (groups_.empty()) return;  // what was given stays as it is
  ++generation_;
  room_ = tried_ = 0;
  groups_.clear();
  stamps_.clear();
  quads_ = {};
}

Status FilterGroupCache::prepare(const PageStore& pages, const Plan& plan, uint64_t reserve,
                                 Fallback* fallback) {
  find_groups(plan);
  if (groups_.empty()) return *fallback = Fallback::no_layers_in_group, Status();
  const uint32_t all = pages.pages() * shape_.page.page_quads();
  uint64_t list_quads = 0;  // quads of a list: each may have one token that was chosen
  for (const auto& g : groups_) list_quads = std::max(list_quads, plan.budget(g->filter));
  const auto wanted = static_cast<uint32_t>(std::min<uint64_t>(list_quads, all));
  if (wanted > room_) {
    const auto room = static_cast<uint32_t>(round_up(
        std::min<uint64_t>(list_quads + list_quads / 8, all + all / 8 + shape_.page.extent_quads()),
        64));
    if (tried_ > 0 && wanted >= tried_) return *fallback = Fallback::no_room_for_group, Status();
    const uint32_t layers = groups_.back()->before + groups_.back()->end - groups_.back()->begin;
    const std::size_t list = std::size_t{shape_.kv_heads} * room,
                      bytes = layers * list * quad_bytes_of(shape_.page.dim);
    ++generation_;
    room_ = 0, quads_ = {};
    Status s;
    if (device_->left() < Device::allocated_size(bytes) + reserve)
      s = Status::error(Code::no_memory, "%s", text_of(Fallback::no_room_for_group));
    if (s.ok()) s = quads_.allocate(device_, bytes, in_groups);
    for (const auto& g : groups_) {
      if (s.ok()) s = g->found.allocate(device_, list);
      if (s.ok()) s = g->present.allocate(device_, list);
      if (s.ok()) s = g->counts.allocate(device_, 2 * shape_.kv_heads);
      if (s.ok()) s = g->fresh.allocate(device_, 1 + 2 * std::size_t{room});
      g->quad_at.assign(room, 0), g->used_at.assign(room, 0), g->place_of.clear();
    }
    if (!s.ok()) {
      quads_ = {};
      if (s.code() != Code::no_memory) return s;
      return tried_ = wanted, *fallback = Fallback::no_room_for_group, Status();
    }
    room_ = room, tried_ = 0;
  }
  // What lies in extents that are others now is not what it was.
  const uint32_t before = static_cast<uint32_t>(stamps_.size());
  stamps_.resize(pages.extents());
  for (const auto& g : groups_)
    g->place_of.resize(std::max<std::size_t>(
        g->place_of.size(),
        std::size_t{std::max(before, pages.extents())} * shape_.page.extent_quads()));
  for (uint32_t e = 0; e < std::max(before, pages.extents()); ++e) {
    if (e < pages.extents() && std::exchange(stamps_[e], pages.stamp(e)) == pages.stamp(e))
      continue;
    for (const auto& g : groups_)
      for (uint32_t i = 0; i < shape_.page.extent_quads(); ++i)
        forget(g.get(), e * shape_.page.extent_quads() + i);
  }
  return *fallback = Fallback::none, Status();
}

void FilterGroupCache::forget(Group* group, uint32_t quad) {
  if (const uint32_t place = std::exchange(group->place_of[quad], 0))
    group->quad_at[place - 1] = group->used_at[place - 1] = 0;
}

void FilterGroupCache::forget() {
  for (const auto& g : groups_) {
    std::fill(g->place_of.begin(), g->place_of.end(), 0);
    std::fill(g->quad_at.begin(), g->quad_at.end(), 0),
        std::fill(g->used_at.begin(), g->used_at.end(), 0);
  }
}

void FilterGroupCache::begin_step() {
  ++step_;
  for (const auto& g : groups_) g->is_enqueued = false;
}

FilterGroupCache::Group* FilterGroupCache::group_of(uint32_t filter_layer) const {
  const auto at = std::find_if(groups_.begin(), groups_.end(),
                               [&](const auto& g) { return g->filter == filter_layer; });
  return at == groups_.end() ? nullptr : at->get();
}

bool FilterGroupCache::has(uint32_t layer) const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& g) {
    return g->is_enqueued && layer >= g->begin && layer < g->end;
  });
}

// Those that have a place keep it; the others get places whose quads were not chosen.
Status FilterGroupCache::place(const Selection& choice, const PageStore& pages, ThreadPool* pool,
                               Group* group, ReadCounts* counts) {
  const uint32_t page_quads = shape_.page.page_quads();
  const Array<PageRef>& chosen = choice.lists[0];
  const Array<uint32_t>& numbers = choice.page_numbers[0];
  const auto for_quads = [&](auto&& f) {
    for (std::size_t p = 0; p < chosen.size(); ++p)
      for (uint32_t i = 0; i < page_quads; ++i)
        if (const auto present = static_cast<uint8_t>(chosen[p].tokens >> i * quad_tokens & 15))
          f(numbers[p] * page_quads + i, present);
  };
  uint32_t count = 0, fresh = 0, hot_tokens = 0;
  for_quads([&](uint32_t quad, uint8_t present) {
    if (const uint32_t place = group->place_of[quad])
      group->used_at[place - 1] = step_,
                             hot_tokens += static_cast<uint32_t>(std::popcount(present));
  });
  uint32_t *const its_quads = group->fresh.get() + 1, *const its_places = its_quads + room_;
  for_quads([&](uint32_t quad, uint8_t present) {
    uint32_t place = group->place_of[quad];
    if (!place) {
      while (group->used_at[group->hand] == step_) group->hand = (group->hand + 1) % room_;
      place = group->hand + 1;
      if (const uint32_t old = group->quad_at[place - 1]) group->place_of[old - 1] = 0;
      group->quad_at[place - 1] = quad + 1, group->used_at[place - 1] = step_,
                             group->place_of[quad] = place;
      its_quads[fresh] = quad, its_places[fresh++] = place - 1;
    }
    for (uint32_t h = 0; h < shape_.kv_heads; ++h)
      group->found.get()[std::size_t{h} * room_ + count] = place | hot_present,
                                                  group->present
                                                      .get()[std::size_t{h} * room_ + count] =
                                                      present;
    ++count;
  });
  *group->fresh.get() = fresh;
  for (uint32_t h = 0; h < shape_.kv_heads; ++h)
    group->counts.get()[2 * h] = count, group->counts.get()[2 * h + 1] = 0;

  const uint32_t layers = group->end - group->begin, lists = layers * shape_.kv_heads;
  std::atomic<bool> intact{true};
  if (pages.mapped_bytes() > 0)
    pool->run(lists, [&](uint32_t i, uint32_t) {
      for (uint32_t f = 0, last = UINT32_MAX; f < fresh; ++f)
        if (const uint32_t page = its_quads[f] / page_quads; std::exchange(last, page) != page)
          if (!pages.intact_page(group->begin + i / shape_.kv_heads, i % shape_.kv_heads, page))
            intact = false;
    });
  if (!intact) return pages.damaged();
  counts->tokens_read += choice.tokens * lists, counts->tokens_hot += uint64_t{hot_tokens} * lists;
  counts->pages_touched += numbers.size() * uint64_t{lists};
  counts->tokens_present += uint64_t{pages.pages() - 1} * shape_.page.page_tokens * lists;
  return {};
}

void FilterGroupCache::fill(uint32_t layer, DeviceAttention* to) const {
  for (const auto& g : groups_) {
    if (layer < g->begin || layer >= g->end) continue;
    to->lists = nullptr, to->biases = nullptr;
    to->present = g->present.get(), to->list_counts = g->counts.get();
    to->max_quads = room_;
    to->hot = {room_, quad_bytes_of(shape_.page.dim),
               quads_.get() + bytes_before(*g) + (layer - g->begin) * layer_bytes(), nullptr,
               g->found.get()};
  }
}

}  // namespace kvasir
