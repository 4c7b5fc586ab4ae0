// Selected pages of a mapped file: the right bytes from bounded memory, or an error, whatever
// happens to file, disk and memory.
#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "failing_allocations.h"
#include "failing_files.h"
#include "resident.h"
#include "store/cache_samples.h"
#include "store/page_store.h"
#include "temp_folder.h"

using namespace kvasir;
using format::SectionKind;

namespace {

constexpr uint32_t layers = 2, heads = 3, pages = 203;  // the last extent is not full
const StoreShape shape{layers, heads, PageShape::of(64)};
constexpr uint64_t all_pages = uint64_t{layers} * heads * pages;

// Random pages in private memory.
PageStore make_store() {
  PageStore store(shape);
  REQUIRE(store.reserve(pages).ok());
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const std::size_t size = std::size_t{shape.page.page_tokens} * shape.page.dim;
  std::vector<float> k(size), v(size);
  for (uint32_t l = 0; l < layers; ++l)
    for (uint32_t h = 0; h < heads; ++h)
      for (uint32_t p = 0; p < pages; ++p) {
        for (float& x : k) x = normal(random);
        for (float& x : v) x = normal(random);
        store.seal(cpu_kernels(), l, h, p, k.data(), v.data());
      }
  store.commit(pages);
  return store;
}

const PageStore& in_memory() {
  static const PageStore store = make_store();
  return store;
}

// A file with the store's sections, and the store over it.
struct Saved {
  Saved() {
    std::unique_ptr<CacheWriter> writer;
    format::Identity identity = samples::identity(uint64_t{pages} * shape.page.page_tokens);
    identity.layers = layers, identity.kv_heads = heads, identity.head_dim = shape.page.head_dim;
    REQUIRE(CacheWriter::create(path, identity, &writer).ok());
    for (SectionKind kind : PageStore::sections)
      REQUIRE(writer->add_section(kind, 1, PageStore::file_bytes(shape, kind, pages)).ok());
    REQUIRE(writer->begin().ok());
    const auto write = [&](const void* data, std::size_t size) {
      return writer->write(data, size);
    };
    for (SectionKind kind : PageStore::sections) REQUIRE(in_memory().write(kind, write).ok());
    REQUIRE(writer->finish().ok());
  }
  PageStore map() {
    REQUIRE(CacheFile::open(path, &file).ok());
    PageStore store(shape);
    REQUIRE(PageStore::map(shape, file, pages, &store).ok());
    return store;
  }
  // The place of a page in the file.
  uint64_t offset_of(uint32_t layer, uint32_t head, uint32_t p) const {
    const uint64_t extent = (uint64_t{p} / extent_pages * layers + layer) * heads + head;
    return file->find(SectionKind::pages)->offset +
           (extent * extent_pages + p % extent_pages) * page_bytes;
  }
  void flip(uint64_t offset) const {
    std::fstream at(path, std::ios::in | std::ios::out | std::ios::binary);
    at.seekg(static_cast<std::streamoff>(offset));
    const int byte = at.get();
    at.seekp(static_cast<std::streamoff>(offset));
    at.put(static_cast<char>(byte ^ 4));
  }

