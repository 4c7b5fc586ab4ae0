// The pages of a sequence where a GPU reads them: host memory that is registered with it.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "offload/kv_mirror.h"
#include "os/os.h"

namespace kvasir {
namespace {

// extents of which each page that is sealed makes the GPU forget its quads
constexpr uint32_t max_forgotten = 8;
// in which a long text is shared, or fewer where a device shares more at once: an answer begins
// without, and soon is faster
constexpr uint64_t share_steps = 16;
// of a step, and one piece more: what a mapped file has to be read for first takes long
constexpr uint64_t longest_share_ns = 50'000'000;

// Of memory that has one array for each extent, one behind the other, the part around `array` that
// is shared in one piece: whole arrays and whole pages of the system, so that pieces do not
// overlap, and the same for all devices, which share as much at once.
std::span<const std::byte> piece_of(std::span<const std::byte> memory, const void* array,
                                    std::size_t array_bytes, uint64_t max_bytes) {
  const std::size_t unit = std::lcm(array_bytes, system_page),
                    size =
                        unit * std::max<std::size_t>(1, static_cast<std::size_t>(max_bytes / unit));
  const auto* const begin = memory.data();
  if (memory.size() <= max_bytes || reinterpret_cast<uint64_t>(begin) % system_page) return memory;
  const auto at =
      static_cast<std::size_t>(static_cast<const std::byte*>(array) - begin) / size * size;
  return memory.subspan(at, std::min(size, memory.size() - at));
}

}  // namespace

void KvMirror::forget_regions() {
  for (const Region& r : regions_) device_->unregister_host(r.begin);
  regions_.clear();
  addressed_ = 0;
}

void KvMirror::trim() {
  const std::size_t dropped = std::erase_if(regions_, [&](const Region& r) {
    const bool is_last = PageStore::is_last(r.keep);
    if (is_last) device_->unregister_host(r.begin);
    return is_last;
  });
  if (dropped > 0) addressed_ = 0;
  if (regions_.empty()) has_begun_ = false;
}

uint64_t KvMirror::seen(const void* p) {
  const uint64_t address = address_of(p);
  // Neighbouring extents lie in the same region or in the next.
  for (std::size_t tried = 0; tried < regions_.size(); ++tried) {
    const std::size_t at = (last_seen_ + tried) % regions_.size();
    Region& r = regions_[at];
    if (address < r.begin || address >= r.end) continue;
    last_seen_ = at;
    r.used = true;
    return r.seen + (address - r.begin);
  }
  return 0;
}

Status KvMirror::share(std::span<const std::byte> memory, const std::shared_ptr<const void>& keep,
                       uint64_t* allowance) {
  Region r{address_of(memory.data()), address_of(memory.data() + memory.size()), 0, true, keep};
  regions_.reserve(regions_.size() + 1);
  RETURN_IF_ERROR(device_->register_host(&r.begin, &r.end, allowance, &r.seen));
  if (r.seen) regions_.push_back(std::move(r));
  return {};
}

// Sets aside what is known of the extents that are another than at the last update. The newest one
// changes with each page that is sealed, and is shared anew when it was full before a step back.
// Pages behind all that were read before change no quad that is kept. Others, after a step back,
// change the quads from the first of them on; once that is long past all is forgotten, and then
// little is again.
void KvMirror::note_changes(const PageStore& pages) {
  const auto before = static_cast<uint32_t>(page_stamps_.size());
  page_stamps_.resize(pages.extents());
  uint32_t first = pages.extents(), same = 0;  // pages of the first one that has changed
  for (uint32_t e = pages.extents(); e-- > 0;) {
    if (page_stamps_[e] == pages.stamp(e)) continue;
    first = e, same = pages.same_pages(e, page_stamps_[e]);
    page_stamps_[e] = pages.stamp(e);
  }
  if (first == pages.extents() && before <= first) return;
  if (first + 1 < before || before == 0 || pages.extents() == 0)
    return void(addressed_ = 0), cannot_share_ = Fallback::none, forget_kept();
  if (first < before) trim();
  addressed_ = std::min(addressed_, first);
  const uint32_t from = first * shape_.page.extent_quads() + same * shape_.page.page_quads();
  if (from >= kept_end_) return;
  if (from > changed_from_ && from - changed_from_ > max_forgotten * shape_.page.extent_quads())
    forget_kept();
  changed_from_ = std::min(changed_from_, from);
  changed_since_ = step_ + 1;
}

// *extents: the first ones, which are shared, and the one that is being filled. What others have
// shared is at once.
Status KvMirror::share_pages(const KvStore& store, uint32_t devices, uint32_t* extents) {
  const PageStore& pages = store.pages();
  const uint64_t all = pages.extents() * shape_.slab_bytes(),
                 max_bytes = device_->info().registration_bytes;
  if (all > os::physical_memory() / 4 * 3)
    return cannot_share_ = Fallback::too_many_pages,
           Status::error(Code::unsupported, "%s", text_of(cannot_share_));
  uint64_t allowance = all <= max_bytes ? UINT64_MAX
                       : has_begun_     ? std::max(max_bytes, all / share_steps) / devices + 1
                                        : 0;
  has_begun_ = true;
  const uint64_t begin = os::now_ns();
  for (uint32_t e = *extents = addressed_; e < pages.extents(); *extents = ++e) {
    const PageStore::Lasting at = pages.lasting(e);
    if (!at.keep) continue;
    const auto share_array = [&](const void* array, std::span<const std::byte> memory,
                                 std::size_t bytes) {
      if (seen(array)) return Status();
      return share(at.memory[1].empty() ? memory : piece_of(memory, array, bytes, max_bytes),
                   at.keep, &allowance);
    };
    RETURN_IF_ERROR(
        share_array(at.pages, at.memory[0], shape_.heads_total() * PageShape::pages_bytes()));
    if (!seen(at.pages)) return {};
    RETURN_IF_ERROR(
        share_array(at.scales, at.memory[1], shape_.heads_total() * shape_.page.scales_bytes()));
    if (!seen(at.scales)) return {};
    if (all > max_bytes && os::now_ns() - begin > longest_share_ns) allowance = 0;
  }
  return {};
}

// The extent that is being filled has a copy of its own, of the layers' heads alone.
void KvMirror::copy_last_extent(const PageStore& pages, ThreadPool* pool) {
  const uint32_t e = pages.extents() - 1, in_extent = pages.pages() - e * extent_pages,
                 same = std::min(pages.same_pages(e, last_stamp_), last_pages_);
  const std::size_t scale_bytes = shape_.page.scales_bytes(),
                    its_pages = heads_total() * PageShape::pages_bytes(),
                    begin = same * std::size_t{page_bytes},
                    size = in_extent * std::size_t{page_bytes} -
                           std::min(begin, in_extent * std::size_t{page_bytes});
  pool->run(static_cast<uint32_t>(heads_total()), [&](uint32_t h, uint32_t) {
    const ExtentView view = pages.extent(first_ + h / shape_.kv_heads, h % shape_.kv_heads, e);
    std::memcpy(last_.get() + h * PageShape::pages_bytes() + begin, view.pages + begin, size);
    std::memcpy(last_.get() + its_pages + h * scale_bytes, view.scales, scale_bytes);
  });
  last_stamp_ = pages.stamp(e), last_pages_ = in_extent;
}

Status KvMirror::put_addresses(const UpdateRequest& request) {
  const PageStore& pages = request.store.pages();
  DeviceStream* const stream = request.streams.own;
  const uint32_t extents = pages.extents();
  const std::size_t scale_bytes = shape_.page.scales_bytes();
  const uint32_t first = addressed_;
  const std::size_t count = extents - first;
  RETURN_IF_ERROR(need_staging(request.cancel));
  auto* const staged = reinterpret_cast<uint64_t*>(staged_.data);
  if (first == 0)
    for (Region& r : regions_) r.used = false;
  for (uint32_t e = first; e < extents; ++e) {
    const PageStore::Lasting at = pages.lasting(e);
    if (!at.keep) {
      if (e + 1 < extents)
        return cannot_share_ = Fallback::spilled,
               Status::error(Code::unsupported, "%s", text_of(cannot_share_));
      const std::size_t its_pages = heads_total() * PageShape::pages_bytes();
      if (!last_.get())
        RETURN_IF_ERROR(last_.allocate(device_, its_pages + heads_total() * scale_bytes));
      if (last_stamp_ != pages.stamp(e) || last_pages_ + e * extent_pages != pages.pages())
        copy_last_extent(pages, request.pool);
      staged[e - first] = address_of(last_.get());
      staged[count + e - first] = address_of(last_.get() + its_pages);
      continue;
    }
    staged[e - first] = seen(at.pages) + first_head() * PageShape::pages_bytes();
    staged[count + e - first] = seen(at.scales) + first_head() * scale_bytes;
  }
  if (first == 0)
    std::erase_if(regions_, [&](const Region& r) {
      if (!r.used) device_->unregister_host(r.begin);
      return !r.used;
    });
  RETURN_IF_ERROR(send(stream, pages_at_.get() + first, staged, count * sizeof(uint64_t)));
  RETURN_IF_ERROR(send(stream, scales_at_.get() + first, staged + count, count * sizeof(uint64_t)));
  addressed_ = extents;
  return {};
}

}  // namespace kvasir
