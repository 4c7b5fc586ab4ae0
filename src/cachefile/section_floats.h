// Floats of a cache file's section on their way to where they are used, in one pass over memory:
// read past the mapping, verified, looked at, put in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "backend/thread_pool.h"
#include "base/status.h"
#include "cachefile/cache_file.h"

namespace kvasir {

// From `offset` bytes on: `rows` rows of `row` floats, row i to place(i), by all threads.
// Code::corrupt, Code::io; also where one of them is NaN or infinite: they were computed.
// Code::cancelled: some rows are in place.
Status copy_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   uint64_t rows, std::size_t row, ThreadPool* pool, const Cancel* cancel,
                   const std::function<float*(uint64_t)>& place);

// What is said of such floats.
Status not_finite(const CacheFile& file, const CacheFile::Section& section);

}  // namespace kvasir
