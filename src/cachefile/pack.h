// Packed documents: copies of cache files for transfer or storage, compressed by zstd in chunks of
// 256 KiB, which unpack bit for bit. docs/file-format.md defines them byte by byte. Memory is
// bounded for any file: two chunks and the memory of zstd, at most 8 MiB. Files are saved
// atomically (atomic_file.h); on failure or cancellation the file at the path stays.
#pragma once

#include <string>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/packed_header.h"

namespace kvasir {

constexpr uint32_t min_level = 1, max_level = 19;  // of zstd
// On two loaded AVX2 cores a document of 32,768 tokens of English text packed to 85.0% of its size
// at 70 MB/s with level 1, to 84.8% at 30 MB/s with 3, to 84.7% at 10 MB/s with 9. Level 19 runs at
// 0.8 MB/s; for a document of 4,096 tokens its output is one percent smaller than that of level 1.
// To a compressor that finds repetitions, keys and values are noise.
constexpr uint32_t default_level = 1;

// Packs the cache file at `path`, whose header is checked first. Progress counts bytes of the
// document.
Status pack(const std::string& path, const std::string& packed_path, uint32_t level,
            Progress* progress, const Cancel* cancel);
Status unpack(const std::string& packed_path, const std::string& path, Progress* progress,
              const Cancel* cancel);
const char* zstd_version();
// Reads the header of a packed document.
Status read_packed_header(const std::string& packed_path, PackedHeader* out);

}  // namespace kvasir
