// The CPU's part of co-execution. The GPU attends sinks and window. The CPU selects pages, lists
// the GPU's part of them, and attends the others.
//
//   choose  selects for each token, as selective() does
//   share   assigns the end of every list to the GPU; it begins when all lists are complete
//   attend  attends the rest in parallel parts, whose borders depend on sizes alone
//   merge   merges the parts of the same rows, in order, into the array that the GPU merges with
//           its own partials
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "attention/hybrid_gpu.h"
#include "attention/worker.h"
#include "backend/device_attention.h"
#include "backend/query_groups.h"
#include "base/checked.h"
#include "os/os.h"

namespace kvasir {

constexpr uint32_t part_tokens_all = 4096;  // tokens that a task attends if all are attended
// bytes of pages that page_rate() attends: minimum per layer, maximum in all, more than any cache
constexpr std::size_t min_measured = std::size_t{1} << 20, max_measured = std::size_t{512} << 20;

Status Attention::run_with_gpu(const AttentionRequest& req, HybridGpu* gpu) {
  const uint64_t behind_sinks =
      req.store.pages().pages() > 1 ? req.store.sealed_tokens() - shape_.page_tokens : 0;
  for (Worker& w : workers_) w.counts = {};
  hybrid_parts_.clear();
  Status s = req.selector ? share_chosen(req, gpu) : share_all(req, gpu);
  if (s.ok() && !req.cancel.fired()) s = attend_parts(req, req.selector != nullptr);
  if (s.ok() && !req.cancel.fired()) merge_parts(req.tokens, gpu);
  for (const Worker& w : workers_) counts_ += w.counts;
  counts_.tokens_present += behind_sinks * req.tokens * config_.kv_heads;
  return s;
}

// Selects for each token: block_choices_, [kv_heads][n]. Moves the GPU's part to its lists, if they
// have room.
Status Attention::choose_hybrid(const AttentionRequest& req, const GpuShare& share,
                                HybridGpu* gpu) {
  const uint32_t heads = config_.kv_heads, group = config_.group(), n = req.tokens,
                 blocks = scan_blocks(req.plan, n);
  const float* near = nullptr;
  if (req.plan.strategy->has(StrategyInfo::compares_near)) RETURN_IF_ERROR(gpu->near(&near));
  block_choices_.resize(std::max(block_choices_.size(), std::size_t{heads} * n));
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads;
    const QueryGroup block = query_group_of(n, blocks, task / heads);
    const HeadQueries queries = gather(req, {h, block.first, block.count}, true, &w);
    const std::size_t at = (std::size_t{h} * n + block.first) * group,
                      all = std::size_t{heads} * n * group;
    const float *near_m = near ? near + at : nullptr, *near_l = near ? near + all + at : nullptr;
    SelectorQuery query = query_of(queries, req.plan.budget(req.layer));
    query.near_m = near_m, query.near_l = near_l, query.token = block.first;
    query.first_extent = first_extent_of(req.store.pages(), task, heads * blocks);
    const Scanned scanned = req.selector->scan(query, &w.selector);
    if (!scanned.intact) return failure.note(req.store.pages().damaged());
    w.counts += scanned;
    for (uint32_t t = 0; t < block.count && !req.cancel.fired(); ++t) {
      query.first_row = t * group;
      query.token = block.first + t;
      query.rows = row_of(queries.rows, query.first_row, group);
      query.near_m = near_m ? near_m + query.first_row : nullptr,
      query.near_l = near_l ? near_l + query.first_row : nullptr;
      Selection& choice = block_choices_[std::size_t{h} * n + query.token];
      req.selector->choose(query, &w.selector, &choice);
      if (!choice.intact || !split_for_gpu(req, h, share, &choice, &w))
        return failure.note(req.store.pages().damaged());
      w.counts += choice;
    }
  });
  return std::move(failure).take();
}

// Moves the GPU's part from the end of the selection to its lists. If query heads have separate
// lists, the CPU attends all of them. Returns false if a page of a mapped file is damaged.
bool Attention::split_for_gpu(const AttentionRequest& req, uint32_t head, const GpuShare& share,
                              Selection* choice, Worker* w) const {
  const HybridGpu::Lists& lists = share.lists;
  if (lists.capacity == 0) return true;
  uint32_t count = 0;
  const std::size_t first = std::size_t{head} * lists.capacity;
  bool intact = true;
  const auto take = [&](Array<PageRef>& pages, Array<uint32_t>& numbers) {
    for (std::size_t left = pages.size() * share.sixteenths / 16; left-- > 0;
         pages.pop_back(), numbers.pop_back()) {
      if (count + shape_.page_quads() > lists.capacity) return;
      const PageRef& page = pages.back();
      for (uint32_t quad = 0; quad < shape_.page_quads(); ++quad) {
        const auto present = static_cast<uint8_t>(page.tokens >> quad * quad_tokens & 15);
        if (!present) continue;
        lists.quads[first + count] = numbers.back() * shape_.page_quads() + quad;
        lists.present[first + count] = present;
        lists.biases[first + count] = page.bias;
        ++count;
      }
      ++w->counts.pages_touched;
      intact = intact && req.store.pages().intact_page(req.layer, head, numbers.back());
    }
  };
  if (choice->lists.size() == 1) {
    take(choice->lists[0], choice->page_numbers[0]);
    if (choice->sampled) take(choice->samples[0], choice->sample_numbers[0]);
  }
  lists.counts[2 * head] = count, lists.counts[2 * head + 1] = 0;
  return intact;
}

