// The newest queries of every layer, for strategies that select by recent queries. They belong to a
// sequence: shared with a fork until one of the two continues, saved, and rewound with its tokens.
//
// A step is prepare(), write(layer, ...) for every layer, commit(); nothing is visible before
// commit(). Threads: const functions may be called at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>

#include "backend/second_moment.h"
#include "backend/thread_pool.h"
#include "base/memory.h"
#include "os/os.h"

namespace kvasir {

class RecentQueries {
 public:
  // Tokens: the observation window of SnapKV, twice that of OmniKV.
  static constexpr uint32_t capacity = 32;
  // The lse of a query that was not attended: its shares are 0.
  static constexpr float no_total = 1e30f;

  RecentQueries() = default;
  RecentQueries(uint32_t layers, uint32_t heads, uint32_t head_dim)
      : layers_(layers), heads_(heads), head_dim_(head_dim) {}
  uint32_t count() const { return count_; }  // tokens end() - count() .. end() - 1
  uint64_t end() const { return end_; }
  uint64_t begin() const { return end_ - count_; }
  // The query of the token at this position: [heads][head_dim] after RoPE, not scaled.
  const float* query(uint32_t layer, uint64_t position) const {
    return rows_.get() + at(layer, position);
  }
  // [heads] ln of the sum of e^score over all tokens that the query attended, scores scaled and
  // keys centred: e^(score - lse) is a share. Or no_total.
  const float* lse(uint32_t layer, uint64_t position) const {
    return query(layer, position) + heads_ * head_dim_;
  }

  // Makes room for a step of n tokens, `first` the first one. Throws std::bad_alloc.
  void prepare(uint64_t first, uint32_t n) {
    if (n < capacity && !rows_) rows_ = make_rows(false);
    in_place_ = n <= spare && first == end_ && is_sole(rows_);
    if (in_place_) {
      if (pending_.rows && !is_sole(pending_.rows)) pending_.rows.reset();  // a fork's alone now
      return;
    }
    if (!pending_.rows || !is_sole(pending_.rows))
      pending_.rows = make_rows(n >= capacity || !is_sole(rows_));
  }
  // Writes the newest of the step's n tokens of one layer: q [n][heads * head_dim], lse [n][heads].
  void write(uint32_t layer, uint32_t n, const float* q, const float* lse, ThreadPool* pool) {
    const uint32_t kept = std::min(n, capacity);
    run_tasks(kept > 1 ? pool : nullptr, kept, [&](uint32_t task, uint32_t) {
      const uint32_t i = n - 1 - task;
      float* to = in_place_ ? rows_.get() + at(layer, end_ + i) : pending_row(layer, task);
      std::copy_n(q + std::size_t{i} * heads_ * head_dim_, heads_ * head_dim_, to);
      std::copy_n(lse + std::size_t{i} * heads_, heads_, to + heads_ * head_dim_);
    });
  }
  // Before write() of a later chunk of n tokens of the same step: keeps those written before.
  void make_way(uint32_t layer, uint32_t n) {
    for (uint32_t i = capacity; i-- > n;)
      std::copy_n(pending_row(layer, i - n), width(), pending_row(layer, i));
  }
  // Before commit(first, kept): of the n tokens of the step only the first `kept` stay, n being
  // less than the capacity.
  void keep_first(uint32_t kept, uint32_t n) {
    for (uint32_t l = 0; l < layers_ && kept < n && !in_place_; ++l)
      for (uint32_t i = 0; i < kept; ++i)
        std::copy_n(pending_row(l, i + n - kept), width(), pending_row(l, i));
  }
  // Makes the step visible: its tokens are `first` to first + n - 1, and replace those from `first`
  // on. first: as prepare() had it.
  void commit(uint64_t first, uint32_t n, ThreadPool* pool) {
    rewind(first);
    if (end_ != first) count_ = 0;  // tokens in between are unknown
    end_ = first + n;
    count_ = static_cast<uint32_t>(std::min<uint64_t>(capacity, uint64_t{count_} + n));
    if (std::exchange(in_place_, false)) return;
    if (n < capacity && is_sole(rows_)) {
      const bool many = n * token_floats() >= own_floats;
      run_tasks(many ? pool : nullptr, layers_, [&](uint32_t l, uint32_t) {
        for (uint32_t i = 0; i < n; ++i)
          std::copy_n(pending_row(l, i), width(), rows_.get() + at(l, end_ - 1 - i));
      });
      return;
    }
    // The step has written them in their order. Older tokens that stay, which a copy of the
    // sequence may share, are copied behind them.
    run_tasks(pool, n < count_ ? layers_ : 0, [&](uint32_t l, uint32_t) {
      for (uint32_t i = n; i < count_; ++i)
        std::copy_n(query(l, end_ - 1 - i), width(), pending_row(l, i));
    });
    rows_.swap(pending_.rows);
    newest_ = end_ - 1;
  }
  // Adapts lse to centred keys, for a store that begins to centre its keys after these queries were
  // written. centre: [layers][kv_heads][dim].
  void centre(std::span<const float> centre, uint32_t kv_heads, uint32_t dim, ThreadPool* pool) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    pool->run(layers_, [&](uint32_t l, uint32_t) {
      for (uint64_t p = begin(); p < end_; ++p)
        for (uint32_t h = 0; h < heads_; ++h) {
          const float* c =
              centre.data() + (std::size_t{l} * kv_heads + h / (heads_ / kv_heads)) * dim;
          float shift = 0;
          for (uint32_t d = 0; d < head_dim_; ++d) shift += query(l, p)[h * head_dim_ + d] * c[d];
          rows_.get()[at(l, p) + heads_ * head_dim_ + h] -= shift * scale;
        }
    });
  }
  // Adds q q^T of all queries of one KV head to moment: [dim][dim], dim padded as in pages. Throws
  // std::bad_alloc.
  void add_moment(const Kernels& kernels, uint32_t layer, uint32_t kv_head, uint32_t kv_heads,
                  uint32_t dim, double* moment) const {
    add_moment(kernels, count_, kv_head, kv_heads, dim, moment,
               [&](uint32_t i) { return query(layer, begin() + i); });
  }
  // The same after commit() of a step of at least `capacity` tokens whose layer has been written.
  void add_next_moment(const Kernels& kernels, uint32_t layer, uint32_t kv_head, uint32_t kv_heads,
                       uint32_t dim, double* moment) const {
    add_moment(kernels, capacity, kv_head, kv_heads, dim, moment,
               [&](uint32_t i) { return pending_row(layer, capacity - 1 - i); });
  }
  // Drops the tokens from this position on.
  void rewind(uint64_t tokens) {
    if (tokens >= end_) return;
    count_ -= static_cast<uint32_t>(std::min<uint64_t>(count_, end_ - tokens));
    end_ = tokens;
  }