  TempFolder folder;
  std::string path = folder.file("a.kv");
  std::shared_ptr<const CacheFile> file;
};

// `count` different pages, ascending.
std::vector<uint32_t> choose(uint32_t count, std::mt19937* random) {
  std::vector<uint32_t> numbers(pages);
  for (uint32_t i = 0; i < pages; ++i) numbers[i] = i;
  std::shuffle(numbers.begin(), numbers.end(), *random);
  numbers.resize(count);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

bool same(const PageRef& ref, uint32_t layer, uint32_t head, uint32_t p) {
  const PageRef expected = in_memory().page(layer, head, p);
  return std::memcmp(ref.data, expected.data, page_bytes) == 0 &&
         std::memcmp(ref.scales, expected.scales, shape.page.scales_bytes() / extent_pages) == 0;
}

// Fetches random lists and compares all their bytes; returns how many pages that were.
uint64_t read_randomly(const PageStore& store, uint32_t lists, uint32_t seed,
                       uint32_t longest = 40) {
  std::mt19937 random(seed);
  const auto below = [&](uint32_t end) { return static_cast<uint32_t>(random() % end); };
  uint64_t fetched = 0;
  for (uint32_t i = 0; i < lists; ++i) {
    const uint32_t layer = below(layers), head = below(heads);
    const auto numbers = choose(below(longest + 1), &random);
    std::vector<PageRef> refs(numbers.size());
    PageStore::Hold hold;
    if (!store.fetch(layer, head, numbers, refs.data(), &hold).ok()) return 0;
    for (std::size_t n = 0; n < numbers.size(); ++n)
      if (!same(refs[n], layer, head, numbers[n])) return 0;
    fetched += numbers.size();
  }
  return fetched;
}

// Made-up pages of so many heads that their cache has several parts, which are not all of one size.
// Every page names itself.
struct ManyHeads final : PageSource {
  static constexpr uint32_t heads = 100;  // six parts of 16 or 17
  std::atomic<uint32_t> count{5};         // of extents
  uint64_t extents() const override { return count; }
  std::size_t page_size() const override { return page_bytes; }
  Status read(uint64_t first, std::span<std::byte* const> to) const override {
    for (std::byte* page : to) {
      for (uint64_t i = 0; i < page_bytes; i += sizeof first)
        std::memcpy(page + i, &first, sizeof first);
      ++first;
    }
    return {};
  }
  uint32_t scale_bytes() const override { return 128; }
  Status read_scales(uint64_t block, std::byte* to) const override {
    for (uint64_t i = 0; i < page_bytes / 128; ++i)
      for (uint64_t at = 0, page = block * (page_bytes / 128) + i; at < 128; at += sizeof page)
        std::memcpy(to + i * 128 + at, &page, sizeof page);
    return {};
  }
  static bool is(const PageRef& ref, uint32_t head, uint32_t p) {
    const uint64_t page =
        (uint64_t{p} / extent_pages * heads + head) * extent_pages + p % extent_pages;
    return std::memcmp(ref.data, &page, sizeof page) == 0 &&
           std::memcmp(ref.data + page_bytes - sizeof page, &page, sizeof page) == 0 &&
           std::memcmp(ref.scales, &page, sizeof page) == 0;
  }
};

// The same list of every head; false where one got other pages than its own.
bool fetch_of_all(PageCache* cache, std::span<const uint32_t> numbers, uint32_t first_head = 0) {
  std::vector<PageRef> refs(numbers.size());
  PageHold hold;
  for (uint32_t i = 0; i < ManyHeads::heads; ++i) {
    const uint32_t head = (first_head + i) % ManyHeads::heads;
    if (!cache->fetch(head, numbers, refs.data(), &hold).ok()) return false;
    for (std::size_t n = 0; n < numbers.size(); ++n)
      if (!ManyHeads::is(refs[n], head, numbers[n])) return false;
  }
  return true;
}

std::vector<uint32_t> numbers_from(uint32_t first, uint32_t end, uint32_t step = 1) {
  std::vector<uint32_t> numbers;
  for (uint32_t p = first; p < end; p += step) numbers.push_back(p);
  return numbers;
}

int fail_reads(const char* operation, const char*) {
  return std::string_view(operation) == "read" ? EIO : 0;
}

}  // namespace

TEST_CASE(
    "chosen pages of a mapped file are those of private memory, whatever the cache may hold") {
  Saved saved;
  for (uint64_t limit : {PageCache::by_itself, uint64_t{0}, uint64_t{5000},
                         uint64_t{7} * page_bytes, uint64_t{1} << 40}) {
    CAPTURE(limit);
    const PageStore store = saved.map();
    store.set_cache_limit(limit);
    const uint64_t fetched = read_randomly(store, 500, 1);
    CHECK(fetched > 5000);
    const PageCache::Counts counts = store.cache_counts();
    CHECK(counts.found + counts.read == fetched);
    CHECK(counts.kept <= std::min(limit / page_bytes, all_pages));
    if (limit == 0) CHECK(counts.found == 0);
    // each page once
    if (limit > all_pages * page_bytes && limit != PageCache::by_itself)
      CHECK(counts.read == counts.kept);
  }
}

TEST_CASE("pages that are held stay as they are while others take all the room") {
  Saved saved;
  const PageStore store = saved.map();
  store.set_cache_limit(8 * page_bytes);
  std::mt19937 random(3);
  const auto numbers = choose(30, &random);  // more than there is room for
  std::vector<PageRef> refs(numbers.size());
  {
    PageStore::Hold hold;
    REQUIRE(store.fetch(1, 2, numbers, refs.data(), &hold).ok());
    CHECK(read_randomly(store, 100, 5) > 0);
    store.set_cache_limit(3 * page_bytes);
    CHECK(read_randomly(store, 100, 6) > 0);
    for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(same(refs[i], 1, 2, numbers[i]));
  }
  CHECK(read_randomly(store, 100, 7) > 0);
  CHECK(store.cache_counts().kept == 3);
}

TEST_CASE("a step's pages are found again by the next one, however large the budget") {
  Saved saved;
  for (uint32_t list : {2u, 20u, 150u}) {
    const PageStore store = saved.map();
    std::mt19937 random(1);
    const auto numbers = choose(list, &random);
    std::vector<PageRef> refs(list);
    uint64_t read = 0;
    for (int token = 0; token < 4; ++token) {
      read = store.cache_counts().read;
      for (uint32_t h = 0; h < heads; ++h) {
        PageStore::Hold hold;
        REQUIRE(store.fetch(0, h, numbers, refs.data(), &hold).ok());
      }
    }
    CHECK(store.cache_counts().read == read);
    CHECK(store.cache_counts().kept <= std::max<uint64_t>(all_pages / 20, 2 * heads * list));
  }
}

TEST_CASE("a short document's pages are used in the mapping, unless the cache has a limit") {
  Saved saved;
  PageStore store = saved.map();
  store.use_mapping();
  const std::vector<uint32_t> numbers = {3, 20, 202};
  std::vector<PageRef> refs(numbers.size());
  PageStore::Hold hold;
  REQUIRE(store.fetch(1, 2, numbers, refs.data(), &hold).ok());
  for (std::size_t i = 0; i < 3; ++i) CHECK(refs[i].data == store.page(1, 2, numbers[i]).data);
  saved.flip(saved.offset_of(1, 0, 20) + 9);
  CHECK(store.fetch(1, 0, numbers, refs.data(), &hold).offset() == saved.offset_of(1, 0, 20));
  store.set_cache_limit(100 * page_bytes);
  CHECK((store.fetch(1, 2, numbers, refs.data(), &hold).ok() && store.cache_counts().read == 3));
}

// Windows does not say which pages of a mapping are in memory as /proc does.
TEST_CASE("a choice leaves no page of the file's mapping in memory" * doctest::skip(on_windows)) {
  Saved saved;
  const PageStore store = saved.map();
  CHECK(read_randomly(store, 1000, 1, 4) > 0);  // every page, a few at a time
  for (uint32_t l = 0; l < layers; ++l)
    for (uint32_t h = 0; h < heads; ++h)
      for (uint32_t e = 0; e < store.extents(); ++e) REQUIRE(store.intact_bounds(l, h, e));
  CHECK(resident_of(saved.path) == 0);
  // scales and bounds take a tenth
  CHECK(store.private_bytes() < PageStore::file_bytes(shape, SectionKind::pages, pages) / 6);
  // a pass over everything goes through the mapping, so that this test sees it
  REQUIRE(store.intact_page(0, 0, 100));
  CHECK(resident_of(saved.path) > 0);
}

TEST_CASE("going on after loading reads the last extent past the mapping") {
  Saved saved;
  PageStore store = saved.map();
  REQUIRE(store.reserve(pages + 1).ok());
  CHECK(resident_of(saved.path) == 0);
  std::vector<uint32_t> numbers(pages);
  for (uint32_t p = 0; p < pages; ++p) numbers[p] = p;
  std::vector<PageRef> refs(pages);
  PageStore::Hold hold;
  REQUIRE(store.fetch(1, 1, numbers, refs.data(), &hold).ok());  // from the cache, and from memory
  for (uint32_t p = 0; p < pages; ++p) CHECK(same(refs[p], 1, 1, p));
}

TEST_CASE("pages that are not to be kept are right, and nothing of them stays") {
  Saved saved;
  const PageStore store = saved.map();
  const std::vector<uint32_t> numbers{3, 17, 18, 150};
  std::vector<PageRef> refs(numbers.size());
  for (int time = 0; time < 2; ++time) {
    PageStore::Hold hold(false);
    REQUIRE(store.fetch(1, 2, numbers, refs.data(), &hold).ok());
    for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(same(refs[i], 1, 2, numbers[i]));
  }
  CHECK(store.cache_counts().read == 2 * numbers.size());
  CHECK(store.cache_counts().kept == 0);
  PageStore::Hold kept, hold(false);
  REQUIRE(store.fetch(1, 2, numbers, refs.data(), &kept).ok());
  // what is there is found all the same
  REQUIRE(store.fetch(1, 2, numbers, refs.data(), &hold).ok());
  CHECK(store.cache_counts().found == numbers.size());
  CHECK(store.cache_counts().kept == numbers.size());
}

TEST_CASE("pages that are not kept take a hold's memory again, list after list") {
  Saved saved;
  const PageStore store = saved.map();
  PageStore::Hold hold(false);
  const std::vector<uint32_t> many{3, 17, 18, 150}, few{4, 19};
  std::vector<PageRef> refs(many.size());
  REQUIRE(store.fetch(1, 2, many, refs.data(), &hold).ok());
  const int8_t* const there = refs[0].data;
  for (const auto& numbers : {few, many}) {
    REQUIRE(store.fetch(0, 1, numbers, refs.data(), &hold).ok());
    CHECK(refs[0].data == there);
    for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(same(refs[i], 0, 1, numbers[i]));
  }
}

TEST_CASE("where a layer's scales have been read, pages come with these, kept or not") {
  Saved saved;
  const PageStore store = saved.map();
  const std::size_t stride = store.layer_scales();
  REQUIRE(store.mapped_extents() == 13);
  std::vector<uint16_t> scales(13 * stride);
  REQUIRE(store.read_scales(1, 0, 5, scales.data()).ok());
  REQUIRE(store.read_scales(1, 5, 13, scales.data()).ok());
  const uint64_t third = saved.file->find(SectionKind::scales)->offset +
                         shape.page.scales_bytes() * heads * layers * 3;
  saved.flip(third + 5);
  CHECK(store.read_scales(1, 0, 3, scales.data()).ok());
  const std::vector<uint32_t> numbers{3, 17, 18, 48, 150, 202};
  std::vector<PageRef> refs(numbers.size());
  for (bool keeps : {false, true}) {
    PageStore::Hold hold(keeps);
    hold.mapped.set_scales(scales.data() + 2 * shape.page.scales_bytes() / sizeof(uint16_t),
                           stride);
    REQUIRE(store.fetch(1, 2, numbers, refs.data(), &hold).ok());
    CHECK(hold.mapped.read() == numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(same(refs[i], 1, 2, numbers[i]));
    hold.mapped.set_scales(nullptr, 0);
    // by itself it reads them
    CHECK(store.fetch(0, 0, numbers, refs.data(), &hold).code() == Code::corrupt);
  }
  const Status s = store.read_scales(0, 0, 13, scales.data());
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() == third);
}

// Windows lets nobody cut a file that is mapped.
TEST_CASE("a file that is cut while it is mapped is an error for lost pages, and no signal" *
          doctest::skip(on_windows)) {
  Saved saved;
  const PageStore store = saved.map();
  std::mt19937 random(1);
  std::vector<PageRef> refs(2);
  PageStore::Hold hold;
  REQUIRE(store.fetch(0, 0, std::vector<uint32_t>{99, 150}, refs.data(), &hold).ok());
  const uint64_t end = saved.offset_of(0, 0, 100) + 1000;
  std::filesystem::resize_file(saved.path, end);
  count_faults("file cut while it is mapped");
  // they were read before
  CHECK(store.fetch(0, 0, std::vector<uint32_t>{99, 150}, refs.data(), &hold).ok());
  CHECK(same(refs[0], 0, 0, 99));
  CHECK(same(refs[1], 0, 0, 150));
  const Status s = store.fetch(0, 0, std::vector<uint32_t>{99, 100}, refs.data(), &hold);
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() == end);
  CHECK(std::string(s.message()).find(saved.path) != std::string::npos);
  CHECK_FALSE(store.intact_bounds(1, 2, 7));
  CHECK(store.damaged().code() == Code::corrupt);
  PageStore longer(store);
  CHECK(longer.reserve(pages + 1).code() == Code::corrupt);
}