Status Attention::share_chosen(const AttentionRequest& req, HybridGpu* gpu) {
  const uint32_t heads = config_.kv_heads, group = config_.group(), sixteenths = gpu->sixteenths();
  GpuShare share{{}, sixteenths};
  if (req.tokens == 1 && sixteenths > 0) share.lists = gpu->lists();
  if (Status s = choose_hybrid(req, share, gpu); !s.ok() || req.cancel.fired()) return s;
  if (share.lists.capacity > 0) RETURN_IF_ERROR(gpu->enqueue_lists());
  for (uint32_t i = 0; i < heads * req.tokens; ++i) {
    const Selection& choice = block_choices_[i];
    const bool by_row = choice.lists.size() > 1;
    for (uint32_t list = 0; list < choice.lists.size(); ++list)
      for_each_part(choice, list, [&](const ListPart& part) {
        hybrid_parts_.push_back(
            {i / req.tokens, i % req.tokens, by_row ? list : 0, by_row ? 1 : group, i, part});
      });
  }
  return {};
}

// Splits all pages after that of the sinks. The CPU attends the first ones.
Status Attention::share_all(const AttentionRequest& req, HybridGpu* gpu) {
  const uint32_t heads = config_.kv_heads, sealed = req.store.pages().pages(),
                 pages = sealed > 1 ? sealed - 1 : 0;
  // pages of the CPU
  const uint32_t end =
      req.tokens > 1 ? pages
                     : pages - static_cast<uint32_t>(uint64_t{pages} * gpu->sixteenths() / 16);
  if (end < pages) {
    std::atomic<bool> intact{true};
    if (req.store.pages().mapped_bytes() > 0)
      pool_->run(heads, [&](uint32_t h, uint32_t) {
        for (uint32_t p = end; p < pages && !(p % extent_pages == 0 && req.cancel.fired()); ++p)
          if (!req.store.pages().intact_page(req.layer, h, p + 1)) intact = false;
      });
    if (!intact) return req.store.pages().damaged();
    if (req.cancel.fired()) return {};
    RETURN_IF_ERROR(gpu->enqueue_pages(end + 1));
  }
  share_among_tasks(req.tokens, end);
  counts_.tokens_read += uint64_t{req.tokens} * pages * shape_.page_tokens * heads,
      counts_.pages_touched += uint64_t{req.tokens} * pages * heads;
  return {};
}

// Adds parts of the first `pages` pages after that of the sinks, all of which are attended.
void Attention::share_among_tasks(uint32_t n, uint32_t pages) {
  const uint32_t part_pages = part_tokens_all / shape_.page_tokens,
                 block_tokens = block_rows_ / config_.group();
  for (uint32_t h = 0; h < config_.kv_heads; ++h)
    for (uint32_t first = 0; first < n; first += block_tokens)
      for (uint32_t p = 0; p < pages; p += part_pages)
        hybrid_parts_.push_back({h,
                                 first,
                                 0,
                                 std::min(block_tokens, n - first) * config_.group(),
                                 0,
                                 {0, p + 1, std::min(pages, p + part_pages) + 1}});
}

Status Attention::attend_all(const HeadQueries& queries, const ListPart& pages,
                             const AttentionState& state, Worker* w) const {
  const PageStore& store = queries.req.store.pages();
  const uint32_t layer = queries.req.layer;
  w->pages.resize(pages.end - pages.begin);
  for (uint32_t p = pages.begin; p < pages.end; ++p) {
    w->pages[p - pages.begin] = store.page(layer, queries.head, p);
    if (!store.intact_page(layer, queries.head, p)) return store.damaged();
  }
  attend_pages(queries, w->pages, state, w);
  return {};
}

// states: of the always-read pages, and of the samples.
Status Attention::attend_chosen(const HeadQueries& queries, const HybridPart& part,
                                const AttentionState (&states)[2], Worker* w) const {
  copy_part(block_choices_[part.choice], part.pages, &w->selection);
  PageStore::Hold hold;
  RETURN_IF_ERROR(fetch_choice(queries.req, part.head, 0, &hold, w));
  const auto attend = [&](const Array<PageRef>& pages, const AttentionState& state) {
    if (!pages.empty()) attend_pages(queries, pages, state, w);
  };
  attend(w->selection.lists[0], states[0]);
  if (w->selection.sampled) attend(w->selection.samples[0], states[1]);
  return {};
}