  // Persistence: f32 [layers][count][heads * (head_dim + 1)], the queries of each token, then its
  // lse.
  std::size_t token_floats() const { return std::size_t{layers_} * width(); }
  Array<float> floats() const {
    Array<float> out;
    out.reserve(token_floats() * count_);
    for (uint32_t l = 0; l < layers_; ++l)
      for (uint64_t p = begin(); p < end_; ++p)
        out.insert(out.end(), query(l, p), query(l, p) + width());
    return out;
  }
  // Room for saved rows of a sequence of `tokens` tokens, of which the newest `count` are known, at
  // most capacity and at most `tokens`. The caller fills them row by row before any other call.
  void restore(uint32_t count, uint64_t tokens) {
    rows_ = make_rows(true);
    end_ = tokens;
    count_ = count;
  }
  uint64_t saved_rows() const { return uint64_t{layers_} * count_; }
  std::size_t width() const { return std::size_t{heads_} * (head_dim_ + 1); }  // floats per row
  float* saved_row(uint64_t i) {
    return rows_.get() + at(static_cast<uint32_t>(i / count_), begin() + i % count_);
  }

 private:
  // One thread copies fewer in less time than threads take to wake up.
  static constexpr std::size_t own_floats = std::size_t{1} << 16;
  // The most tokens of a step that write() puts in their place: no visible row has it.
  static constexpr uint32_t spare = 8, slots = capacity + spare;

  std::size_t size() const { return std::size_t{layers_} * slots * width(); }
  std::size_t at(uint32_t layer, uint64_t position) const {
    const uint64_t slot = (newest_ % slots + slots - position % slots) % slots;
    return (std::size_t{layer} * slots + slot) * width();
  }

  // row(i): the query of the i-th of `count` tokens.
  template <class Row>
  void add_moment(const Kernels& kernels, uint32_t count, uint32_t kv_head, uint32_t kv_heads,
                  uint32_t dim, double* moment, Row&& row) const {
    if (count == 0) return;
    const uint32_t group = heads_ / kv_heads;
    Array<float> rows(std::size_t{count} * group * dim), product(std::size_t{dim} * dim);
    float* to = rows.data();
    for (uint32_t i = 0; i < count; ++i)
      for (uint32_t h = kv_head * group; h < (kv_head + 1) * group; ++h, to += dim)
        std::copy_n(row(i) + std::size_t{h} * head_dim_, head_dim_, to);
    kvasir::add_moment(kernels, rows.data(), count * group, dim, product.data(), moment);
  }

  float* pending_row(uint32_t layer, uint32_t i) const {
    return pending_.rows.get() + (std::size_t{layer} * slots + i) * width();
  }

  std::shared_ptr<float[]> make_rows(bool whole) const {  // whole: all of it is written at once
    std::shared_ptr<float[]> rows = make_buffer<float>(size());
    if (whole) os::prefer_huge_pages(rows.get(), size() * sizeof(float));
    return rows;
  }

  // Belongs to the object and is not copied.
  struct Pending {
    Pending() = default;
    Pending(const Pending&) {}
    Pending& operator=(const Pending&) { return *this; }  // NOLINT: deliberately empty
    std::shared_ptr<float[]> rows;
  };

  uint32_t layers_ = 0, heads_ = 0, head_dim_ = 0;
  uint32_t count_ = 0;
  uint64_t end_ = 0;
  uint64_t newest_ = 0;    // position of the first row
  bool in_place_ = false;  // the current step writes to rows_
  // [layers][slots, newest first, a ring that begins at newest_][heads * (head_dim + 1)]
  std::shared_ptr<float[]> rows_;
  // [layers][slots, newest first][heads * (head_dim + 1)] of the current step.
  Pending pending_;
};

}  // namespace kvasir
