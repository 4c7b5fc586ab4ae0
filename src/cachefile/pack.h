// Packed documents: a cache file's copy for sending or keeping away, compressed by zstd in chunks
// of 256 KiB, that comes back bit for bit. docs/file-format.md says the file byte by byte. Memory
// is bounded whatever the file: two chunks and zstd's own for one, at most 8 MiB. Files come into
// being whole, as saves do (atomic_file.h); on failure or cancel what was at the path stays.
#pragma once

#include <string>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/packed_header.h"

namespace kvasir {

constexpr uint32_t min_level = 1, max_level = 19;  // of zstd
// On two AVX2 cores that also did other work, a document of 32,768 tokens of English text packed to
// 85.0% of its size at 70 MB/s with level 1, to 84.8% at 30 MB/s with 3, 84.7% at 10 MB/s with 9
// (19: 0.8 MB/s, and one percent less than 1 of a document of 4,096 tokens): keys and values are
// noise to what looks for repetitions.
constexpr uint32_t default_level = 1;

// Packs the cache file at `path`, whose header is checked first. Progress counts the document's
// bytes.
Status pack(const std::string& path, const std::string& packed_path, uint32_t level,
            Progress* progress, const Cancel* cancel);
Status unpack(const std::string& packed_path, const std::string& path, Progress* progress,
              const Cancel* cancel);
const char* zstd_version();
// What a packed document says of itself: its header alone.
Status read_packed_header(const std::string& packed_path, PackedHeader* out);

}  // namespace kvasir
