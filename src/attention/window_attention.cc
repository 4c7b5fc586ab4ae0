// Attention through a window. The query at position p sees the keys j <= p with
//
//   p - j < w          the newest w, itself included
//   j >= p / w * w     chunked: those since the last multiple of w
//
// Tokens are taken in the tiles of the kernels: 128 tokens of pages and 64 of rows, at positions
// that do not depend on the queries. Every row of a block attends the tiles that all rows see
// whole in one pass. In the others, at the old end of the window, runs of rows with the same view
// attend the part that they see. So a row's sums depend on its position alone, not on its block.
#include <atomic>

#include "attention/worker.h"

namespace kvasir {

constexpr uint32_t page_tile = 128, row_tile = 64;  // tokens
static_assert(part_tokens % page_tile == 0 && part_tokens % row_tile == 0);

// Neighbouring tokens of a step, for one KV head.
struct Attention::WindowBlock {
  const AttentionRequest& req;
  const HeadTokens& tokens;
  const HeadQueries& queries;
  const AttentionState& state;
  uint32_t group, dim;

  uint32_t count() const { return tokens.count; }
  uint64_t position(uint32_t token) const { return req.store.tokens() + tokens.first + token; }
  HeadQueries queries_of(uint32_t begin, uint32_t end) const {
    return queries.of_rows(begin * group, (end - begin) * group);
  }
  AttentionState state_of(uint32_t begin) const { return row_of(state, begin * group, dim); }
  uint64_t first_seen(uint32_t token) const { return req.window.first_seen(position(token)); }
};

namespace {

// Calls f(begin, end, from) for each run of a block's tokens that see the same tokens of a tile:
// those from `from` on. Later tokens see less.
template <class Block, class F>
void by_view(const Block& block, uint64_t tile, uint64_t tile_end, F&& f) {
  const auto view = [&](uint32_t token) { return std::max(block.first_seen(token), tile); };
  for (uint32_t begin = 0, end; begin < block.count() && view(begin) < tile_end; begin = end) {
    const uint64_t from = view(begin);
    for (end = begin + 1; end < block.count() && view(end) == from; ++end) {
    }
    f(begin, end, from);
  }
}

}  // namespace

Status Attention::run_windowed(const AttentionRequest& req, float* out) {
  const PageStore& pages = req.store.pages();
  const uint32_t group = config_.group(), heads = config_.kv_heads;
  const uint64_t oldest = req.window.first_seen(req.store.tokens() + req.first);
  const auto first_page = static_cast<uint32_t>(
      std::min<uint64_t>(oldest / page_tile * page_tile / shape_.page_tokens, pages.pages()));
  RETURN_IF_ERROR(list_window_pages(req, oldest, first_page));
  const uint32_t block_tokens = block_rows_ / group, tokens = req.tokens - req.first;
  pool_->run(heads * static_cast<uint32_t>(ceil_div(tokens, block_tokens)), [&](uint32_t task,
                                                                                uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t first = req.first + task / heads * block_tokens;
    const HeadTokens own{task % heads, first, std::min(block_tokens, req.tokens - first)};
    const HeadQueries queries = gather(req, own, false, &w);
    const AttentionState state = empty_state(w.state.data(), queries.rows.rows, shape_.dim);
    begin_with_sink_logits(queries, state);
    const WindowBlock block{req, own, queries, state, group, shape_.dim};
    attend_window_pages(block, first_page, &w);
    attend_window_rows(block, &w);
    write_out(req, state, own, out, nullptr);
  });
  return {};
}

// page_lists_: the pages from first_page on, verified from the oldest token on that a query sees.
Status Attention::list_window_pages(const AttentionRequest& req, uint64_t oldest,
                                    uint32_t first_page) {
  const PageStore& pages = req.store.pages();
  const auto seen =
      static_cast<uint32_t>(std::min<uint64_t>(oldest / shape_.page_tokens, pages.pages()));
  for (uint32_t p = seen; p < pages.pages(); p = (p / extent_pages + 1) * extent_pages)
    if (!pages.has(p / extent_pages))
      return Status::error(Code::internal, "tokens of a window have been dropped");
  std::atomic<bool> intact{true};
  pool_->run(config_.kv_heads, [&](uint32_t h, uint32_t) {
    page_lists_[h].assign(pages.pages() - first_page, {});
    for (uint32_t p = seen; p < pages.pages(); ++p) {
      if (p % extent_pages == 0 && req.cancel.fired()) return;
      page_lists_[h][p - first_page] = pages.page(req.layer, h, p);
      if (!pages.intact_page(req.layer, h, p)) intact = false;
    }
  });
  return intact ? Status() : pages.damaged();
}

void Attention::attend_window_pages(const WindowBlock& b, uint32_t first_page, Worker* w) const {
  const uint32_t page_tokens = shape_.page_tokens;
  const Array<PageRef>& list = page_lists_[b.tokens.head];
  const uint64_t sealed = b.req.store.sealed_tokens(),
                 whole = std::min(round_up(b.first_seen(b.count() - 1), page_tile), sealed);
  for (uint64_t tile = uint64_t{first_page} * page_tokens; tile < whole && !b.req.cancel.fired();
       tile += page_tile) {
    const uint64_t end = std::min(tile + page_tile, sealed);
    by_view(b, tile, end, [&](uint32_t begin_token, uint32_t end_token, uint64_t from) {
      const auto at = list.begin() - first_page;
      w->pages.assign(at + static_cast<std::ptrdiff_t>(from / page_tokens),
                      at + static_cast<std::ptrdiff_t>(end / page_tokens));
      w->pages[0].tokens &= ~uint64_t{0} << from % page_tokens;
      attend_pages(b.queries_of(begin_token, end_token), w->pages, b.state_of(begin_token), w);
    });
  }
  const auto end = static_cast<uint32_t>(list.size());
  for (auto p = static_cast<uint32_t>(whole / page_tokens) - first_page;
       p < end && !b.req.cancel.fired(); p += part_tokens / page_tokens)
    attend_pages(b.queries, {list.data() + p, std::min(part_tokens / page_tokens, end - p)},
                 b.state, w);
}

void Attention::attend_window_rows(const WindowBlock& b, Worker* w) const {
  const KvStore& store = b.req.store;
  const KvStore::Rows all = store.window(b.req.layer, b.tokens.head);
  const uint64_t first = store.window_begin(), end = b.position(b.count() - 1) + 1,
                 oldest = std::max(b.first_seen(b.count() - 1), first),
                 whole = std::min(first + round_up(oldest - first, row_tile), end);
  // The tokens [begin_token, end_token) attend the keys from `from` to `to`, up to their own.
  const auto attend = [&](uint32_t begin_token, uint32_t end_token, uint64_t from, uint64_t to) {
    const HeadQueries queries = b.queries_of(begin_token, end_token);
    for (uint32_t r = 0; r < queries.rows.rows; ++r) {
      const uint64_t seen = b.position(begin_token + r / b.group) + 1;
      w->limits[r] = static_cast<uint32_t>(seen - std::min(seen, from));
    }
    const std::size_t at = (from - first) * shape_.dim;
    attend_rows(queries,
                {all.k + at, all.v + at, static_cast<uint32_t>(to - from), w->limits.data()},
                b.state_of(begin_token), w);
  };
  const uint64_t skipped = std::max(b.first_seen(0), first) - first;
  for (uint64_t tile = first + skipped / row_tile * row_tile; tile < whole && !b.req.cancel.fired();
       tile += row_tile) {
    const uint64_t tile_end = std::min(tile + row_tile, end);
    by_view(b, tile, tile_end, [&](uint32_t begin_token, uint32_t end_token, uint64_t from) {
      attend(begin_token, end_token, from, tile_end);
    });
  }
  for (uint64_t at = whole; at < end && !b.req.cancel.fired(); at += part_tokens)
    attend(0, b.count(), at, std::min(at + part_tokens, end));
}

}  // namespace kvasir
