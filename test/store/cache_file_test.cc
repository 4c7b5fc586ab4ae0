// The cache file: sections of any size are read as they were written; misuse and files of other
// programs are refused by name.
#include "cachefile/cache_file.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <limits>
#include <thread>
#include <utility>

#include "cachefile/section_floats.h"
#include "store/cache_samples.h"
#include "temp_folder.h"

using namespace kvasir;
using samples::Part;

namespace {

Status open_code(const std::string& path) {
  std::shared_ptr<const CacheFile> file;
  Status s = CacheFile::open(path, &file);
  CHECK(s.ok() == (file != nullptr));
  return s;
}

}  // namespace

TEST_CASE("sections of every size around a block are read as written, byte for byte") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  for (std::size_t size :
       {0u, 1u, 4095u, 4096u, 4097u, 65535u, 65536u, 65537u, 262143u, 262144u, 262145u, 1000003u}) {
    for (std::size_t piece : {1u + size, std::size_t{4096}, std::size_t{1000}, std::size_t{61}}) {
      const std::vector<Part> parts = {
          {samples::SectionKind::tokens, 7, samples::noise(size, size)},
          {samples::SectionKind::state, 2, samples::noise(size / 3, 1)}};
      const Status s = samples::save(path, parts, size, piece);
      CHECK_MESSAGE(s.ok(), s.message());
      CHECK(samples::holds(path, parts, size));
    }
  }
  CHECK(folder.entries() == 1);
}

TEST_CASE("a file without sections, and one of empty sections, are whole") {
  TempFolder folder;
  CHECK(samples::save(folder.file("none.kv"), {}, 1).ok());
  CHECK(samples::holds(folder.file("none.kv"), {}, 1));
  const std::vector<Part> empty = {{samples::SectionKind::state, 1, {}},
                                   {samples::SectionKind::pages, 1, {}}};
  CHECK(samples::save(folder.file("empty.kv"), empty, 2).ok());
  CHECK(samples::holds(folder.file("empty.kv"), empty, 2));
}