TEST_CASE("damage that comes after loading is met by the pages that are read later, at its place") {
  Saved saved;
  const PageStore store = saved.map();
  std::vector<PageRef> refs(3);
  PageStore::Hold hold;
  const std::vector<uint32_t> numbers = {20, 21, 40}, overlapping = {20, 22, 40};
  REQUIRE(store.fetch(1, 0, std::vector<uint32_t>{20}, refs.data(), &hold).ok());
  saved.flip(saved.offset_of(1, 0, 20) + 77);
  saved.flip(saved.offset_of(1, 0, 21) + 4095);
  const Status s = store.fetch(1, 0, numbers, refs.data(), &hold);
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() == saved.offset_of(1, 0, 21));
  REQUIRE(
      store.fetch(1, 0, overlapping, refs.data(), &hold).ok());  // page 20 was checked and is kept
  for (std::size_t i = 0; i < 3; ++i) CHECK(same(refs[i], 1, 0, overlapping[i]));
  store.set_cache_limit(PageCache::by_itself);  // forgets it
  CHECK(store.fetch(1, 0, overlapping, refs.data(), &hold).offset() == saved.offset_of(1, 0, 20));
  saved.flip(saved.offset_of(1, 0, 21) + 4095);
  saved.flip(saved.offset_of(1, 0, 20) + 77);
  CHECK(store.fetch(1, 0, numbers, refs.data(), &hold).ok());
}

