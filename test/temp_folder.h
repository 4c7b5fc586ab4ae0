// A folder for a test's files, removed with everything in it at the end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

// A path as all of Kvasir has it.
inline std::filesystem::path in_utf8(const std::string& path) {
  return std::u8string(path.begin(), path.end());
}

class TempFolder {
 public:
  TempFolder() {
    std::random_device random;
    do {
      const std::u8string path =
          (std::filesystem::temp_directory_path() / ("kvasir-test-" + std::to_string(random())))
              .generic_u8string();
      path_ = {path.begin(), path.end()};
    } while (!std::filesystem::create_directory(in_utf8(path_)));  // which throws where it cannot
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(in_utf8(path_), ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string file(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  std::size_t entries() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(in_utf8(path_)), {}));
  }

 private:
  std::string path_;
};

inline std::vector<uint8_t> read_file(const std::string& path) {
  std::ifstream in(in_utf8(path), std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_file(const std::string& path, const std::vector<uint8_t>& bytes) {
  std::ofstream out(in_utf8(path), std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
}

// Writes over a part of a file that is there. False when it fails.
inline bool overwrite(const std::string& path, uint64_t offset, const void* bytes,
                      std::size_t size) {
  std::fstream file(in_utf8(path), std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  file.close();
  return !file.fail();
}

#ifdef _WIN32
constexpr bool on_windows = true;

extern "C" __declspec(dllimport) void* __stdcall GetCurrentProcess();
extern "C" __declspec(dllimport) int __stdcall GetProcessHandleCount(void* process,
                                                                     unsigned long* count);

// Open handles of this process.
inline std::size_t open_descriptors() {
  unsigned long count = 0;
  GetProcessHandleCount(GetCurrentProcess(), &count);
  return count;
}
#else
constexpr bool on_windows = false;

// Open descriptors of this process.
inline std::size_t open_descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}
#endif
