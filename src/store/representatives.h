// Representative tokens: of every block of the sealed text, the few that the tokens right after
// them attended most (InfLLM, arXiv 2402.04617, section 3.2). A block is later found by its
// representatives' keys alone.
//
//   score    r_m = 1/l sum over j = 1 .. l of q_{m+j} . k_m: how much the l tokens that follow
//            token m ask for it; l is the local window, here as many tokens as stay in full
//            precision, at most 64. Queries of a KV head's group are added up, K is as it was
//            before centring
//   choose   when all 128 tokens of a block are sealed, the 4 with the largest scores
//   keep     their mean key, in bf16: the relevance of a block, the sum of q . k over them, needs
//            no more (the authors' program keeps it too)
//
// Scores of one step are sums over its queries, r_m . sum of q, so a step costs two passes over its
// rows. Tokens that are taken back leave the scores of those before them in proportion; a block of
// which tokens are taken back is scored again by what follows.
//
// A step is prepare(), observe() for every layer and head, commit(); until then nothing is visible.
// Blocks are shared by forks, or lie in a mapped cache file. Threads: const functions may run
// together, and observe() of different layers where prepare() was told so; the rest is exclusive.
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
  // the paper's; a multiple of a page's
  static constexpr uint32_t block_tokens = representatives_block_tokens;
  static constexpr uint32_t per_block = 4;   // the paper's
  static constexpr uint32_t max_local = 64;  // tokens

  Representatives(const StoreShape& shape, uint32_t window_tokens);

  // Whether the text was read with them; nothing is kept otherwise.
  bool known() const { return known_; }
  void forget();
  // The same for good: no step costs anything for them.
  void drop() { forget(), wanted_ = false; }
  // that have been decided: some may be in the window again
  uint32_t blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  const uint16_t* key(uint32_t layer, uint32_t head, uint32_t block) const {  // bf16 [dim], centred
    return blocks_[block].data + (std::size_t{layer} * shape_.kv_heads + head) * shape_.page.dim;
  }
  bool intact() const;  // as PageStore::intact_page; of all blocks, once
  Status damaged() const;

  // Room for n more tokens, and for the blocks that will be complete when `pages` are sealed;
  // checks the pages that those are made from. Throws std::bad_alloc; Code::corrupt. together: what
  // will be observed by several threads at once, which takes memory that max_bytes() does not
  // count.
  // heads: those of one layer; lists: those of all layers
  enum class Together { nothing, heads, lists };
  Status prepare(uint32_t n, uint32_t pages, const PageStore& store,
                 Together together = Together::nothing);
  // Of one layer and KV head. k: [before + n][dim] the window's keys with the step's, centre: [dim]
  // what was subtracted from them, or null. q: the step's queries, `group` rows of head_dim one
  // after another, the next token's `width` floats on.
  void observe(uint32_t layer, uint32_t head, const float* k, uint32_t before, uint32_t n,
               const float* q, uint32_t group, std::size_t width, const float* centre);
  // Before commit(kept), of a step of n tokens: only the first `kept` stay. What the others'
  // queries gave is taken back as rewind() does it.
  void keep_first(uint32_t kept, uint32_t n);
  // The step's n tokens are there now, `pages` are sealed.
  void commit(uint32_t n, const PageStore& pages, ThreadPool* pool);
  // so that rewind() cannot fail
  void reserve_rewind() { undecided_.reserve(std::size_t{block_tokens} * shape_.heads_total()); }
  void rewind(uint64_t tokens);

  uint64_t private_bytes() const;
  // The most that those of a sequence of so many tokens take, during steps of up to `step` of them.
  uint64_t max_bytes(uint64_t tokens, uint32_t step) const;

  // The section of a cache file: u32 decided blocks, u32 undecided tokens, u64 0; bf16
  // [blocks][layers][kv_heads][dim] mean keys; f32 [undecided tokens][layers][kv_heads] scores. 0
  // bytes when there is nothing to write.
  uint64_t file_bytes() const;
  Status write(const std::function<Status(const void* data, std::size_t size)>& write) const;
  // Over a section of a mapped file, for a sequence of so many tokens, the last `window_count` in
  // the window. Code::corrupt.
  static Status map(std::shared_ptr<const CacheFile> file, uint64_t tokens, uint32_t window_count,
                    Representatives* out);
  // What a loader would refuse of what write() writes; null: nothing.
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
  uint32_t window_;  // tokens that stay in full precision
  uint32_t local_;   // tokens after a token that score it
  bool wanted_;      // not of a sequence that is never sealed
  bool known_ = wanted_;
  std::vector<Block> blocks_;
  Together together_ = Together::nothing;  // as prepare() has it
  std::vector<Block> room_;                // for those that the step completes
  Array<float> undecided_;                 // [tokens behind the blocks][layers * kv_heads]
  // [local + n][layers * kv_heads] by the step, to the last `local` tokens before it and to its own
  Array<float> added_;
  // [n + 1][dim] of queries, of each that may be observed together. Of the object, as what a step
  // needs it for: stays with it.
  struct Sums {
    Sums() = default;
    Sums(const Sums&) {}
    Sums(Sums&&) noexcept = default;
    Sums& operator=(Sums&& other) noexcept {
      size = std::exchange(other.size, 0), floats = std::move(other.floats);
      return *this;
    }
    std::size_t size = 0;
    Buffer<double> floats;  // not cleared: observe() writes what it reads
  };
  Sums sums_;
  std::shared_ptr<Mapped> mapped_;
};

}  // namespace kvasir
