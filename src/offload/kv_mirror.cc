#include "offload/kv_mirror.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "backend/first_failure.h"
#include "base/checked.h"
#include "os/os.h"

namespace kvasir {
namespace {

constexpr const char* what = "a sequence's summaries";
// of an extent's sketch, that threads copy side by side
constexpr uint32_t copied_parts = 8;
// extents of which each page that is sealed makes the GPU forget its quads
constexpr uint32_t max_forgotten = 8;
// extents, room for what is read and answered next: an eighth
constexpr uint32_t min_spare = 32, max_spare = 64;

// in which a long text is shared, or fewer where a device shares more at once: an answer begins
// without, and soon is faster
constexpr uint64_t share_steps = 16;
// of a step, and one piece more: what a mapped file has to be read for first takes long
constexpr uint64_t longest_share_ns = 50'000'000;

Status cancelled() {
  return Status::error(Code::cancelled, "cancelled; the sequence is as it was");
}

uint64_t address_of(const void* p) { return reinterpret_cast<uint64_t>(p); }

// How many extents of the sketch are in a block of at most `large` bytes: up to 16 where they are
// small, fewer of large ones, and so many that little is lost where the device hands out whole
// blocks of its own.
uint32_t extents_of_block(std::size_t extent_bytes, uint64_t large) {
  const auto most = static_cast<uint32_t>(std::clamp<uint64_t>(large / extent_bytes, 1, 16));
  uint32_t best = most;
  for (uint32_t n = most; n > most / 2; --n)
    if (Device::allocated_size(n * extent_bytes) * best < Device::allocated_size(best * extent_bytes) * n)
      best = n;
  return best;
}

// Of memory that has one array for each extent, one behind the other, the part around `array` that
// is shared in one piece: whole arrays and whole pages of the system, so that pieces do not
// overlap, and the same for all devices, which share as much at once.
std::span<const std::byte> piece_of(std::span<const std::byte> memory, const void* array,
                                    std::size_t array_bytes, uint64_t most) {
  constexpr std::size_t system_page = 4096;
  const std::size_t unit = std::lcm(array_bytes, system_page),
                    size = unit * std::max<std::size_t>(1, static_cast<std::size_t>(most / unit));
  if (memory.size() <= most || address_of(memory.data()) % system_page) return memory;
  const std::size_t at = (address_of(array) - address_of(memory.data())) / size * size;
  return memory.subspan(at, std::min(size, memory.size() - at));
}

}  // namespace

KvMirror::KvMirror(const std::shared_ptr<Device>& device, std::shared_ptr<DeviceSketches> sketches,
                   const StoreShape& shape, uint32_t first, uint32_t layers, uint32_t heads)
    : device_(device), ops_(device->kernels()), sketches_(std::move(sketches)), shape_(shape),
      first_(first), layers_(layers), heads_(heads),
      block_extents_(extents_of_block(sketch_bytes(), device->info().block_bytes)) {}

KvMirror::~KvMirror() { release(); }

uint64_t KvMirror::bytes_of_fork() {
  const uint64_t its_buffers =
      std::apply([](const auto&... b) { return (b.taken() + ...); }, buffers());
  return 2 * Device::allocated_size(block_extents_ * sketch_bytes()) + its_buffers;
}

void KvMirror::forget_regions() {
  for (const Region& r : regions_) device_->unregister_host(r.begin);
  regions_.clear();
  addressed_ = 0;
}

void KvMirror::release() {
  forget_regions();
  cannot_share_ = Fallback::none;
  ++generation_;
  extents_ = window_rows_ = 0;
  blocks_.clear();
  std::apply([](auto&... b) { (void(b = {}), ...); }, buffers());
  page_stamps_.clear(), sketch_stamps_.clear();
  forget_kept();
  basis_stamp_ = sinks_stamp_ = window_stamp_ = 0;
  has_begun_ = false;
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

Fallback KvMirror::unfit(const KvStore& store, const HeadShape& heads) {
  if (store.budget().bytes > 0) return Fallback::memory_limit;
  if (store.window_tokens() == KvStore::keep_all) return Fallback::full_precision;
  if (std::find(std::begin(attended_dims), std::end(attended_dims), store.shape().page.dim) ==
      std::end(attended_dims))
    return Fallback::head_size;
  if (heads.group() > max_attended_group) return Fallback::group_size;
  return Fallback::none;
}

Status KvMirror::send(DeviceStream* stream, void* to, const void* from, std::size_t size) {
  int error = ops_.upload(stream, to, from, size);
  if (!error) error = ops_.wait(stream);
  return device_->status(error, what);
}

// Everything that depends on how long the sequence is, but for the sketch. What was there is gone
// when it moves.
Status KvMirror::make_room(const KvStore& store) {
  const PageShape& page = shape_.page;
  const uint32_t rows = static_cast<uint32_t>(round_up(
      std::max(store.window_count(), store.window_tokens() + 2 * page.page_tokens) + max_tokens,
      32));
  if (store.pages().extents() <= extents_ && rows <= window_rows_) return {};
  const uint32_t extents =
      std::max(extents_, store.pages().extents() +
                             std::clamp(store.pages().extents() / 8, min_spare, max_spare));
  const std::size_t heads = heads_total();
  extents_ = window_rows_ = 0;
  ++generation_;
  window_ = {};  // never old and new together
  addressed_ = 0;
  basis_stamp_ = sinks_stamp_ = window_stamp_ = 0;
  Status s = sketch_at_.allocate(device_, extents, what);
  if (s.ok()) s = window_.allocate(device_, heads * 2 * rows * page.dim, what);
  if (s.ok()) s = pages_at_.allocate(device_, extents, what);
  if (s.ok()) s = scales_at_.allocate(device_, extents, what);
  if (s.ok()) s = basis_.allocate(device_, heads * page.dim * page.sketch_dim(), what);
  if (s.ok()) s = sinks_.allocate(device_, heads * 2 * page.page_tokens * page.dim, what);
  if (s.ok()) s = centre_.allocate(device_, heads * page.dim, what);
  if (s.ok()) s = counts_.allocate(device_, 1, what);
  if (s.ok()) s = budgets_.allocate(device_, layers_, what);
  if (s.ok() && !known_.get()) s = known_.allocate(device_, 1);
  if (!s.ok()) return s;
  blocks_moved_ = true;
  extents_ = extents;
  window_rows_ = rows;
  return {};
}

// Memory through which things go to the device, all sessions', until update() ends.
Status KvMirror::need_staging(const CancelLatch& cancel) {
  if (staged_.data) return {};
  // of a head's window
  const std::size_t head_bytes = std::size_t{2} * window_rows_ * shape_.page.dim * sizeof(float);
  return device_->stage(std::max({2 * sketch_bytes(), head_bytes, basis_.bytes(), sinks_.bytes(),
                                  2 * extents_ * sizeof(uint64_t)}),
                        cancel, &staged_);
}

// Of the first extents those whose sketch is another than what the device has. Sessions do so one
// after the other: forks that begin together find each other's.
Status KvMirror::put_summaries(const KvStore& store, uint32_t extents, ThreadPool* pool,
                               const Streams& streams, const CancelLatch& cancel) {
  const std::size_t size = sketch_bytes();
  const auto same = [&] {
    for (uint32_t e = 0; e < extents; ++e)
      if (sketch_stamps_[e] != store.sketch().stamp(e)) return false;
    return true;
  };
  if (!blocks_moved_ && sketch_stamps_.size() == extents && same()) return {};
  if (Status s = need_staging(cancel); !s.ok()) return s;
  sketch_stamps_.clear();
  if (const std::size_t count = ceil_div(extents, block_extents_); count != blocks_.size())
    blocks_.resize(count), blocks_moved_ = true;
  std::vector<uint32_t> wanted;  // extents
  struct Made {
    uint32_t block;
    std::vector<uint64_t> stamps;  // of what it is to have
    std::size_t end;               // of the extents that are wanted for it
  };
  std::vector<Made> made;
  for (uint32_t b = 0; b < blocks_.size(); ++b) {
    std::vector<uint64_t> stamps(block_extents_);
    const uint32_t first = b * block_extents_;
    for (uint32_t i = 0; i < block_extents_; ++i)
      stamps[i] = first + i < extents ? store.sketch().stamp(first + i) : 0;
    if (blocks_[b] && blocks_[b]->has(stamps)) continue;
    if (find_block(b, stamps)) continue;
    SketchBlock* const its = blocks_[b].get();
    for (uint32_t i = 0; i < block_extents_; ++i) {
      if (!stamps[i] || (its && its->stamps[i] == stamps[i])) continue;
      wanted.push_back(first + i);
      if (its) its->stamps[i] = 0;  // until all is there
    }
    made.push_back({b, std::move(stamps), wanted.size()});
  }
  std::size_t done = 0;
  Status s = put_sketch(store.sketch(), wanted, pool, streams, cancel, &done);
  if (!s.ok() && s.code() != Code::cancelled) return s;
  for (const auto& [b, stamps, end] : made) {
    if (end > done) break;
    std::shared_ptr<SketchBlock> added = sketches_->add(stamps, blocks_[b]);
    if (std::exchange(blocks_[b], added) != added) blocks_moved_ = true;
  }
  if (!s.ok()) return s;
  for (uint32_t e = 0; e < extents; ++e) sketch_stamps_.push_back(store.sketch().stamp(e));
  if (!blocks_moved_) return {};
  auto* addresses = reinterpret_cast<uint64_t*>(staged_.data);
  for (uint32_t e = 0; e < extents_; ++e) {
    const SketchBlock* block =
        e / block_extents_ < blocks_.size() ? blocks_[e / block_extents_].get() : nullptr;
    addresses[e] = block ? address_of(block->memory.get() + e % block_extents_ * size) : 0;
  }
  if (s = send(streams.own, sketch_at_.get(), addresses, extents_ * sizeof(uint64_t)); s.ok())
    blocks_moved_ = false;
  return s;
}

// Whether somebody has it. What there was of a block that others may have is let go of before there
// is a new one, which put_sketch() makes: where nobody has it any more the new one finds its
// memory.
bool KvMirror::find_block(uint32_t b, const std::vector<uint64_t>& stamps) {
  std::shared_ptr<SketchBlock>& block = blocks_[b];
  if (std::shared_ptr<SketchBlock> found = sketches_->find(stamps)) {
    block = std::move(found);
    return blocks_moved_ = true;
  }
  if (!block || sketches_->take(block)) return false;
  block.reset();
  blocks_moved_ = true;
  return false;
}

Status KvMirror::make_block(uint32_t b) {
  auto fresh = std::make_shared<SketchBlock>();
  fresh->stamps.assign(block_extents_, 0);
  if (Status s = fresh->memory.allocate(device_, block_extents_ * sketch_bytes(), what); !s.ok())
    return s;
  return blocks_[b] = std::move(fresh), Status();
}

// One half of the staging memory is filled while the other is on its way. Large halves: what a
// device has just read is slow to write to (halves of 8 MB took 30 ms for 800 MB, halves of 32 MB
// 16). The device takes 0.2 ms for a block's memory: a thread waits for that while others copy.
Status KvMirror::put_sketch(const KeySketch& sketch, const std::vector<uint32_t>& extents,
                            ThreadPool* pool, const Streams& streams, const CancelLatch& cancel,
                            std::size_t* done) {
  const std::size_t size = sketch_bytes();
  const auto together = static_cast<uint32_t>(staged_.bytes / 2 / size),
             parts = std::min(copied_parts, static_cast<uint32_t>(heads_total()));
  const auto first = static_cast<uint32_t>(first_head()),
             heads = static_cast<uint32_t>(heads_total());
  int error = 0;
  Status s;
  // however it ends: what is under way is of memory that others get
  const StreamWait own{ops_, streams.own}, beside{ops_, streams.beside};
  for (std::size_t at = 0; at < extents.size() && s.ok() && !error; at += together) {
    if (cancel.fired()) {
      s = cancelled();
      break;
    }
    DeviceStream* const way = at / together % 2 ? streams.beside : streams.own;
    std::byte* const half = staged_.data + at / together % 2 * together * size;
    if ((error = ops_.wait(way))) break;
    const auto count = static_cast<uint32_t>(std::min<std::size_t>(together, extents.size() - at));
    const std::span<const uint32_t> its_extents(extents.data() + at, count);
    std::vector<uint32_t> missing;  // blocks
    for (const uint32_t e : its_extents)
      if (const uint32_t block = e / block_extents_;
          !blocks_[block] && (missing.empty() || missing.back() != block))
        missing.push_back(block);
    const auto makes = static_cast<uint32_t>(missing.size());
    FirstFailure failure;
    pool->run(makes + count * parts, [&](uint32_t task, uint32_t) {
      Status c;
      if (task < makes) {
        c = make_block(missing[task]);
      } else {
        const uint32_t i = (task - makes) / parts, part = (task - makes) % parts,
                       its = heads * part / parts, end = heads * (part + 1) / parts;
        c = sketch.copy(its_extents[i], first + its, end - its,
                        half + i * size + its * shape_.page.sketch_bytes());
      }
      if (!c.ok()) failure.note(std::move(c));
    });
    blocks_moved_ = blocks_moved_ || makes > 0;
    s = std::move(failure).take();
    for (uint32_t i = 0, n; i < count && s.ok() && !error; i += n) {  // neighbours together
      const uint32_t e = its_extents[i], block = e / block_extents_;
      for (n = 1;
           i + n < count && its_extents[i + n] == e + n && (e + n) / block_extents_ == block;)
        ++n;
      error = ops_.upload(way, blocks_[block]->memory.get() + e % block_extents_ * size,
                          half + i * size, n * size);
    }
    if (s.ok() && !error) *done = at + count;
  }
  for (DeviceStream* way : {streams.own, streams.beside})
    if (const int last = ops_.wait(way); !error) error = last;
  if (error) *done = 0;
  return s.ok() ? device_->status(error, what) : std::move(s);
}

Status KvMirror::put_window(const KvStore& store, ThreadPool* pool, DeviceStream* stream,
                            const CancelLatch& cancel) {
  const std::size_t dim = shape_.page.dim, heads = heads_total();
  const bool puts_basis = store.sketch().built() && basis_stamp_ != store.sketch().basis_stamp();
  const bool puts_sinks = sinks_stamp_ != store.sinks_stamp() || sinks_stamp_ == 0,
             puts_rows = window_stamp_ != store.window_stamp() || window_stamp_ == 0;
  if (!puts_basis && !puts_sinks && !puts_rows) return {};
  if (cancel.fired()) return cancelled();
  if (Status s = need_staging(cancel); !s.ok()) return s;
  auto* staged = reinterpret_cast<float*>(staged_.data);
  if (puts_basis) {
    const std::size_t size = dim * shape_.page.sketch_dim();
    for (uint32_t h = 0; h < heads; ++h)
      std::copy_n(store.sketch().query_basis(first_ + h / shape_.kv_heads, h % shape_.kv_heads),
                  size, staged + h * size);
    if (Status s = send(stream, basis_.get(), staged, heads * size * sizeof(float)); !s.ok())
      return s;
    basis_stamp_ = store.sketch().basis_stamp();
  }
  if (puts_sinks) {
    std::fill_n(staged, heads * dim, 0.0f);
    if (!store.centre().empty())
      std::copy_n(store.centre().data() + first_head() * dim, heads * dim, staged);
    if (Status s = send(stream, centre_.get(), staged, heads * dim * sizeof(float)); !s.ok())
      return s;
    if (!store.sink_floats().empty()) {
      const std::size_t size = 2 * shape_.page.page_tokens * dim;  // of a head
      std::copy_n(store.sink_floats().data() + first_head() * size, heads * size, staged);
      if (Status s = send(stream, sinks_.get(), staged, heads * size * sizeof(float)); !s.ok())
        return s;
    }
    sinks_stamp_ = store.sinks_stamp();
  }
  if (puts_rows) {
    const std::size_t size = std::size_t{window_rows_} * dim, filled = store.window_count() * dim,
                      together = staged_.bytes / (2 * size * sizeof(float));
    for (std::size_t first = 0; first < heads; first += together) {
      const std::size_t count = std::min(together, heads - first);
      pool->run(static_cast<uint32_t>(count), [&](uint32_t i, uint32_t) {
        const auto h = static_cast<uint32_t>(first) + i;
        const KvStore::Rows rows = store.window(first_ + h / shape_.kv_heads, h % shape_.kv_heads);
        std::copy_n(rows.k, filled, staged + i * 2 * size);
        std::copy_n(rows.v, filled, staged + (i * 2 + 1) * size);
      });
      if (Status s = send(stream, window_.get() + first * 2 * size, staged,
                          count * 2 * size * sizeof(float));
          !s.ok())
        return s;
    }
    window_stamp_ = store.window_stamp();
  }
  return {};
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
  if (Status s = device_->register_host(&r.begin, &r.end, allowance, &r.seen); !s.ok()) return s;
  if (r.seen) regions_.push_back(std::move(r));
  return {};
}

// Sets aside what is known of the extents that are another than at the last update. The newest one
// changes with each page that is sealed, and is shared anew when it was full before a step back.
// What is generated changes the quads from its beginning on; once that is long past all is
// forgotten, and then little is again.
void KvMirror::note_changes(const PageStore& pages) {
  const auto before = static_cast<uint32_t>(page_stamps_.size());
  page_stamps_.resize(pages.extents());
  uint32_t first = pages.extents();
  for (uint32_t e = pages.extents(); e-- > 0;)
    if (std::exchange(page_stamps_[e], pages.stamp(e)) != pages.stamp(e)) first = e;
  if (first == pages.extents() && before <= first) return;
  if (first + 1 < before || before == 0)
    return void(addressed_ = 0), cannot_share_ = Fallback::none, forget_kept();
  if (first < before) trim();
  addressed_ = std::min(addressed_, first);
  const uint32_t from = first * shape_.page.extent_quads();
  if (from > changed_from_ && from - changed_from_ > max_forgotten * shape_.page.extent_quads())
    forget_kept();
  changed_from_ = std::min(changed_from_, from);
  changed_since_ = step_ + 1;
}

// *extents: the first ones, which are shared, and the one that is being filled. What others have
// shared is at once.
Status KvMirror::share_pages(const KvStore& store, uint32_t devices, uint32_t* extents) {
  const PageStore& pages = store.pages();
  const uint64_t all = pages.extents() * shape_.slab_bytes(), most = device_->info().registration_bytes;
  if (all > os::physical_memory() / 4 * 3)
    return cannot_share_ = Fallback::too_many_pages,
           Status::error(Code::unsupported, "%s", text_of(cannot_share_));
  uint64_t allowance = all <= most  ? UINT64_MAX
                       : has_begun_ ? std::max(most, all / share_steps) / devices + 1
                                    : 0;
  has_begun_ = true;
  const uint64_t begin = os::now_ns();
  for (uint32_t e = *extents = addressed_; e < pages.extents(); *extents = ++e) {
    const PageStore::Lasting at = pages.lasting(e);
    if (!at.keep) continue;
    const auto share_array = [&](const void* array, std::span<const std::byte> memory,
                                 std::size_t bytes) {
      if (seen(array)) return Status();
      return share(at.memory[1].empty() ? memory : piece_of(memory, array, bytes, most), at.keep,
                   &allowance);
    };
    if (Status s =
            share_array(at.pages, at.memory[0], shape_.heads_total() * PageShape::pages_bytes());
        !s.ok())
      return s;
    if (!seen(at.pages)) return {};
    if (Status s =
            share_array(at.scales, at.memory[1], shape_.heads_total() * shape_.page.scales_bytes());
        !s.ok())
      return s;
    if (!seen(at.scales)) return {};
    if (all > most && os::now_ns() - begin > longest_share_ns) allowance = 0;
  }
  return {};
}

Status KvMirror::put_addresses(const KvStore& store, ThreadPool* pool, DeviceStream* stream,
                               const CancelLatch& cancel) {
  const PageStore& pages = store.pages();
  const uint32_t extents = pages.extents();
  const std::size_t scale_bytes = shape_.page.scales_bytes();
  const uint32_t first = addressed_;
  const std::size_t count = extents - first;
  if (Status s = need_staging(cancel); !s.ok()) return s;
  auto* const staged = reinterpret_cast<uint64_t*>(staged_.data);
  if (first == 0)
    for (Region& r : regions_) r.used = false;
  for (uint32_t e = first; e < extents; ++e) {
    const PageStore::Lasting at = pages.lasting(e);
    if (!at.keep) {
      if (e + 1 < extents)
        return cannot_share_ = Fallback::spilled,
               Status::error(Code::unsupported, "%s", text_of(cannot_share_));
      // What is being filled: its own copy, of the layers' heads alone.
      const std::size_t its_pages = heads_total() * PageShape::pages_bytes(),
                        its_scales = heads_total() * scale_bytes;
      if (!last_.get())
        if (Status s = last_.allocate(device_, its_pages + its_scales); !s.ok()) return s;
      if (last_stamp_ != pages.stamp(e) || last_pages_ != pages.pages()) {
        const std::size_t filled = (pages.pages() - std::size_t{e} * extent_pages) * page_bytes;
        pool->run(static_cast<uint32_t>(heads_total()), [&](uint32_t h, uint32_t) {
          const ExtentView view =
              pages.extent(first_ + h / shape_.kv_heads, h % shape_.kv_heads, e);
          std::memcpy(last_.get() + h * PageShape::pages_bytes(), view.pages, filled);
          std::memcpy(last_.get() + its_pages + h * scale_bytes, view.scales, scale_bytes);
        });
        last_stamp_ = pages.stamp(e), last_pages_ = pages.pages();
      }
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
  if (Status s = send(stream, pages_at_.get() + first, staged, count * sizeof(uint64_t)); !s.ok())
    return s;
  if (Status s = send(stream, scales_at_.get() + first, staged + count, count * sizeof(uint64_t));
      !s.ok())
    return s;
  addressed_ = extents;
  return {};
}

Status KvMirror::update(const KvStore& store, const Wants& wants, uint32_t devices,
                        ThreadPool* pool, const Streams& streams, const CancelLatch& cancel,
                        bool* reads) {
  const PageStore& pages = store.pages();
  DeviceStream* const stream = streams.own;
  Status s = device_->status(ops_.wait(stream), what);
  note_changes(pages);
  uint32_t shared = pages.extents();
  // What cannot be pinned is handed over: for good, or as long as the text is as long.
  const auto or_handed = [&](Status its) {
    if (its.code() != Code::unsupported && its.code() != Code::no_memory) return its;
    forget_regions();
    refused_extents_ = its.code() == Code::no_memory ? pages.extents() : 0;
    if (refused_extents_) cannot_share_ = Fallback::no_memory_to_pin;
    else if (cannot_share_ == Fallback::none) cannot_share_ = Fallback::cannot_pin;
    return Status();
  };
  if (refused_extents_ && refused_extents_ != pages.extents())
    refused_extents_ = 0, cannot_share_ = Fallback::none;
  if (s.ok() && wants.pages && cannot_share_ == Fallback::none && addressed_ < shared)
    s = or_handed(share_pages(store, devices, &shared));
  const struct Lease {
    Device::Staging& staging;
    ~Lease() { staging = {}; }
  } lease{staged_};
  if (s.ok()) s = make_room(store);
  if (s.ok() && wants.sketch) s = put_summaries(store, pages.extents(), pool, streams, cancel);
  if (s.ok()) s = put_window(store, pool, stream, cancel);
  *reads = s.ok() && wants.pages && cannot_share_ == Fallback::none && shared == pages.extents();
  if (*reads && addressed_ < shared)
    s = or_handed(put_addresses(store, pool, stream, cancel)),
    *reads = s.ok() && cannot_share_ == Fallback::none;
  return s;
}

Status KvMirror::begin_step(const KvStore& store, DeviceStream* stream) {
  *known_.get() = {store.pages().pages(), store.window_count(), ++step_,
                   kept_since_,           changed_from_,        changed_since_};
  return device_->status(ops_.upload(stream, counts_.get(), known_.get(), sizeof(DeviceCounts)),
                         what);
}

void KvMirror::committed(const KvStore& store, uint32_t n) {
  if (store.pages().pages() == known_.get()->pages &&
      store.window_count() == known_.get()->window + n)
    window_stamp_ = store.window_stamp();
}

DeviceKv KvMirror::layer(uint32_t layer) const {
  const PageShape& page = shape_.page;
  const std::size_t heads = shape_.kv_heads, first = layer * heads;
  return {first_ + layer,
          shape_.kv_heads,
          heads_ / shape_.kv_heads,
          page.head_dim,
          page.dim,
          page.page_tokens,
          page.sketch_dim(),
          counts_.get(),
          budgets_.get() + layer,
          sketch_at_.get(),
          pages_at_.get(),
          scales_at_.get(),
          first * page.sketch_bytes(),
          first * PageShape::pages_bytes(),
          first * page.scales_bytes(),
          page.sketch_bytes(),
          basis_.get() + first * page.dim * page.sketch_dim(),
          sinks_.get() + first * 2 * page.page_tokens * page.dim,
          centre_.get() + first * page.dim,
          window_.get() + first * 2 * window_rows_ * page.dim,
          window_rows_};
}

}  // namespace kvasir
