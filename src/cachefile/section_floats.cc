#include "cachefile/section_floats.h"

#include <algorithm>
#include <mutex>
#include <span>

#include "base/checked.h"
#include "base/memory.h"
#include "os/os.h"

namespace kvasir {

static Status broken(const CacheFile& file, const CacheFile::Section& section, const char* what) {
  return Status::error(Code::corrupt, "%s: section '%s' %s", file.path().c_str(),
                       format::name_of(section.kind), what);
}

Status not_finite(const CacheFile& file, const CacheFile::Section& section) {
  return broken(file, section, "holds a number that is not finite");
}

namespace {

// The wrong piece that the message is about, whatever the threads: the first.
class FirstWrong {
 public:
  void test(uint64_t at, std::span<const float> values, FloatRule rule) {
    const char* what = rule(values);
    if (!what) return;
    const std::scoped_lock lock(mutex_);
    if (at < first_) first_ = at, what_ = what;
  }
  const char* what() const { return what_; }

 private:
  std::mutex mutex_;
  uint64_t first_ = UINT64_MAX;
  const char* what_ = nullptr;
};

}  // namespace

Status copy_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   uint64_t rows, std::size_t row, ThreadPool* pool, const Cancel* cancel,
                   const std::function<float*(uint64_t)>& place, FloatRule rule) {
  FirstWrong wrong;
  Status s = file.scan(section, offset, rows * row * sizeof(float), pool, cancel,
                       [&](uint64_t at, const std::byte* data, std::size_t size) {
                         std::span<const float> values(reinterpret_cast<const float*>(data),
                                                       size / sizeof(float));
                         wrong.test(at, values, rule);
                         for (uint64_t i = at / sizeof(float); !values.empty();) {
                           const std::size_t in_row = static_cast<std::size_t>(i % row),
                                             n = std::min(row - in_row, values.size());
                           std::copy_n(values.data(), n, place(i / row) + in_row);
                           values = values.subspan(n);
                           i += n;
                         }
                       });
  if (!s.ok() || !wrong.what()) return s;
  return broken(file, section, wrong.what());
}

Status read_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   std::size_t n, ThreadPool* pool, const Cancel* cancel,
                   std::shared_ptr<const float[]>* out, FloatRule rule) {
  constexpr uint64_t block = format::block_bytes;
  const uint64_t first = offset / block * block, size = uint64_t{n} * sizeof(float),
                 room = round_up(offset + size - first, block);
  const std::shared_ptr<std::byte[]> blocks = make_buffer<std::byte>(room);
  os::prefer_huge_pages(blocks.get(), room);
  FirstWrong wrong;
  RETURN_IF_ERROR(file.scan(
      section, offset, size, pool, cancel,
      [&](uint64_t at, const std::byte* data, std::size_t bytes) {
        wrong.test(at, {reinterpret_cast<const float*>(data), bytes / sizeof(float)}, rule);
      },
      blocks.get()));
  if (wrong.what()) return broken(file, section, wrong.what());
  *out = {blocks, reinterpret_cast<const float*>(blocks.get() + (offset - first))};
  return {};
}

}  // namespace kvasir
