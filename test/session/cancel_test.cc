// A step that is cancelled does not go on looking at a mapped file.
#include <fstream>

#include "helpers.h"
#include "temp_folder.h"

using namespace kvasir;

TEST_CASE("a cancelled step does not check the pages that it would have read") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const auto model = test::mini_model();
  {
    auto session = test::open_session(model);
    test::read(session.get(), test::book_tokens(1000));
    REQUIRE(session->save(path, nullptr, {}).ok());
  }
  uint64_t at = 0;
  SavedTimeline saved;
  {
    std::shared_ptr<const CacheFile> file;
    REQUIRE(CacheFile::open(path, &file).ok());
    CachePeek peek;
    REQUIRE(CachePeek::open(path, &peek).ok());
    REQUIRE(read_saved(peek, &saved).ok());
    at = file->find(format::SectionKind::pages)->offset + page_bytes + 99;  // in page 1 of the first layer and head
  }
  {
    std::fstream damage(path, std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(static_cast<std::streamoff>(at));
    damage.put('\x55');
  }
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  PageStore pages(model->store_shape());
  REQUIRE(PageStore::map(model->store_shape(), file, saved.pages, &pages).ok());
  const StoreShape shape = model->store_shape();
  Representatives none(shape, 64);
  none.forget();
  KvStore store = KvStore::restore(std::move(pages), KeySketch(shape), std::move(none), 64, {saved.window_count, true, true}, {});
  const KvStore::Restored to = store.restored();
  std::fill_n(to.centre, store.centre_size(), 0.0f);
  std::fill_n(to.sinks, store.sinks_size(), 0.0f);
  for (uint32_t plane = 0; plane < 2 * shape.heads_total(); ++plane) std::fill_n(to.window(plane), saved.window_count * shape.page.dim, 0.0f);
  REQUIRE(store.prepare(1).ok());

  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  Attention attention(model->config(), model->store_shape().page, cpu_kernels(), pool.get());
  std::vector<float> q(model->config().q_width()), out(q.size());
  Cancel cancel;
  cancel.fire();
  CHECK(attention.run(0, 0, 1, q.data(), store, nullptr, {}, nullptr, CancelLatch(&cancel), out.data(), nullptr).ok());
  cancel.reset();
  CHECK(attention.run(0, 0, 1, q.data(), store, nullptr, {}, nullptr, CancelLatch(&cancel), out.data(), nullptr).code() == Code::corrupt);
}