TEST_CASE("the identity is read as written, also with a name that fills its field") {
  TempFolder folder;
  format::Identity id = samples::identity(1u << 20);
  std::fill(std::begin(id.model_name), std::end(id.model_name), 'x');
  std::unique_ptr<CacheWriter> writer;
  REQUIRE(CacheWriter::create(folder.file("a.kv"), id, &writer).ok());
  REQUIRE(writer->begin().ok());
  REQUIRE(writer->finish().ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
  CHECK(file->identity().model == id.model);
  CHECK(file->identity().tokens == id.tokens);
  CHECK(file->identity().vocabulary == id.vocabulary);
  CHECK(std::string(file->identity().model_name) == std::string(63, 'x'));
}

TEST_CASE("sections begin where maps and checks want them") {
  TempFolder folder;
  REQUIRE(samples::save(folder.file("a.kv"), samples::parts(1), 1).ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
  for (const auto& section : file->sections()) CHECK(section.offset % format::section_align == 0);
  CHECK(file->size() == std::filesystem::file_size(folder.file("a.kv")));
  CHECK(file->find(samples::SectionKind::index) == nullptr);
  CHECK(file->bytes(samples::SectionKind::index).empty());
}

TEST_CASE("check() refuses ranges beyond the section and accepts empty ones") {
  TempFolder folder;
  REQUIRE(samples::save(folder.file("a.kv"), samples::parts(1), 1).ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
  const auto& state = *file->find(samples::SectionKind::state);
  CHECK(file->check(state, 0, 100));
  CHECK(file->check(state, 100, 0));
  CHECK_FALSE(file->check(state, 100, 1));
  CHECK_FALSE(file->check(state, 101, 0));
  CHECK_FALSE(file->check(state, 1, UINT64_MAX));
  for (const auto& section : file->sections()) CHECK(file->check_section(section).ok());
}

TEST_CASE("threads that check the same blocks together agree") {
  TempFolder folder;
  const std::vector<Part> parts = {{samples::SectionKind::pages, 1, samples::noise(3 << 20, 5)}};
  REQUIRE(samples::save(folder.file("a.kv"), parts, 50'000).ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
  const auto& pages = *file->find(samples::SectionKind::pages);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 768; ++i) {
        const uint64_t page = (i * 31 + t * 97) % 768;
        if (!file->check(pages, page * 4096, 4096)) ++failures;
      }
      if (!file->check_section(pages).ok()) ++failures;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
}

TEST_CASE("a pool checks all of a section, and names the block that is damaged wherever it is") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const std::vector<Part> parts = {
      {samples::SectionKind::pages, 1, samples::noise((3 << 20) + 5000, 5)}};
  constexpr uint64_t tokens = 50'000;  // that take so many pages
  REQUIRE(samples::save(path, parts, tokens).ok());
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(3, &pool).ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file, pool.get()).ok());
  const CacheFile::Section pages = *file->find(samples::SectionKind::pages);
  CHECK(file->check_section(*file->find(samples::SectionKind::pages), pool.get()).ok());
  CHECK_FALSE(file->check(*file->find(samples::SectionKind::pages), 1, pages.bytes));  // beyond it
  Cancel cancel;
  cancel.fire();
  CHECK(file->check_section(*file->find(samples::SectionKind::pages), pool.get(), &cancel).code() ==
        Code::cancelled);
  for (const uint64_t at : {uint64_t{0}, uint64_t{1} << 20, pages.bytes - 1}) {
    file.reset();
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
        .seekp(static_cast<std::streamoff>(pages.offset + at))
        .put('\x5a')
        .flush();
    REQUIRE(CacheFile::open(path, &file, pool.get()).ok());
    const Status s = file->check_section(*file->find(samples::SectionKind::pages), pool.get());
    CHECK(s.code() == Code::corrupt);
    CHECK(s.offset() == (pages.offset + at) / 4096 * 4096);
    file.reset();
    REQUIRE(samples::save(path, parts, tokens).ok());
  }
}

TEST_CASE("floats come to where they are used, verified, whatever their rows") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(3, &pool).ok());
  std::vector<float> values((300 << 10) / sizeof(float) + 5);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const auto save = [&] {
    std::vector<uint8_t> bytes(values.size() * sizeof(float));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    REQUIRE(samples::save(path, {{samples::SectionKind::window, 1, std::move(bytes)}}, 1).ok());
  };
  std::vector<float> apart;
  const auto copy = [&](ThreadPool* by, std::size_t skipped, std::size_t row) {
    std::shared_ptr<const CacheFile> file;
    REQUIRE(CacheFile::open(path, &file).ok());
    const std::size_t rows = (values.size() - skipped) / row;
    apart.assign(rows * (row + 3), -1.0f);
    return copy_floats(*file, *file->find(samples::SectionKind::window), skipped * sizeof(float),
                       rows, row, by, nullptr,
                       [&](uint64_t i) { return apart.data() + (rows - 1 - i) * (row + 3); });
  };
  save();
  for (ThreadPool* by : {pool.get(), static_cast<ThreadPool*>(nullptr)})
    for (const std::size_t skipped : {0u, 4u, 1024u, 1500u})
      for (const std::size_t row :
           {std::size_t{1}, std::size_t{7}, std::size_t{1024}, std::size_t{16384},
            std::size_t{20001}, values.size() - skipped}) {
        REQUIRE(copy(by, skipped, row).ok());
        const std::size_t rows = (values.size() - skipped) / row;
        bool same = true;
        for (std::size_t i = 0; i < apart.size(); ++i) {
          const std::size_t in_row = i % (row + 3),
                            from = skipped + (rows - 1 - i / (row + 3)) * row + in_row;
          same = same && apart[i] == (in_row < row ? values[from] : -1.0f);
        }
        CHECK(same);
      }
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  const CacheFile::Section window = *file->find(samples::SectionKind::window);
  CHECK(file->scan(*file->find(samples::SectionKind::window), 8, window.bytes - 7, pool.get(),
                   nullptr, [](uint64_t, const std::byte*, std::size_t) {})
            .code() == Code::corrupt);
  file.reset();
  for (const uint64_t at : {uint64_t{3}, uint64_t{150} << 10, window.bytes - 1}) {
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
        .seekp(static_cast<std::streamoff>(window.offset + at))
        .put('\x5a')
        .flush();
    const Status s = copy(pool.get(), 0, 1000);
    // the last row is not whole: its block is not read
    CHECK(s.code() == (at == window.bytes - 1 ? Code::ok : Code::corrupt));
    const Status all = copy(pool.get(), 0, values.size());
    CHECK(all.code() == Code::corrupt);
    CHECK(all.offset() == (window.offset + at) / 4096 * 4096);
    save();
  }
  for (const std::size_t at : {std::size_t{0}, values.size() / 2, values.size() - 1}) {
    const float before = std::exchange(values[at], std::numeric_limits<float>::quiet_NaN());
    save();
    const Status s = copy(pool.get(), 0, values.size());
    CHECK(s.code() == Code::corrupt);
    CHECK(std::string(s.message()).find("section 'window' holds a number that is not finite") !=
          std::string::npos);
    values[at] = before;
  }
}