TEST_CASE("damaged scales and bounds are met where they are read, and nowhere else") {
  Saved saved;
  PageStore store = saved.map();
  const auto* scales = saved.file->find(SectionKind::scales);
  const auto* bounds = saved.file->find(SectionKind::bounds);
  saved.flip(scales->offset + shape.page.scales_bytes() * heads * layers * 3 + 5);
  saved.flip(bounds->offset + 2 * format::block_bytes + 5);
  PageRef ref{};
  PageStore::Hold hold;
  CHECK(store.fetch(0, 0, std::vector<uint32_t>{20}, &ref, &hold).ok());
  const Status s = store.fetch(0, 0, std::vector<uint32_t>{48}, &ref, &hold);
  CHECK(s.code() == Code::corrupt);
  CHECK(s.offset() == scales->offset + shape.page.scales_bytes() * heads * layers * 3);
  CHECK(store.intact_bounds(0, 0, 0));
  CHECK_FALSE(store.intact_bounds(0, 2, 0));  // bytes 8704 to 13055
  CHECK(store.damaged().offset() == bounds->offset + 2 * format::block_bytes);
}

TEST_CASE("a disk that fails is an error with the system's reason, and later reads are good") {
  Saved saved;
  const PageStore store = saved.map();
  const std::vector<uint32_t> numbers = {1, 2, 3, 50, 51, 180};
  std::vector<PageRef> refs(numbers.size());
  PageStore::Hold hold;
  REQUIRE(store.fetch(0, 1, std::vector<uint32_t>{50}, refs.data(), &hold).ok());
  {
    const failing_files::WithFault fault(fail_reads);
    count_faults("file operation fails, and all after it");
    CHECK(store.fetch(0, 1, std::vector<uint32_t>{50}, refs.data(), &hold).ok());  // is there
    const Status s = store.fetch(0, 1, numbers, refs.data(), &hold);
    CHECK(s.code() == Code::io);
    CHECK(s.sys_errno() == EIO);
    CHECK_FALSE(store.intact_bounds(0, 1, 0));
    CHECK(store.damaged().code() == Code::io);
  }
  for (os::Fault f : {failing_files::transfer_in_parts, failing_files::interrupt_every_second}) {
    const failing_files::WithFault fault(f);
    count_faults("interruptions or short transfers");
    store.set_cache_limit(PageCache::by_itself);
    REQUIRE(store.fetch(0, 1, numbers, refs.data(), &hold).ok());
    for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(same(refs[i], 0, 1, numbers[i]));
  }
  CHECK(store.intact_bounds(0, 1, 0));
}

