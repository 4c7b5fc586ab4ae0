// The main() of fuzz targets in builds without a fuzzer: runs the target over every file of the
// folders given, so that what fuzzing once found is tested by every compiler and sanitizer from
// then on.
#include "replay.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "fault_count.h"

namespace fs = std::filesystem;

// False when the file cannot be read.
static bool replay(const fs::path& path) {
  const auto size = static_cast<std::size_t>(fs::file_size(path));
  // An exact allocation, so that AddressSanitizer sees a read one byte beyond.
  const auto bytes = std::make_unique<char[]>(size);
  std::ifstream in(path, std::ios::binary);
  if (!in.read(bytes.get(), static_cast<std::streamsize>(size))) return false;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.get()), size);
  return true;
}

int main(int argc, char** argv) {
  std::size_t count = 0;
  for (int i = 1; i < argc; ++i) {
    std::vector<fs::path> paths;
    for (const auto& entry : fs::directory_iterator(argv[i])) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    for (const fs::path& path : paths) {
      std::printf("%s\n", path.c_str());
      std::fflush(stdout);  // a crash leaves its input as the last line
      if (!replay(path)) {
        std::fprintf(stderr, "%s: cannot be read\n", path.c_str());
        return 1;
      }
      ++count;
      count_faults("input that fuzzing found, again");
    }
  }
  std::printf("%zu inputs\n", count);
  return count ? 0 : 1;  // an empty corpus is a mistake, not a pass
}
