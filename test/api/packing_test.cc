// Packed copies of saved sequences through the public header: unpacking restores the file, and its
// sequence goes on as before.
#include <cstring>
#include <thread>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

struct Packed {
  TempFolder folder;
  std::string path = folder.file("a.kv"), packed = folder.file("a.kvz"), back = folder.file("b.kv");
  explicit Packed(kv_session* session) { save(session, path); }
};

kv_packed_info inspect_packed(const std::string& path) {
  kv_packed_info info{};
  info.struct_size = sizeof info;
  REQUIRE_OK(kv_packed_inspect(path.c_str(), &info, error));
  return info;
}

}  // namespace

TEST_CASE("a sequence of any length is packed, unpacks to the same bits and goes on") {
  // nothing; a window alone; one page; many
  for (std::size_t tokens : {0u, 1u, 127u, 128u, 129u, 4096u}) {
    CAPTURE(tokens);
    const Session session = tiny_session(tokens);
    Packed files(session.get());
    for (uint32_t level : {0u, 1u, 19u}) {
      if (level == 19 && tokens > 1000) continue;
      REQUIRE_OK(kv_pack(files.path.c_str(), files.packed.c_str(), level, nullptr, error));
      REQUIRE_OK(kv_unpack(files.packed.c_str(), files.back.c_str(), nullptr, error));
      CHECK(read_file(files.back) == read_file(files.path));
    }
    CHECK(files.folder.entries() == 3);
    const kv_packed_info info = inspect_packed(files.packed);
    CHECK(info.tokens == tokens);
    CHECK(info.document_bytes == read_file(files.path).size());
    CHECK(info.file_bytes == read_file(files.packed).size());
    CHECK(info.file_bytes < info.document_bytes);
    if (tokens != 0 && tokens < 4096)
      CHECK(peek(load(tiny_model(), files.back, KV_VERIFY).get(), 4) == peek(session.get(), 4));
  }
}

TEST_CASE("loading a packed sequence is refused, and the message says what to do") {
  Packed files(tiny_session(200).get());
  REQUIRE_OK(kv_pack(files.path.c_str(), files.packed.c_str(), 0, nullptr, error));
  kv_session* session = nullptr;
  kv_file_info info{};
  info.struct_size = sizeof info;
  kv_error error{};
  const auto check = [&](kv_status status) {
    CHECK(status == KV_NOT_A_CACHE);
    CHECK(std::strstr(error.message, "unpack it first") != nullptr);
  };
  check(kv_load(tiny_model(), files.packed.c_str(), nullptr, nullptr, &session, &error));
  check(kv_file_inspect(files.packed.c_str(), &info, &error));
  check(kv_file_verify(files.packed.c_str(), nullptr, &error));
}

TEST_CASE(
    "packing at the slowest level stops soon after it is cancelled, and says how far it is at most "
    "ten times a second") {
  Packed files(tiny_session(4096).get());
  const Cancel cancel = make_cancel();
  struct Seen {
    int calls = 0, phase = 0;
    uint64_t done = 0, total = 0;
  } seen;
  kv_control o = control_of(cancel.get());
  o.progress = [](int32_t phase, uint64_t done, uint64_t total, void* user) -> int32_t {
    auto* s = static_cast<Seen*>(user);
    CHECK(done >= s->done);
    *s = {s->calls + 1, phase, done, total};
    return 0;
  };
  o.user = &seen;
  double stopped_after = 0;
  const auto begin = std::chrono::steady_clock::now();
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    kv_cancel_fire(cancel.get());
  });
  const kv_status status = kv_pack(files.path.c_str(), files.packed.c_str(), 19, &o, nullptr);
  stopped_after = seconds_since(begin);
  later.join();
  CHECK(status == KV_CANCELLED);
  // 0.1 and what a busy machine adds; without a look at the token it is many seconds
  CHECK(stopped_after < 2);
  CHECK(files.folder.entries() == 1);
  kv_cancel_reset(cancel.get());
  seen = {};
  REQUIRE_OK(kv_pack(files.path.c_str(), files.packed.c_str(), 1, &o, error));
  CHECK(seen.phase == KV_PHASE_PACK);
  CHECK(seen.done == seen.total);
  CHECK(seen.total == read_file(files.path).size());
  seen = {};
  REQUIRE_OK(kv_unpack(files.packed.c_str(), files.back.c_str(), &o, error));
  CHECK(seen.phase == KV_PHASE_UNPACK);
  CHECK(seen.done == seen.total);
}
