#include "offload/staged_pages.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "backend/first_failure.h"
#include "os/os.h"

namespace kvasir {

constexpr uint32_t part_quads = 16;  // that a task fetches: few, so that threads are done together

Status StagedPages::make_room(std::size_t quads) {
  if (quads <= room_) return {};
  room_ = 0;
  const uint64_t bytes = quads * quad_bytes_of(shape_.page.dim);
  if (bytes > os::physical_memory() / 16)
    return Status::error(Code::no_memory,
                         "the pages staged for %s would take %" PRIu64
                         " bytes of memory that is pinned",
                         device_->name().c_str(), bytes);
  RETURN_IF_ERROR(quads_.allocate(device_, bytes));
  return room_ = quads, Status();
}

void StagedPages::release() {
  room_ = 0, quads_ = {};
  std::vector<Worker>().swap(workers_);
  parts_ = {};
  scales_.release();
}

void StagedPages::begin(const PageStore& pages, uint32_t layer, uint64_t wanted,
                        const CancelLatch& cancel, ThreadPool* pool) {
  if (std::exchange(has_fetched_, false)) scales_.note_missed(std::exchange(missed_, 0));
  pool->run(scales_.begin(pages, layer, wanted), [&](uint32_t task, uint32_t) {
    if (!cancel.fired()) scales_.read(pages, task);
  });
}

Status StagedPages::fetch(const PageStore& pages, uint32_t layer, const Lists& lists, bool keeps,
                          const CancelLatch& cancel, ThreadPool* pool) {
  if (workers_.size() < pool->threads()) workers_ = std::vector<Worker>(pool->threads());
  parts_.clear();
  for (uint32_t list = lists.first; list < lists.end; ++list)
    for (uint32_t begin = 0, count = lists.counts[2 * list]; begin < count; begin += part_quads)
      parts_.push_back({list, begin, std::min(count, begin + part_quads)});
  for (Worker& w : workers_) w.missed = 0, w.hold.mapped.set_keeps(keeps);
  FirstFailure failure;
  pool->run(static_cast<uint32_t>(parts_.size()), [&](uint32_t task, uint32_t worker) {
    if (cancel.fired()) return;
    const struct Held {
      PageStore::Hold& hold;
      ~Held() { hold.release(); }
    } held{workers_[worker].hold};
    if (Status s = fetch_part(pages, layer, lists, parts_[task], &workers_[worker]); !s.ok())
      failure.note(std::move(s));
  });
  for (const Worker& w : workers_) missed_ += w.missed;
  has_fetched_ = true;
  return std::move(failure).take();
}

Status StagedPages::fetch_part(const PageStore& pages, uint32_t layer, const Lists& lists,
                               const Part& part, Worker* w) const {
  const uint32_t head = part.list / lists.blocks, page_quads = shape_.page.page_quads(),
                 dim = shape_.page.dim;
  const uint32_t* const quads = lists.quads + std::size_t{part.list} * lists.capacity;
  const uint32_t* const found =
      lists.found ? lists.found + std::size_t{part.list} * lists.capacity : nullptr;
  const auto for_wanted = [&](auto&& f) {
    for (uint32_t i = part.begin; i < part.end; ++i)
      if (!found || !(found[i] & hot_present)) f(i, quads[i] / page_quads);
  };
  w->numbers.clear();
  for_wanted([&](uint32_t, uint32_t page) {
    if (w->numbers.empty() || w->numbers.back() != page) w->numbers.push_back(page);
  });
  if (w->numbers.empty()) return {};
  w->pages.resize(w->numbers.size());
  scales_.hand(pages, head, &w->hold.mapped);
  RETURN_IF_ERROR(pages.fetch(layer, head, w->numbers, w->pages.data(), &w->hold));
  w->missed += w->hold.mapped.read();
  std::size_t at = 0;
  for_wanted([&](uint32_t i, uint32_t page) {
    if (w->numbers[at] != page) ++at;
    const PageRef& from = w->pages[at];
    const std::size_t in_page = quads[i] % page_quads, half = std::size_t{quad_tokens} * dim,
                      scales = quad_tokens * sizeof(uint16_t);
    uint8_t* const to =
        quads_.get() + (std::size_t{part.list} * lists.capacity + i) * quad_bytes_of(dim);
    std::memcpy(to, from.data + in_page * half, half);
    std::memcpy(to + half, from.data + page_bytes / 2 + in_page * half, half);
    std::memcpy(to + 2 * half, from.scales + in_page * quad_tokens, scales);
    std::memcpy(to + 2 * half + scales,
                from.scales + shape_.page.page_tokens + in_page * quad_tokens, scales);
  });
  return {};
}

}  // namespace kvasir