TEST_CASE("a writer that is misused refuses and leaves nothing behind") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  {
    std::unique_ptr<CacheWriter> writer;
    REQUIRE(CacheWriter::create(path, {}, &writer).ok());
    CHECK(writer->write("x", 1).code() == Code::bad_state);
    CHECK(writer->finish().code() == Code::bad_state);
    REQUIRE(writer->add_section(samples::SectionKind::state, 1, 10).ok());
    CHECK(writer->add_section(samples::SectionKind::state, 1, 10).code() == Code::bad_state);
    CHECK(writer->add_section(samples::SectionKind::pages, 1, UINT64_MAX).code() == Code::limit);
    CHECK(writer->add_section(samples::SectionKind::pages, 1, uint64_t{1} << 62).code() ==
          Code::limit);
    CHECK(writer->bytes_total() == 10);
    REQUIRE(writer->begin().ok());
    CHECK(writer->add_section(samples::SectionKind::pages, 1, 10).code() == Code::bad_state);
    CHECK(writer->write("0123456789a", 11).code() == Code::bad_state);
    REQUIRE(writer->write("01234", 5).ok());
    CHECK(writer->bytes_written() == 5);
    CHECK(writer->finish().code() == Code::bad_state);
    CHECK(folder.entries() == 1);
  }
  CHECK(folder.entries() == 0);
}

TEST_CASE("more sections than the table holds are refused") {
  TempFolder folder;
  std::unique_ptr<CacheWriter> writer;
  REQUIRE(CacheWriter::create(folder.file("a.kv"), {}, &writer).ok());
  for (uint32_t i = 0; i < format::max_sections; ++i) {
    REQUIRE(writer->add_section(samples::SectionKind::index, i, 5).ok());
  }
  CHECK(writer->add_section(samples::SectionKind::index, 1, 5).code() == Code::limit);
}

TEST_CASE("a file that is no cache file is refused by a code of its kind") {
  TempFolder folder;
  const auto refused = [&](const std::string& name, const std::vector<uint8_t>& bytes, Code code) {
    write_file(folder.file(name), bytes);
    const Status s = open_code(folder.file(name));
    CHECK_MESSAGE(s.code() == code, name, ": ", s.message());
    CHECK(std::string(s.message()).find(name) != std::string::npos);
  };
  refused("empty", {}, Code::not_a_cache);
  refused("text", std::vector<uint8_t>(10000, 'a'), Code::not_a_cache);
  refused("zeros", std::vector<uint8_t>(10000, 0), Code::not_a_cache);
  refused("short", {'x'}, Code::not_a_cache);
  CHECK(open_code(folder.path()).code() == Code::bad_argument);
  CHECK(open_code(on_windows ? "NUL" : "/dev/null").code() == Code::bad_argument);
  CHECK(open_code(folder.file("absent")).code() == Code::not_found);
#ifndef _WIN32  // whose pipes are in no folder
  REQUIRE(mkfifo(folder.file("pipe").c_str(), 0600) == 0);
  CHECK(open_code(folder.file("pipe")).code() == Code::bad_argument);
#endif
  const Status gguf = open_code(std::string(FIXTURES) + "/models/llama-f16-untied-gqa4.gguf");
  CHECK(gguf.code() == Code::not_a_cache);
  CHECK(std::string(gguf.message()).find("GGUF") != std::string::npos);
}

TEST_CASE("saving onto a folder or into a missing one is refused before any work") {
  TempFolder folder;
  std::unique_ptr<CacheWriter> writer;
  CHECK(CacheWriter::create(folder.path(), {}, &writer).code() == Code::bad_argument);
  CHECK(CacheWriter::create(folder.path() + "/", {}, &writer).code() == Code::bad_argument);
  CHECK(CacheWriter::create("", {}, &writer).code() == Code::bad_argument);
  CHECK(CacheWriter::create(folder.file("no/a.kv"), {}, &writer).code() == Code::not_found);
  CHECK(writer == nullptr);
  CHECK(folder.entries() == 0);
}

