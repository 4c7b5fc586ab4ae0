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

// scan() of floats that keep the rule. blocks: as scan() has it.
static Status scan_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                          uint64_t n, ThreadPool* pool, const Cancel* cancel, FloatRule rule,
                          const std::function<void(uint64_t at, std::span<const float>)>& take,
                          std::byte* blocks) {
  std::mutex mutex;
  uint64_t first = UINT64_MAX;  // the wrong piece that the message is about, whatever the threads
  const char* wrong = nullptr;
  RETURN_IF_ERROR(file.scan(
      section, offset, n * sizeof(float), pool, cancel,
      [&](uint64_t at, const std::byte* data, std::size_t size) {
        const std::span<const float> values(reinterpret_cast<const float*>(data),
                                            size / sizeof(float));
        if (const char* what = rule(values)) {
          const std::scoped_lock lock(mutex);
          if (at < first) first = at, wrong = what;
        }
        if (take) take(at / sizeof(float), values);
      },
      blocks));
  return wrong ? broken(file, section, wrong) : Status();
}

Status copy_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   uint64_t rows, std::size_t row, ThreadPool* pool, const Cancel* cancel,
                   const std::function<float*(uint64_t)>& place, FloatRule rule) {
  const auto copy = [&](uint64_t at, std::span<const float> values) {
    while (!values.empty()) {
      const std::size_t in_row = static_cast<std::size_t>(at % row),
                        n = std::min(row - in_row, values.size());
      std::copy_n(values.data(), n, place(at / row) + in_row);
      values = values.subspan(n);
      at += n;
    }
  };
  return scan_floats(file, section, offset, rows * row, pool, cancel, rule, copy, nullptr);
}

Status read_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   std::size_t n, ThreadPool* pool, const Cancel* cancel,
                   std::shared_ptr<const float[]>* out, FloatRule rule) {
  constexpr uint64_t block = format::block_bytes;
  const uint64_t first = offset / block * block,
                 bytes = round_up(offset + uint64_t{n} * sizeof(float) - first, block);
  const std::shared_ptr<std::byte[]> blocks = make_buffer<std::byte>(bytes);
  os::prefer_huge_pages(blocks.get(), bytes);
  RETURN_IF_ERROR(scan_floats(file, section, offset, n, pool, cancel, rule, nullptr, blocks.get()));
  *out = {blocks, reinterpret_cast<const float*>(blocks.get() + (offset - first))};
  return {};
}

}  // namespace kvasir
