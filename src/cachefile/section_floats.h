// Copies floats of a section to their destination in one pass over memory: read from the file,
// verified, tested, stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "backend/thread_pool.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "cachefile/section_rules.h"

namespace kvasir {

// What is wrong with floats, or null: a rule of section_rules.h.
using FloatRule = const char* (*)(std::span<const float>);

// Copies `rows` rows of `row` floats from byte `offset` of the section on: row i to place(i), on
// all threads. Code::corrupt, Code::io; Code::corrupt also for floats that break the rule: a NaN or
// an infinity, which no writer stores. Code::cancelled: some rows are copied.
Status copy_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   uint64_t rows, std::size_t row, ThreadPool* pool, const Cancel* cancel,
                   const std::function<float*(uint64_t)>& place, FloatRule rule = wrong_floats);

// Reads `n` floats from byte `offset` of the section on into an array of their own, without another
// copy. Errors as copy_floats(); then *out is unchanged. Throws std::bad_alloc.
Status read_floats(const CacheFile& file, const CacheFile::Section& section, uint64_t offset,
                   std::size_t n, ThreadPool* pool, const Cancel* cancel,
                   std::shared_ptr<const float[]>* out, FloatRule rule = wrong_floats);

// The error for floats that are not finite.
Status not_finite(const CacheFile& file, const CacheFile::Section& section);

}  // namespace kvasir
