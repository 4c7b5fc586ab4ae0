#include "store/representatives.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_rules.h"

namespace kvasir {

using format::SectionKind;

namespace {

constexpr uint64_t head_bytes = format::representatives_head_bytes;
constexpr double largest_score = 1e30;  // sums over a window of them stay finite

uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

Representatives::Representatives(const StoreShape& shape, uint32_t window_tokens)
    : shape_(shape), window_(window_tokens), local_(std::min(window_tokens, max_local)),
      wanted_(window_tokens != UINT32_MAX) {}

void Representatives::forget() {
  known_ = false;
  blocks_.clear();
  undecided_.clear();
  mapped_.reset();
}

bool Representatives::intact() const {
  if (!mapped_ || mapped_->verified) return true;
  const CacheFile::Section& section = *mapped_->file->find(SectionKind::representatives);
  if (!mapped_->file->check(section, 0, section.bytes)) return false;
  mapped_->verified = true;
  return true;
}

Status Representatives::damaged() const {
  if (mapped_) RETURN_IF_ERROR(mapped_->file->failure());
  return Status::error(Code::internal, "representatives were reported as damaged and are not");
}

Status Representatives::prepare(uint32_t n, uint32_t pages, const PageStore& store,
                                Overlap overlap) {
  if (!known_) return {};
  const uint32_t page_tokens = shape_.page.page_tokens, heads = shape_.heads_total(),
                 block_pages = block_tokens / page_tokens;
  // So that decode seldom grows it.
  undecided_.reserve(
      round_up(undecided_.size() + std::size_t{n} * heads, std::size_t{block_tokens} * heads));
  added_.assign((std::size_t{local_} + n) * heads, 0.0f);
  overlap_ = overlap;
  const uint32_t at_once = overlap == Overlap::lists   ? heads
                           : overlap == Overlap::heads ? shape_.kv_heads
                                                       : 1;
  if (const std::size_t wanted = (std::size_t{n} + 1) * shape_.page.dim * at_once;
      wanted > sums_.size) {
    sums_ = {};
    sums_.floats = make_buffer<double>(wanted);
    sums_.size = wanted;
  }
  const uint32_t complete = pages / block_pages;
  if (complete <= blocks()) return {};
  blocks_.reserve(complete);
  room_.clear();
  while (room_.size() < complete - blocks()) {
    auto* memory = static_cast<uint16_t*>(allocate_zeroed(block_size() * sizeof(uint16_t)));
    if (!memory) throw std::bad_alloc();
    room_.push_back(
        {memory, std::shared_ptr<uint16_t>(memory, [](uint16_t* p) { deallocate(p); })});
  }
  for (uint32_t p = blocks() * block_pages; p < store.pages(); ++p)
    for (uint32_t at = 0; at < heads; ++at)
      if (!store.intact_page(at / shape_.kv_heads, at % shape_.kv_heads, p)) return store.damaged();
  return {};
}

// Prefix sums of the queries: sums [n + 1][dim], of the tokens before each.
static void sum_queries(const Representatives::Queries& queries, uint32_t n, const PageShape& shape,
                        double* sums) {
  std::fill_n(sums, shape.dim, 0.0);
  for (uint32_t j = 0; j < n; ++j) {
    const double* sum = sums + std::size_t{j} * shape.dim;
    double* next = sums + (std::size_t{j} + 1) * shape.dim;
    for (uint32_t d = 0; d < shape.head_dim; ++d) {
      float all = 0;
      for (uint32_t r = 0; r < queries.group; ++r)
        all += queries.q[j * queries.width + r * shape.head_dim + d];
      next[d] = sum[d] + static_cast<double>(all);
    }
  }
}

void Representatives::observe(uint32_t layer, uint32_t head, const Keys& keys, uint32_t n,
                              const Queries& queries) {
  if (!known_) return;
  const uint32_t dim = shape_.page.dim, head_dim = shape_.page.head_dim,
                 heads = shape_.heads_total(), before = keys.before;
  const std::size_t at = std::size_t{layer} * shape_.kv_heads + head;
  const uint32_t place = overlap_ == Overlap::lists   ? static_cast<uint32_t>(at)
                         : overlap_ == Overlap::heads ? head
                                                      : 0;
  double* const sums = sums_.floats.get() + place * (std::size_t{n} + 1) * dim;
  sum_queries(queries, n, shape_.page, sums);
  for (uint32_t row = before - std::min(before, local_); row + 1 < before + n; ++row) {
    // Tokens of the step that score this one.
    const uint32_t first = row + 1 > before ? row + 1 - before : 0;
    const uint32_t end = std::min(n, row + 1 + local_ - before);
    const double *from = sums + std::size_t{first} * dim, *to = sums + std::size_t{end} * dim;
    const float* key = keys.k + std::size_t{row} * dim;
    double score = 0;
    for (uint32_t d = 0; d < head_dim; ++d)
      score +=
          (to[d] - from[d]) * static_cast<double>(key[d] + (keys.centre ? keys.centre[d] : 0.0f));
    score = std::clamp(score / local_, -largest_score, largest_score);
    added_[(std::size_t{row} + local_ - before) * heads + at] = static_cast<float>(score);
  }
}

void Representatives::keep_first(uint32_t kept, uint32_t n) {
  if (!known_) return;
  const uint32_t heads = shape_.heads_total();
  // Rows of added_: the first token of the step is row local_.
  for (uint32_t row = 0; row < local_ + kept; ++row) {
    // Tokens of the step that score this one.
    const uint32_t first = row < local_ ? 0 : row + 1 - local_;
    const uint32_t all = std::min(n, row + 1) - first,
                   left = std::min(kept, row + 1) - std::min(kept, first);
    if (left == all) continue;
    for (uint32_t at = 0; at < heads; ++at)
      added_[std::size_t{row} * heads + at] *= static_cast<float>(left) / static_cast<float>(all);
  }
}

void Representatives::commit(uint32_t n, const PageStore& pages, ThreadPool* pool) {
  if (!known_) return;
  const std::size_t heads = shape_.heads_total(), held = undecided_.size(),
                    known = std::min(held, std::size_t{local_} * heads);
  undecided_.resize(held + n * heads);  // prepare() made the room
  const float* added = added_.data() + (std::size_t{local_} * heads - known);
  for (std::size_t i = 0; i < known + n * heads; ++i) undecided_[held - known + i] += added[i];
  const std::size_t complete = uint64_t{pages.pages()} * shape_.page.page_tokens / block_tokens;
  if (complete <= blocks_.size()) return;
  const auto more = static_cast<uint32_t>(complete - blocks_.size());
  pool->run(shape_.heads_total(), [&](uint32_t at, uint32_t) {
    for (uint32_t b = 0; b < more; ++b)
      decide(pages, at, b,
             room_[room_.size() - 1 - b].memory.get() + std::size_t{at} * shape_.page.dim);
  });
  for (uint32_t b = 0; b < more; ++b) blocks_.push_back(std::move(room_.back())), room_.pop_back();
  undecided_.erase(undecided_.begin(), undecided_.begin() + std::ptrdiff_t{more} * block_tokens *
                                                                static_cast<std::ptrdiff_t>(heads));
}

// Decides one head's part of an undecided block.
void Representatives::decide(const PageStore& pages, uint32_t at, uint32_t block,
                             uint16_t* to) const {
  const PageShape& page = shape_.page;
  const uint32_t heads = shape_.heads_total(), first = (blocks() + block) * block_tokens;
  const float* scores = undecided_.data() + std::size_t{block} * block_tokens * heads + at;
  uint32_t chosen[per_block] = {};
  uint32_t count = 0;
  // The sinks are always attended.
  for (uint32_t t = first == 0 ? page.page_tokens : 0; t < block_tokens; ++t) {
    uint32_t place = count;
    while (place > 0 &&
           scores[std::size_t{t} * heads] > scores[std::size_t{chosen[place - 1]} * heads])
      --place;
    if (place == per_block) continue;
    count = std::min(count + 1, per_block);
    std::copy_backward(chosen + place, chosen + count - 1, chosen + count);
    chosen[place] = t;
  }
  float mean[max_dim] = {};
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t token = first + chosen[i], t = token % page.page_tokens;
    const PageRef ref =
        pages.page(at / shape_.kv_heads, at % shape_.kv_heads, token / page.page_tokens);
    const auto scale = std::bit_cast<float>(uint32_t{ref.scales[t]} << 16);
    for (uint32_t d = 0; d < page.dim; ++d)
      mean[d] +=
          static_cast<float>(ref.data[page.key_at(t) + d / 4 * PageShape::key_stride + d % 4]) *
          scale / per_block;
  }
  for (uint32_t d = 0; d < page.dim; ++d) to[d] = to_bf16(mean[d]);
}

void Representatives::rewind(uint64_t to) {
  const uint64_t had = tokens();
  if (to == 0) {
    forget();
    known_ = wanted_;
  }
  if (!known_ || to >= had) return;
  const std::size_t heads = shape_.heads_total();
  if (blocks() * uint64_t{block_tokens} > to) {
    blocks_.resize(to / block_tokens);
    undecided_.assign(static_cast<std::size_t>(to % block_tokens) * heads, 0.0f);
    return;
  }
  const uint64_t first = uint64_t{blocks()} * block_tokens;
  undecided_.resize(static_cast<std::size_t>(to - first) * heads);
  for (uint64_t m = std::max(first, to - std::min<uint64_t>(to, local_)); m < to; ++m) {
    const auto left = static_cast<float>(to - 1 - m),
               all = static_cast<float>(std::min<uint64_t>(local_, had - 1 - m));
    for (std::size_t at = 0; at < heads; ++at)
      undecided_[static_cast<std::size_t>(m - first) * heads + at] *= left / all;
  }
}

uint64_t Representatives::private_bytes() const {
  uint64_t bytes =
      (undecided_.size() + added_.size()) * sizeof(float) + sums_.size * sizeof(double);
  for (const Block& b : blocks_) bytes += b.memory ? block_size() * sizeof(uint16_t) : 0;
  return bytes;
}

uint64_t Representatives::max_bytes(uint64_t tokens, uint32_t step) const {
  if (!wanted_) return 0;
  const uint64_t undecided = uint64_t{window_} + step + shape_.page.page_tokens + block_tokens;
  return tokens / block_tokens * block_size() * sizeof(uint16_t) +
         (undecided + local_ + step) * shape_.heads_total() * sizeof(float) +
         (uint64_t{step} + 1) * shape_.page.dim * sizeof(double);
}

uint64_t Representatives::file_bytes() const {
  return known_ && tokens() > 0 ? head_bytes + blocks_.size() * block_size() * sizeof(uint16_t) +
                                      undecided_.size() * sizeof(float)
                                : 0;
}

Status Representatives::write(const std::function<Status(const void*, std::size_t)>& write) const {
  if (file_bytes() == 0) return {};
  if (!intact()) return damaged();
  const uint32_t head[] = {blocks(),
                           static_cast<uint32_t>(undecided_.size() / shape_.heads_total()), 0, 0};
  static_assert(sizeof head == head_bytes);
  RETURN_IF_ERROR(write(head, sizeof head));
  for (const Block& b : blocks_) RETURN_IF_ERROR(write(b.data, block_size() * sizeof(uint16_t)));
  return undecided_.empty() ? Status()
                            : write(undecided_.data(), undecided_.size() * sizeof(float));
}

const char* Representatives::wrong(uint64_t tokens, uint32_t window_count) const {
  if (file_bytes() == 0) return nullptr;
  if (const char* reason = wrong_representatives(blocks(), undecided_.size() / shape_.heads_total(),
                                                 tokens, window_count))
    return reason;
  return wrong_floats(undecided_);
}

Status Representatives::map(std::shared_ptr<const CacheFile> file, uint64_t tokens,
                            uint32_t window_count, Representatives* out) {
  const CacheFile::Section* section = file->find(SectionKind::representatives);
  const auto corrupt = [&](const char* reason) {
    return Status::error(Code::corrupt, "%s: section 'representatives' %s; nothing was loaded",
                         file->path().c_str(), reason);
  };
  Representatives found(out->shape_, out->local_);
  const std::size_t heads = found.shape_.heads_total(), size = found.block_size();
  if (section->bytes < head_bytes) return corrupt("is too short");
  if (!file->check(*section, 0, head_bytes)) return file->failure();
  const std::byte* at = file->bytes(SectionKind::representatives).data();
  uint32_t head[4];
  std::memcpy(head, at, sizeof head);
  const uint64_t blocks = head[0], undecided = head[1];
  if (const char* reason = wrong_representatives(blocks, undecided, tokens, window_count);
      reason || head[2] || head[3])
    return corrupt(reason ? reason : "has numbers that are reserved");
  const uint64_t scores_at = head_bytes + blocks * size * sizeof(uint16_t),
                 scores_bytes = undecided * heads * sizeof(float);
  if (section->bytes != scores_at + scores_bytes)
    return corrupt("does not have the size of its tokens");
  if (!file->check(*section, scores_at, scores_bytes)) return file->failure();
  found.undecided_.resize(static_cast<std::size_t>(undecided) * heads);
  if (scores_bytes > 0) std::memcpy(found.undecided_.data(), at + scores_at, scores_bytes);
  if (const char* reason = wrong_floats(found.undecided_)) return corrupt(reason);
  const auto* keys = reinterpret_cast<const uint16_t*>(at + head_bytes);
  for (uint64_t b = 0; b < blocks; ++b) found.blocks_.push_back({keys + b * size, nullptr});
  found.mapped_ = std::make_shared<Mapped>();
  found.mapped_->file = std::move(file);
  *out = std::move(found);
  return {};
}

}  // namespace kvasir