TEST_CASE("memory that fails leaves the cache as good as it was") {
  Saved saved;
  const PageStore store = saved.map();
  std::mt19937 random(1);
  const auto numbers = choose(60, &random);
  std::vector<PageRef> refs(numbers.size());
  for (long n = 0;; ++n) {
    bool reached = false, failed = false;
    {
      PageStore::Hold hold;
      FailingAllocations failing(n, true);
      try {
        store.set_cache_limit(n % 2 ? 9 * page_bytes : PageCache::by_itself);
        failed = !store.fetch(0, 2, numbers, refs.data(), &hold).ok();
      } catch (const std::bad_alloc&) {
      }
      reached = failing.reached();
    }
    CHECK_FALSE(failed);  // but by the exception
    REQUIRE(read_randomly(store, 3, static_cast<uint32_t>(n)) > 0);
    if (!reached) break;
  }
}

TEST_CASE("forks in threads read one file through one cache, also while it is given other limits") {
  Saved saved;
  const PageStore store = saved.map();
  store.set_cache_limit(20 * page_bytes);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const PageStore fork(store);
      for (uint32_t round = 0; round < 30; ++round) {
        if (read_randomly(fork, 20, t * 100 + round) == 0) ++wrong;
        for (uint32_t e = 0; e < fork.extents(); ++e)
          if (!fork.intact_bounds(t % layers, round % heads, e)) ++wrong;
      }
    });
  for (uint64_t i = 0; i < 50; ++i) {
    store.set_cache_limit(i * page_bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
}

TEST_CASE(
    "many heads: each gets its own pages, whatever the parts of the cache may hold together") {
  const auto source = std::make_shared<ManyHeads>();
  const uint32_t of_head = 5 * extent_pages;
  const uint64_t all = uint64_t{ManyHeads::heads} * of_head;
  PageCache cache(source, ManyHeads::heads);
  // Fewer pages than parts, a number that parts and heads do not divide, all but one, just all,
  // more.
  for (uint64_t limit : {uint64_t{0}, uint64_t{4}, uint64_t{1003}, all - 1, all, 2 * all,
                         PageCache::by_itself / page_bytes}) {
    CAPTURE(limit);
    cache.set_limit(limit > 2 * all ? PageCache::by_itself : limit * page_bytes + 100);
    const PageCache::Counts before = cache.counts();
    CHECK(before.kept == 0);
    CHECK(before.bytes == 0);
    for (int again = 0; again < 2; ++again) {
      CHECK(fetch_of_all(&cache, numbers_from(0, of_head)));
      CHECK(fetch_of_all(&cache, numbers_from(3, of_head, 7)));
    }
    const PageCache::Counts counts = cache.counts();
    CHECK(counts.found + counts.read - before.found - before.read ==
          2 * ManyHeads::heads * (of_head + numbers_from(3, of_head, 7).size()));
    // of all parts, with none left out
    if (limit <= 2 * all) CHECK(counts.kept == std::min(limit, all));
    if (limit >= all && limit <= 2 * all) CHECK(counts.read - before.read == all);
    CHECK(counts.bytes >= counts.kept * (page_bytes + 128));
    // one table's entry a page, in one part
    CHECK(counts.bytes <= counts.kept * (page_bytes + 128 + 16) + all * sizeof(uint32_t));
  }
}

TEST_CASE("many heads: a step's pages are found again by the next one, also where heads differ") {
  PageCache cache(std::make_shared<ManyHeads>(), ManyHeads::heads);
  const auto few = numbers_from(0, 2), many = numbers_from(0, 60);
  std::vector<PageRef> refs(many.size());
  uint64_t read = 0;
  for (int token = 0; token < 8; ++token) {
    read = cache.counts().read;
    for (uint32_t head = 0; head < ManyHeads::heads; ++head) {
      PageHold hold;
      REQUIRE(cache.fetch(head, head % 5 == 0 ? many : few, refs.data(), &hold).ok());
    }
  }
  CHECK(cache.counts().read == read);
}

TEST_CASE("many heads: pages that are held stay as they are while their part is given others") {
  PageCache cache(std::make_shared<ManyHeads>(), ManyHeads::heads);
  cache.set_limit(60 * page_bytes);  // ten of a part
  const auto numbers = numbers_from(0, 30);
  std::vector<std::vector<PageRef>> refs(ManyHeads::heads, std::vector<PageRef>(numbers.size()));
  std::vector<PageHold> holds(ManyHeads::heads);
  for (uint32_t head = 0; head < ManyHeads::heads; ++head)
    REQUIRE(cache.fetch(head, numbers, refs[head].data(), &holds[head]).ok());
  CHECK(fetch_of_all(&cache, numbers_from(30, 80)));
  cache.set_limit(12 * page_bytes);
  CHECK(fetch_of_all(&cache, numbers_from(0, 80)));
  CHECK(cache.counts().kept == 12);
  for (uint32_t head = 0; head < ManyHeads::heads; ++head)
    for (std::size_t n = 0; n < numbers.size(); ++n)
      REQUIRE(ManyHeads::is(refs[head][n], head, numbers[n]));
}

TEST_CASE(
    "many heads: a file that grows has its new pages in every part, and old ones are what they "
    "were") {
  for (uint64_t limit : {PageCache::by_itself, uint64_t{500} * page_bytes}) {
    CAPTURE(limit);
    const auto source = std::make_shared<ManyHeads>();
    source->count = 1;
    PageCache cache(source, ManyHeads::heads);
    cache.set_limit(limit);
    for (uint32_t extents = 1; extents <= 9; ++extents) {
      source->count = extents;
      CHECK(fetch_of_all(&cache, numbers_from(0, extents * extent_pages, 3)));
      CHECK(
          fetch_of_all(&cache, numbers_from((extents - 1) * extent_pages, extents * extent_pages)));
    }
    if (limit != PageCache::by_itself) CHECK(cache.counts().kept <= limit / page_bytes);
  }
}

TEST_CASE(
    "many heads: threads get the right pages of all of them, also while the file grows and limits "
    "change") {
  const auto source = std::make_shared<ManyHeads>();
  PageCache cache(source, ManyHeads::heads);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      for (uint32_t round = 0; round < 20; ++round) {
        const uint32_t end = source->count * extent_pages;
        // two at the same heads
        if (!fetch_of_all(&cache, numbers_from(round % 9, end, 5), t % 4)) ++wrong;
      }
    });
  for (uint64_t i = 0; i < 20; ++i) {
    cache.set_limit(i % 3 ? i * 50 * page_bytes : PageCache::by_itself);
    if (i % 5 == 0) ++source->count;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread& t : threads) t.join();
  CHECK(wrong == 0);
  cache.set_limit(700 * page_bytes);
  CHECK(fetch_of_all(&cache, numbers_from(0, 80)));
  CHECK(cache.counts().kept == 700);
}
