// What a KvStore keeps for positions before its end, and how it goes back to them.
#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "base/stamp.h"
#include "cachefile/section_rules.h"
#include "store/kv_store.h"
#include "store/window_rows.h"

namespace kvasir {

// A store with a window keeps as many tokens beyond it: for a rewind of a few tokens.
constexpr uint32_t spare_tokens = 128;

// A prefill of the last tokens again begins up to a page and window_tokens before them.
uint64_t KvStore::kept_tokens(const StoreShape& shape, uint32_t window_tokens) {
  return shape.window + spare_tokens + 2 * shape.page.page_tokens +
         (window_tokens == keep_all ? 0 : std::min<uint64_t>(window_tokens, shape.window));
}

void KvStore::keep() {
  if (tokens() == 0 || checkpoint_limits_.most == 0 || last_checkpoint() == tokens()) return;
  checkpoints_.push_back(tokens());
  thin_checkpoints();
}

void KvStore::limit_checkpoints(const CheckpointLimits& limits) {
  checkpoint_limits_ = limits;
  if (window_tokens_ == keep_all) checkpoint_limits_.most = std::min(limits.most, 1u);
  thin_checkpoints();
}

void KvStore::thin_checkpoints() {
  thin_out(
      checkpoint_limits_, tokens(), [](uint64_t at) { return at; }, &checkpoints_);
}

void KvStore::forget_checkpoints_behind(uint64_t tokens) {
  while (last_checkpoint() > tokens) checkpoints_.pop_back();
}

void KvStore::drop_unseen() {
  if (shape().window == 0) return;
  thin_checkpoints();
  const uint64_t kept = kept_tokens(shape(), window_tokens_);
  const auto first_of = [&](uint64_t position) { return position - std::min(position, kept); };
  const uint64_t first = first_of(tokens());
  if (window_tokens_ == keep_all) {
    const uint64_t oldest =
        checkpoints_.empty() ? first : std::min(first, first_of(checkpoints_.front()));
    const auto rows = static_cast<uint32_t>(std::max(dropped_, oldest) - dropped_);
    dropped_ += rows, first_row_ += rows, window_count_ -= rows;
    return;
  }
  std::size_t next = 0;  // the first checkpoint behind the extent's begin
  for (uint32_t e = 0; e < pages_.pages() / extent_pages; ++e) {
    const uint64_t begin = uint64_t{e} * shape().page.extent_tokens(),
                   end = begin + shape().page.extent_tokens();
    while (next < checkpoints_.size() && checkpoints_[next] <= begin) ++next;
    const bool seen =
        end > first || (next < checkpoints_.size() && end > first_of(checkpoints_[next]));
    if (!seen) pages_.drop(e);
  }
}

uint64_t KvStore::begin_at(uint64_t token) {
  if (window_tokens_ == keep_all) return dropped_ = token;
  const uint64_t extent = shape().page.extent_tokens();
  pages_.skip(static_cast<uint32_t>(token / extent));
  return sealed_tokens();
}

void KvStore::drop_before(uint64_t token) {
  const uint64_t extent = shape().page.extent_tokens(), full = pages_.pages() / extent_pages;
  const uint64_t end = window_tokens_ == keep_all ? 0 : std::min(ceil_div(token, extent), full);
  for (uint32_t e = 0; e < end; ++e) pages_.drop(e);
  std::erase_if(checkpoints_, [&](uint64_t at) { return resume_point(at) != at; });
}

uint64_t KvStore::resume_point(const StoreShape& shape, const PageStore::Runs& runs,
                               uint64_t dropped, uint64_t end, uint64_t tokens) {
  if (shape.window == 0) return tokens;
  const uint64_t extent = shape.page.extent_tokens();
  for (std::size_t i = runs.size(); i-- > 0;) {
    const bool newest = i + 1 == runs.size();
    const uint64_t begin = std::max(runs[i].begin * extent, dropped),
                   last = std::min(tokens, newest ? end : runs[i].end * extent);
    if (begin == 0 || last >= begin + shape.window) return last;
  }
  return 0;
}

uint64_t KvStore::max_bytes(const StoreShape& shape, uint32_t window_tokens, uint64_t tokens,
                            uint32_t step, uint32_t checkpoints) {
  if (shape.layers == 0) return 0;
  const uint64_t extent = shape.page.extent_tokens();
  const uint64_t places = 2 + uint64_t{checkpoints},
                 kept = std::min(tokens, places * (kept_tokens(shape, window_tokens) + extent)),
                 slabs = ceil_div(kept, extent) + ceil_div(step, extent) + 1;
  const uint64_t planes = shape.page.planes();
  const uint64_t rows = std::min<uint64_t>(window_tokens, shape.window) + step +
                        2 * shape.page.page_tokens + spare_rows + capacity_step;
  return slabs * shape.slab_bytes() +
         (planes * rows + 1) * shape.heads_total() * shape.page.dim * sizeof(float);
}

uint64_t KvStore::checkpoint_bytes(const StoreShape& shape, uint32_t window_tokens) {
  if (shape.layers == 0) return 0;
  const uint64_t extent = shape.page.extent_tokens();
  return (ceil_div(kept_tokens(shape, window_tokens), extent) + 1) * shape.slab_bytes();
}

void KvStore::pop() {
  representatives_.reserve_rewind();
  representatives_.rewind(tokens() - 1);
  --window_count_;
  lowered();
  window_stamp_ = new_stamp();
}

Status KvStore::rewind(uint64_t tokens, const Kernels& kernels) {
  representatives_.reserve_rewind();
  window_stamp_ = new_stamp();
  if (tokens == 0) {
    cut(0);
    return {};
  }
  if (tokens >= sealed_tokens()) {
    const uint64_t kept = tokens - window_begin();
    if (kept >= window_tokens_ || pages_.pages() == 0) {
      forget_checkpoints_behind(tokens);
      window_count_ = static_cast<uint32_t>(kept);
      lowered();
      representatives_.rewind(tokens);
      return {};
    }
  }
  // The window must hold window_tokens, or everything: restores the pages that reach into it.
  const uint32_t page_tokens = shape().page.page_tokens, dim = shape().page.dim;
  const uint64_t begin = tokens > window_tokens_ ? (tokens - window_tokens_) / page_tokens : 0;
  const auto first = static_cast<uint32_t>(begin);
  const uint32_t end =
      std::min<uint32_t>(pages_.pages(), static_cast<uint32_t>(ceil_div(tokens, page_tokens)));
  for (uint32_t l = 0; l < shape().layers; ++l)
    for (uint32_t h = 0; h < shape().kv_heads; ++h)
      for (uint32_t p = first; p < end; ++p)
        if (!pages_.intact_page(l, h, p)) return pages_.damaged();

  const auto kept = static_cast<uint32_t>(tokens > sealed_tokens() ? tokens - sealed_tokens() : 0);
  const uint32_t reopened = (end - first) * page_tokens;
  KvStore shorter(shape(), window_tokens_);
  shorter.centre_ = centre_;
  shorter.sinks_ = sinks_;
  RETURN_IF_ERROR(shorter.own_window(reopened + kept));
  for (uint32_t l = 0; l < shape().layers; ++l) {
    for (uint32_t h = 0; h < shape().kv_heads; ++h) {
      for (uint32_t p = first; p < end; ++p) {
        const PageRef page = pages_.page(l, h, p);
        float* k = shorter.window_row(l, h, 0, (p - first) * page_tokens);
        float* v = shorter.window_row(l, h, 1, (p - first) * page_tokens);
        if (p == 0 && sinks_) {  // the sinks are in full precision
          std::copy_n(sinks(l, h).k, std::size_t{page_tokens} * dim, k);
          if (v != k) std::copy_n(sinks(l, h).v, std::size_t{page_tokens} * dim, v);
        } else {
          kernels.unseal_page(shape().page, page.data, page.scales, k, v);
        }
      }
      for (uint32_t which = 0; which < shape().page.planes(); ++which) {
        // Nobody has checked a file's scales before. Rows made from bad ones would be saved, and
        // refused when loaded.
        if (wrong_floats({shorter.window_row(l, h, which, 0), std::size_t{reopened} * dim}))
          return pages_.not_finite();
        std::copy_n(window_row(l, h, which, 0), std::size_t{kept} * dim,
                    shorter.window_row(l, h, which, reopened));
      }
    }
  }
  forget_checkpoints_behind(tokens);
  pages_.truncate(first);
  sketch_.truncate(first);
  representatives_.rewind(tokens);
  indexes_.truncate(sealed_tokens());
  // Sealing the first page makes them again; some of their tokens may be rewound.
  if (first == 0) sinks_.reset();
  window_ = std::move(shorter.window_);
  capacity_ = shorter.capacity_;
  first_row_ = 0;
  appends_.here = true;
  window_count_ = static_cast<uint32_t>(tokens - sealed_tokens());
  return {};
}

void KvStore::cut(uint32_t pages) {
  representatives_.reserve_rewind();
  pages_.truncate(pages);
  sketch_.truncate(pages);
  representatives_.rewind(sealed_tokens());
  indexes_.truncate(sealed_tokens());
  window_count_ = 0;
  lowered();
  window_stamp_ = new_stamp();
  dropped_ = 0;
  forget_checkpoints_behind(sealed_tokens());
  if (pages > 0) return;
  sinks_stamp_ = new_stamp();
  centre_.clear();  // the next text gets its own
  sinks_.reset();
}

}  // namespace kvasir
