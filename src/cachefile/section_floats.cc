#include "cachefile/section_floats.h"

#include <algorithm>
#include <mutex>
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
  std::mutex mutex;
  uint64_t first = UINT64_MAX;  // the wrong piece that the message is about, whatever the threads
  const char* wrong = nullptr;
  Status s = file.scan(section, offset, rows * row * sizeof(float), pool, cancel,
                       [&](uint64_t at, const std::byte* data, std::size_t size) {
                         std::span<const float> values(reinterpret_cast<const float*>(data),
                                                       size / sizeof(float));
                         if (const char* what = rule(values)) {
                           const std::scoped_lock lock(mutex);
                           if (at < first) first = at, wrong = what;
                         }
                         for (uint64_t i = at / sizeof(float); !values.empty();) {
                           const std::size_t in_row = static_cast<std::size_t>(i % row),
                                             n = std::min(row - in_row, values.size());
                           std::copy_n(values.data(), n, place(i / row) + in_row);
                           values = values.subspan(n);
                           i += n;
                         }
                       });
  if (!s.ok() || !wrong) return s;
  return broken(file, section, wrong);
}

}  // namespace kvasir