TEST_CASE("verify_all reports its progress and stops when asked") {
  TempFolder folder;
  const std::vector<Part> parts = {{samples::SectionKind::pages, 1, samples::noise(3 << 20, 5)}};
  REQUIRE(samples::save(folder.file("a.kv"), parts, 50'000).ok());
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
  uint64_t done = 0;
  Progress progress([&](uint64_t now, uint64_t total) {
    CHECK(now >= done);
    CHECK(total == file->size());
    done = now;
    return 0;
  });
  CHECK(file->verify_all(&progress, nullptr).ok());
  CHECK(done == file->size());
  Progress stop([](uint64_t, uint64_t) { return 1; });
  CHECK(file->verify_all(&stop, nullptr).code() == Code::cancelled);
  Cancel cancel;
  cancel.fire();
  CHECK(file->verify_all(nullptr, &cancel).code() == Code::cancelled);
}

// Run by name with --no-skip; prints what a save and an open of 400 MB cost relative to the plain
// system calls.
TEST_CASE("benchmark: a file of 400 MB" * doctest::skip()) {
  using clock = std::chrono::steady_clock;
  const auto seconds = [](clock::time_point since) {
    return std::chrono::duration<double>(clock::now() - since).count();
  };
  TempFolder folder;
  const std::size_t piece = 65536, pieces = 6400;
  const double gigabytes = static_cast<double>(piece * pieces) * 1e-9;
  const std::vector<uint8_t> data = samples::noise(piece * 64, 1);  // beyond the second-level cache

  double plain_seconds = 1e9, write_seconds = 1e9, sync_seconds = 1e9;
  for (int round = 0; round < 3; ++round) {
    auto start = clock::now();
    os::File plain;
    REQUIRE(os::File::create_temporary(folder.file("plain"), &plain).ok());
    REQUIRE(plain.preallocate(piece * pieces).ok());
    for (std::size_t i = 0; i < pieces; ++i) {
      if (!plain.write(i * piece, data.data() + i % 64 * piece, piece).ok()) FAIL("plain write");
    }
    plain_seconds = std::min(plain_seconds, seconds(start));
    REQUIRE(plain.close().ok());
    REQUIRE(os::remove_file(plain.path()).ok());

    std::unique_ptr<CacheWriter> writer;
    start = clock::now();
    REQUIRE(CacheWriter::create(folder.file("a.kv"), samples::identity(1), &writer).ok());
    REQUIRE(writer->add_section(samples::SectionKind::pages, 1, piece * pieces).ok());
    REQUIRE(writer->begin().ok());
    for (std::size_t i = 0; i < pieces; ++i) {
      if (!writer->write(data.data() + i % 64 * piece, piece).ok()) FAIL("cache write");
    }
    write_seconds = std::min(write_seconds, seconds(start));
    start = clock::now();
    REQUIRE(writer->finish().ok());
    sync_seconds = std::min(sync_seconds, seconds(start));
  }

  double open_seconds = 1e9;
  std::shared_ptr<const CacheFile> file;
  for (int i = 0; i < 10; ++i) {
    const auto start = clock::now();
    REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
    open_seconds = std::min(open_seconds, seconds(start));
  }
  const auto& pages = *file->find(samples::SectionKind::pages);
  auto start = clock::now();
  REQUIRE(file->verify_all(nullptr, nullptr).ok());
  const double first_seconds = seconds(start);
  start = clock::now();
  REQUIRE(file->verify_all(nullptr, nullptr).ok());
  const double second_seconds = seconds(start);
  REQUIRE(file->check_section(pages).ok());
  start = clock::now();
  bool intact = true;
  for (uint64_t i = 0; i < 1'000'000; ++i) intact &= file->check(pages, i % 6400 * 65536, 65536);
  const double check_seconds = seconds(start);
  REQUIRE(intact);
  std::printf("write %.2f GB/s (plain writes %.2f GB/s, ratio %.2f), sync and rename %.0f ms\n",
              gigabytes / write_seconds, gigabytes / plain_seconds, plain_seconds / write_seconds,
              sync_seconds * 1e3);
  std::printf(
      "open %.3f ms; verify %.2f GB/s at first, %.2f GB/s mapped; check of a seen extent %.1f ns\n",
      open_seconds * 1e3, gigabytes / first_seconds, gigabytes / second_seconds,
      check_seconds * 1e3);
}
