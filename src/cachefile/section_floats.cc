#include "cachefile/section_floats.h"

#include <algorithm>
#include <atomic>
#include <span>

#include "cachefile/section_rules.h"

namespace kvasir {

Status not_finite(const CacheFile& file, const CacheFile::Section& section) {
  return Status::error(Code::corrupt, "%s: section '%s' holds a number that is not finite",
                       file.path().c_str(), format::name_of(section.kind));
}

Status copy_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   uint64_t rows, std::size_t row, ThreadPool* pool, const Cancel* cancel,
                   const std::function<float*(uint64_t)>& place) {
  std::atomic<bool> finite{true};
  Status s = file.scan(section, offset, rows * row * sizeof(float), pool, cancel,
                       [&](uint64_t at, const std::byte* data, std::size_t size) {
                         std::span<const float> values(reinterpret_cast<const float*>(data),
                                                       size / sizeof(float));
                         if (wrong_floats(values)) finite.store(false, std::memory_order_relaxed);
                         for (uint64_t i = at / sizeof(float); !values.empty();) {
                           const std::size_t in_row = static_cast<std::size_t>(i % row),
                                             n = std::min(row - in_row, values.size());
                           std::copy_n(values.data(), n, place(i / row) + in_row);
                           values = values.subspan(n);
                           i += n;
                         }
                       });
  if (s.ok() && !finite.load(std::memory_order_relaxed)) return not_finite(file, section);
  return s;
}

}  // namespace kvasir
