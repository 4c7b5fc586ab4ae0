// Representative tokens: for every block of the sealed text, the few tokens that the tokens right
// after them attended most (InfLLM, arXiv 2402.04617, section 3.2). A block is later found by the
// keys of its representatives alone.
//
//   score    r_m = 1/l sum over j = 1 .. l of q_{m+j} . k_m: the attention of the l tokens that
//            follow token m to it. l is the local window, here window_tokens, at most 64. Queries
//            of a KV head's group are added up; K is as before centring
//   choose   when all 128 tokens of a block are sealed, the 4 with the largest scores
//   keep     their mean key, in bf16: the relevance of a block, the sum of q . k over them, needs
//            no more (the authors' program keeps it too)
//
// The scores of a step are sums over its queries, r_m . sum of q, so a step makes two passes over
// its rows. Tokens that are rewound take a proportional part off the scores of the tokens before
// them. A block that loses tokens is scored again by the tokens that follow.
//
// A step is prepare(), observe() for every layer and head, commit(). Nothing is visible before
// commit(). Forks share blocks; blocks may be in a mapped cache file. Threads: const functions may
// be called at once, and observe() as prepare() was configured; the others are exclusive.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "cachefile/section_rules.h"
#include "store/page_store.h"

namespace kvasir {

class Representatives {
 public:
  // As in the paper; a multiple of a page.
  static constexpr uint32_t block_tokens = representatives_block_tokens;
  static constexpr uint32_t per_block = 4;   // as in the paper
  static constexpr uint32_t max_local = 64;  // tokens

  Representatives(const StoreShape& shape, uint32_t window_tokens);

  // Whether prefill found them; otherwise nothing is kept.
  bool known() const { return known_; }
  void forget();
  // forget(), permanently: steps cost nothing for them.
  void drop() { forget(), wanted_ = false; }
  // Decided blocks; tokens of some may be in the window again.
  uint32_t blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  const uint16_t* key(uint32_t layer, uint32_t head, uint32_t block) const {  // bf16 [dim], centred
    return blocks_[block].data + (std::size_t{layer} * shape_.kv_heads + head) * shape_.page.dim;
  }
  bool intact() const;  // PageStore::intact_page of all blocks, once
  Status damaged() const;

  // Makes room for n more tokens and for the blocks that are complete when `pages` pages are
  // sealed; verifies the pages that these are made from. Throws std::bad_alloc; Code::corrupt.
  // overlap: the calls of observe() that may overlap, which take memory that max_bytes() does not
  // count. heads: of one layer; lists: of all layers.
  enum class Overlap { nothing, heads, lists };
  Status prepare(uint32_t n, uint32_t pages, const PageStore& store,
                 Overlap overlap = Overlap::nothing);
  // The keys of the window with those of a step, of one layer and KV head.
  struct Keys {
    const float* k;       // [before + tokens of the step][dim]
    uint32_t before;      // tokens of the window
    const float* centre;  // [dim] subtracted from the keys, or null
  };
  // The queries of a step: `group` rows of head_dim one after another, those of the next token
  // `width` floats later.
  struct Queries {
    const float* q;
    uint32_t group;
    std::size_t width;
  };
  // For one layer and KV head in a step of n tokens.
  void observe(uint32_t layer, uint32_t head, const Keys& keys, uint32_t n, const Queries& queries);
  // Before commit(kept), in a step of n tokens: keeps only the first `kept`. Takes the contribution
  // of the others off, as rewind() does.
  void keep_first(uint32_t kept, uint32_t n);
  // Makes the step's n tokens visible; `pages` has the sealed pages.
  void commit(uint32_t n, const PageStore& pages, ThreadPool* pool);
  // So that rewind() cannot fail.
  void reserve_rewind() { undecided_.reserve(std::size_t{block_tokens} * shape_.heads_total()); }
  void rewind(uint64_t tokens);

  uint64_t private_bytes() const;
  // The most bytes for a sequence of `tokens` tokens, during steps of up to `step` tokens.
  uint64_t max_bytes(uint64_t tokens, uint32_t step) const;

  // The section of a cache file: u32 decided blocks, u32 undecided tokens, u64 0; bf16
  // [blocks][layers][kv_heads][dim] mean keys; f32 [undecided tokens][layers][kv_heads] scores. 0
  // bytes without representatives.
  uint64_t file_bytes() const;
  Status write(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // From a section of a mapped file, for a sequence of `tokens` tokens with the last `window_count`
  // in the window. Code::corrupt.
  static Status map(std::shared_ptr<const CacheFile> file, uint64_t tokens, uint32_t window_count,
                    Representatives* out);
  // The reason why a loader would refuse the output of write(); null: none.
  const char* wrong(uint64_t tokens, uint32_t window_count) const;

 private:
  struct Block {
    const uint16_t* data = nullptr;    // [layers][kv_heads][dim]
    std::shared_ptr<uint16_t> memory;  // where it is private
  };
  struct Mapped {
    std::shared_ptr<const CacheFile> file;
    std::atomic<bool> verified{false};
  };
  uint64_t tokens() const {
    return uint64_t{blocks()} * block_tokens + undecided_.size() / shape_.heads_total();
  }
  std::size_t block_size() const { return std::size_t{shape_.heads_total()} * shape_.page.dim; }
  void decide(const PageStore& pages, uint32_t head, uint32_t block, uint16_t* to) const;

  StoreShape shape_;
  uint32_t window_;  // window_tokens
  uint32_t local_;   // tokens after a token that score it
  bool wanted_;      // false for sequences that are never sealed
  bool known_ = wanted_;
  std::vector<Block> blocks_;
  Overlap overlap_ = Overlap::nothing;  // as configured by prepare()
  std::vector<Block> room_;             // for the blocks that the step completes
  Array<float> undecided_;              // [tokens behind the blocks][layers * kv_heads]
  // [local + n][layers * kv_heads] contributions of the step to the last `local` tokens before it
  // and to its own tokens.
  Array<float> added_;
  // [n + 1][dim] sums of queries, one per overlapping call. A member, so that its memory is reused.
  struct Sums {
    Sums() = default;
    Sums(const Sums&) {}
    Sums(Sums&&) noexcept = default;
    Sums& operator=(Sums&& other) noexcept {
      size = std::exchange(other.size, 0), floats = std::move(other.floats);
      return *this;
    }
    std::size_t size = 0;
    Buffer<double> floats;  // not cleared: observe() writes before it reads
  };
  Sums sums_;
  std::shared_ptr<Mapped> mapped_;
};

}  // namespace kvasir
