#include "store/token_index.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/checked.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_rules.h"

namespace kvasir {

using format::SectionKind;

namespace {

constexpr std::size_t section_facts = format::index_head_bytes / sizeof(uint32_t);
constexpr uint32_t max_levels = 32;
constexpr uint32_t index_version = 3;  // of the meaning of the words

}  // namespace

SectionKind section_of(IndexKind kind) {
  switch (kind) {
    case IndexKind::hnsw:
      return SectionKind::hnsw;
    case IndexKind::ood:
      return SectionKind::ood;
    case IndexKind::ivf:
      break;
  }
  return SectionKind::ivf;
}

const char* name_of(IndexKind kind) { return format::name_of(section_of(kind)); }

TokenIndex::Words TokenIndex::encode(uint32_t entry, std::span<const Lists> levels,
                                     std::span<const float> floats) {
  Words out = {static_cast<uint32_t>(levels.size()), entry, static_cast<uint32_t>(floats.size()),
               0};
  for (const Lists& level : levels) {
    std::size_t links = 0;
    for (const auto& list : level.lists) links += list.size();
    out.push_back(static_cast<uint32_t>(level.lists.size()));
    out.push_back(static_cast<uint32_t>(links));
  }
  for (const Lists& level : levels) {
    out.insert(out.end(), level.items.begin(), level.items.end());
    uint32_t at = 0;
    out.push_back(at);
    for (const auto& list : level.lists) out.push_back(at += static_cast<uint32_t>(list.size()));
    for (const auto& list : level.lists) out.insert(out.end(), list.begin(), list.end());
  }
  for (float f : floats) out.push_back(std::bit_cast<uint32_t>(f));
  return out;
}

// The parts of a head's words. False when their sizes disagree or an item does not exist.
bool TokenIndex::view(std::span<const uint32_t> words, Head* out) const {
  if (words.size() < 4 || words[0] == 0 || words[0] > max_levels || words[1] >= items() ||
      words[3] != 0)
    return false;
  const uint32_t levels = words[0], floats = words[2];
  std::size_t at = 4 + std::size_t{2} * levels;
  if (words.size() < at) return false;
  out->entry = words[1];
  out->levels.assign(levels, {});
  const auto take = [&](uint64_t count, std::span<const uint32_t>* part) {
    if (count > words.size() - at) return false;
    *part = words.subspan(at, count);
    at += count;
    return true;
  };
  for (uint32_t l = 0; l < levels; ++l) {
    Level& level = out->levels[l];
    const uint32_t lists = words[4 + 2 * l], links = words[5 + 2 * l];
    if (l > 0 && !take(lists, &level.items)) return false;
    if (!take(uint64_t{lists} + 1, &level.begins) || !take(links, &level.links)) return false;
    if (level.begins.front() != 0 || level.begins.back() != links ||
        !std::is_sorted(level.begins.begin(), level.begins.end()))
      return false;
    const auto is_item = [&](uint32_t i) { return i < items(); };
    if (!std::all_of(level.items.begin(), level.items.end(), is_item) ||
        !std::all_of(level.links.begin(), level.links.end(), is_item))
      return false;
    if (std::adjacent_find(level.items.begin(), level.items.end(), std::greater_equal<>()) !=
        level.items.end())
      return false;
    if (l == 0 && kind_ != IndexKind::ivf && lists != items()) return false;
  }
  std::span<const uint32_t> rest;
  if (!take(floats, &rest) || at != words.size()) return false;
  const uint32_t dim = shape_.page.dim;
  if (kind_ == IndexKind::ivf && floats != uint64_t{out->levels[0].lists()} * dim) return false;
  if (kind_ == IndexKind::ood && floats != 0 && floats != dim * dim) return false;
  out->floats = {reinterpret_cast<const float*>(rest.data()), rest.size()};
  // So that distances stay finite.
  const float max_value =
      kind_ == IndexKind::ood ? static_cast<float>(dim) : std::numeric_limits<float>::max();
  return std::all_of(out->floats.begin(), out->floats.end(),
                     [=](float x) { return std::fabs(x) <= max_value; });
}

std::shared_ptr<TokenIndex> TokenIndex::make(IndexKind kind, const StoreShape& shape,
                                             const Extent& extent, std::vector<Words> heads,
                                             const CancelLatch* cancel) {
  std::shared_ptr<TokenIndex> index(new TokenIndex(kind, shape, extent));
  index->words_ = std::move(heads);
  index->views_.resize(index->words_.size());
  for (std::size_t i = 0; i < index->words_.size(); ++i)
    if ((cancel && cancel->fired()) || !index->view(index->words_[i], &index->views_[i]))
      return nullptr;
  return index;
}

uint64_t TokenIndex::bytes() const {
  uint64_t words = 0;
  for (const Words& w : words_) words += w.size();
  for (const auto& w : mapped_) words += w.size();
  return words * sizeof(uint32_t);
}

uint64_t TokenIndex::head_bytes() const {
  return round_up(section_facts * sizeof(uint32_t) + heads_total() * sizeof(uint64_t),
                  format::block_bytes);
}

uint64_t TokenIndex::file_bytes() const { return head_bytes() + bytes(); }

Status TokenIndex::write(uint32_t valid,
                         const std::function<Status(const void*, std::size_t)>& write) const {
  Array<std::byte> head(head_bytes());
  const uint32_t facts[section_facts] = {index_version, extent_.first_token, extent_.tokens,
                                         valid,         extent_.built,       extent_.graphs};
  std::memcpy(head.data(), facts, sizeof facts);
  for (std::size_t i = 0; i < heads_total(); ++i) {
    const uint64_t size = file_ ? mapped_[i].size() : words_[i].size();
    std::memcpy(head.data() + sizeof facts + i * sizeof size, &size, sizeof size);
  }
  RETURN_IF_ERROR(write(head.data(), head.size()));
  for (std::size_t i = 0; i < heads_total(); ++i) {
    // damage must not be written with valid checksums
    if (file_ && !intact(i)) return file_->failure();
    const std::span<const uint32_t> words =
        file_ ? mapped_[i] : std::span<const uint32_t>(words_[i]);
    RETURN_IF_ERROR(write(words.data(), words.size_bytes()));
  }
  return {};
}

Status TokenIndex::map(IndexKind kind, const StoreShape& shape, uint32_t group,
                       std::shared_ptr<const CacheFile> file, uint32_t sealed,
                       std::shared_ptr<TokenIndex>* out, uint32_t* valid) {
  out->reset();
  const CacheFile::Section* section = file->find(section_of(kind));
  if (!section || section->bytes == 0) return {};
  std::shared_ptr<TokenIndex> index(new TokenIndex(kind, shape, {}));
  const auto corrupt = [&](const char* reason) {
    return Status::error(Code::corrupt, "%s: section '%s' %s; nothing was loaded",
                         file->path().c_str(), name_of(kind), reason);
  };
  uint32_t facts[section_facts];
  if (section->bytes < sizeof facts) return corrupt("is too short");
  if (!file->check(*section, 0, sizeof facts)) return file->failure();
  const std::byte* at = file->bytes(section->kind).data();
  std::memcpy(facts, at, sizeof facts);
  if (facts[0] != index_version) return {};  // it is built again
  const uint32_t page_tokens = shape.page.page_tokens;
  const IndexFacts stored{facts[1], facts[2], facts[3], facts[4], facts[5]};
  if (const char* reason = wrong_index(stored, section->kind, page_tokens, sealed, group))
    return corrupt(reason);
  index->extent_ = {facts[1], facts[2], facts[4], facts[5]};
  const uint64_t head = index->head_bytes();
  if (section->bytes < head) return corrupt("is too short");
  if (!file->check(*section, 0, head)) return file->failure();
  uint64_t rest = (section->bytes - head) / sizeof(uint32_t);
  const auto* words = reinterpret_cast<const uint32_t*>(at + head);
  for (std::size_t i = 0; i < index->heads_total(); ++i) {
    uint64_t size;
    std::memcpy(&size, at + sizeof facts + i * sizeof size, sizeof size);
    if (size > rest) return corrupt("does not have the size of its parts");
    index->mapped_.push_back({words, static_cast<std::size_t>(size)});
    words += size;
    rest -= size;
  }
  if (rest != 0 || (section->bytes - head) % sizeof(uint32_t) != 0)
    return corrupt("does not have the size of its parts");
  index->file_ = std::move(file);
  *valid = facts[3];
  *out = std::move(index);
  return {};
}

const char* TokenIndex::wrong(uint32_t valid, uint64_t sealed) const {
  const IndexFacts facts{extent_.first_token, extent_.tokens, valid, extent_.built, extent_.graphs};
  return wrong_index(facts, section_of(kind_), shape_.page.page_tokens, sealed, extent_.graphs);
}

// Whether a head's words in the file are as written.
bool TokenIndex::intact(std::size_t head) const {
  const CacheFile::Section& section = *file_->find(section_of(kind_));
  const auto* begin = file_->bytes(section.kind).data();
  const auto* at = reinterpret_cast<const std::byte*>(mapped_[head].data());
  return file_->check(section, static_cast<uint64_t>(at - begin), mapped_[head].size_bytes());
}

// One head at a time, because a long text's index may have gigabytes. Forks share it, so one of
// them may wait for another.
Status TokenIndex::check(const Cancel* cancel) {
  const auto stopped = [] {
    return Status::error(Code::cancelled, "cancelled; the index is unchanged");
  };
  std::unique_lock lock(checking_, std::defer_lock);
  while (!lock.try_lock_for(std::chrono::milliseconds(10)))
    if (is_cancelled(cancel)) return stopped();
  if (!views_.empty()) return {};
  std::vector<Head> views(mapped_.size());
  for (std::size_t i = 0; i < mapped_.size(); ++i) {
    if (is_cancelled(cancel)) return stopped();
    if (!intact(i)) return file_->failure();
    if (!view(mapped_[i], &views[i]))
      return Status::error(Code::corrupt, "%s: section '%s' names an item that does not exist",
                           file_->path().c_str(), name_of(kind_));
  }
  views_ = std::move(views);
  return {};
}

void TokenIndexes::truncate(uint64_t sealed) {
  for (Entry& e : entries) {
    if (!e.index) continue;
    e.valid = static_cast<uint32_t>(std::min<uint64_t>(e.valid, sealed));
    if (e.valid <= e.index->first_token()) e = {};
  }
}

uint64_t TokenIndexes::private_bytes() const {
  uint64_t bytes = 0;
  for (const Entry& e : entries) bytes += e.index ? e.index->private_bytes() : 0;
  return bytes;
}

}  // namespace kvasir