// Partials: [parts][2], of the always-read pages and of the samples.
Status Attention::attend_parts(const AttentionRequest& req, bool chosen) {
  const std::size_t parts = hybrid_parts_.size();
  reserve_partials(2 * parts);
  FirstFailure failure;
  pool_->run(static_cast<uint32_t>(parts), [&](uint32_t i, uint32_t worker) {
    if (req.cancel.fired()) return;
    const HybridPart& part = hybrid_parts_[i];
    Worker& w = workers_[worker];
    const auto tokens = static_cast<uint32_t>(ceil_div(part.rows, config_.group()));
    const HeadQueries queries = gather(req, {part.head, part.first, tokens}, false, &w)
                                    .uncapped()
                                    .of_rows(part.row, part.rows);
    const AttentionState states[2] = {empty_partial(2 * std::size_t{i}, part.rows),
                                      empty_partial(2 * std::size_t{i} + 1, part.rows)};
    Status s = chosen ? attend_chosen(queries, part, states, &w)
                      : attend_all(queries, part.pages, states[0], &w);
    if (!s.ok()) failure.note(std::move(s));
  });
  return std::move(failure).take();
}

void Attention::merge_parts(uint32_t n, HybridGpu* gpu) {
  const uint32_t group = config_.group(), dim = shape_.dim;
  const std::size_t parts = hybrid_parts_.size(), row_floats = dim + state_sums;
  const auto row_at = [&](uint32_t head, uint32_t token, uint32_t row) {
    return gpu->states() + ((std::size_t{head} * n + token) * group + row) * row_floats;
  };
  const auto put = [&](float* to, const float* o, float m, float l, float own) {
    o ? void(std::copy_n(o, dim, to)) : void(std::fill_n(to, dim, 0.0f));
    to[dim] = m, to[dim + 1] = l, to[dim + 2] = own;
  };
  for (uint32_t h = 0; h < config_.kv_heads; ++h)
    for (uint32_t r = 0; r < n * group; ++r)
      put(row_at(h, 0, r), nullptr, -std::numeric_limits<float>::infinity(), 0, 0);
  for (std::size_t i = 0, end; i < parts; i = end) {
    const HybridPart& part = hybrid_parts_[i];
    const AttentionState read = partial(2 * i, part.rows), samples = partial(2 * i + 1, part.rows);
    for (end = i + 1; end < parts && hybrid_parts_[end].has_rows_of(part); ++end) {
      kernels_.merge(read, partial(2 * end, part.rows), part.rows, dim);
      kernels_.merge(samples, partial(2 * end + 1, part.rows), part.rows, dim);
    }
    for (uint32_t r = 0; r < part.rows; ++r) {
      const float m = read.m[r], l = read.l[r];
      kernels_.merge(row_of(read, r, dim), row_of(samples, r, dim), 1, dim);
      put(row_at(part.head, part.first, part.row + r), read.o + std::size_t{r} * dim, read.m[r],
          read.l[r], l > 0 ? l * std::exp(m - read.m[r]) : 0);
    }
  }
}

Status Attention::page_rate(uint32_t first_layer, uint32_t end_layer, AttentionRequest req,
                            double* rate) {
  const KvStore& store = req.store;
  const uint32_t heads = config_.kv_heads, sealed = store.pages().pages();
  const uint32_t layers = end_layer - first_layer;
  const auto pages = static_cast<uint32_t>(std::min<std::size_t>(
      sealed > 1 ? sealed - 1 : 0, max_measured / layers / heads / page_bytes));
  *rate = 0;
  if (std::size_t{pages} * heads * page_bytes < min_measured) return {};
  const Array<float> q(config_.q_width(), 1.0f);
  req.q = q.data(), req.tokens = 1, req.selector = nullptr;
  hybrid_parts_.clear();
  share_among_tasks(1, pages);
  uint64_t took = 0;
  for (int time = 0; time < 2; ++time) {  // the first pass also verifies unverified pages
    const uint64_t begin = os::now_ns();
    for (req.layer = first_layer; req.layer < end_layer && !req.cancel.fired(); ++req.layer)
      RETURN_IF_ERROR(attend_parts(req, false));
    took = os::now_ns() - begin;
  }
  const auto bytes =
      static_cast<double>(uint64_t{pages} * heads * layers * (page_bytes + 4 * shape_.page_tokens));
  if (!req.cancel.fired()) *rate = bytes / static_cast<double>(std::max<uint64_t>(took, 1)) * 1e9;
  return {};
}

}  // namespace kvasir
