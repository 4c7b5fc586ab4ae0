#include "cachefile/section_floats.h"

#include <algorithm>
#include <atomic>
#include <span>

namespace kvasir {

static Status broken(const CacheFile& file, const CacheFile::Section& section, const char* what) {
  return Status::error(Code::corrupt, "%s: section '%s' %s", file.path().c_str(),
                       format::name_of(section.kind), what);
}

Status not_finite(const CacheFile& file, const CacheFile::Section& section) {
  return broken(file, section, "holds a number that is not finite");
}

Status copy_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   uint64_t rows, std::size_t row, ThreadPool* pool, const Cancel* cancel,
                   const std::function<float*(uint64_t)>& place, FloatRule rule) {
  std::atomic<const char*> wrong{nullptr};
  Status s = file.scan(section, offset, rows * row * sizeof(float), pool, cancel,
                       [&](uint64_t at, const std::byte* data, std::size_t size) {
                         std::span<const float> values(reinterpret_cast<const float*>(data),
                                                       size / sizeof(float));
                         if (const char* what = rule(values))
                           wrong.store(what, std::memory_order_relaxed);
                         for (uint64_t i = at / sizeof(float); !values.empty();) {
                           const std::size_t in_row = static_cast<std::size_t>(i % row),
                                             n = std::min(row - in_row, values.size());
                           std::copy_n(values.data(), n, place(i / row) + in_row);
                           values = values.subspan(n);
                           i += n;
                         }
                       });
  const char* what = wrong.load(std::memory_order_relaxed);
  if (!s.ok() || !what) return s;
  return broken(file, section, what);
}

}  // namespace kvasir
