// Every file operation of saving, loading and opening fails once, or from then on, with each kind
// of error: the right code, the old file or the new one, no descriptor and no temporary file left,
// the session as before.
#include <cerrno>
#include <functional>

#include "failing_files.h"
#include "helpers.h"
#include "replacing.h"
#include "temp_folder.h"

using namespace api_test;
using namespace failing_files;

namespace {

kv_status code_for(int error) {
  return error == ENOSPC ? KV_NO_SPACE : error == EMFILE ? KV_LIMIT : KV_IO;
}

// Calls attempt(status, reached) after each call that had its Nth operation failing.
void sweep(const std::function<kv_status(kv_error*)>& call,
           const std::function<void(bool failed)>& after) {
  const WithFault fault(planned);
  for (int error : {EIO, ENOSPC, EMFILE}) {
    for (bool once : {true, false}) {
      for (long n = 0;; ++n) {
        CAPTURE(error);
        CAPTURE(once);
        CAPTURE(n);
        plan = {n, once, error};
        kv_error reply{};
        const kv_status status = call(&reply);
        const bool reached = plan.reached();
        plan = {};
        CHECK_MESSAGE(status == (reached ? code_for(error) : KV_OK), reply.message);
        if (reached) CHECK(reply.sys_errno == error);
        after(reached);
        if (!reached) break;
      }
    }
  }
}

}  // namespace

TEST_CASE("a save whose Nth file operation fails" * doctest::skip(!replaces_files_in_use())) {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Session old = tiny_session(100), session = tiny_session(300);
  const std::vector<int32_t> next = peek(session.get(), 4);
  save(old.get(), path);
  const std::size_t descriptors = open_descriptors();
  sweep([&](kv_error* e) { return kv_save(session.get(), path.c_str(), nullptr, e); },
        [&](bool failed) {
          CHECK(folder.entries() == 1);
          CHECK(open_descriptors() == descriptors);
          const Session there = load(tiny_model(), path, KV_VERIFY);
          const std::size_t tokens = sequence(there.get()).size();
          CHECK((tokens == 300 || (failed && tokens == 100)));
          if (tokens == 300) CHECK(peek(there.get(), 4) == next);
          CHECK(peek(session.get(), 4) == next);
          if (tokens == 300) save(old.get(), path);
        });
}

TEST_CASE("a load, a look and an open whose Nth file operation fails") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  save(tiny_session(300).get(), path);
  const std::size_t descriptors = open_descriptors();
  kv_session* loaded = nullptr;
  const kv_session_options o = small_options();
  for (uint32_t flags : {0u, KV_VERIFY}) {
    kv_control call;
    kv_init(&call, sizeof call);
    call.flags = flags;
    sweep([&](kv_error* e) { return kv_load(tiny_model(), path.c_str(), &o, &call, &loaded, e); },
          [&](bool failed) {
            CHECK((loaded == nullptr) == failed);
            kv_session_close(loaded);
            loaded = nullptr;
            CHECK(open_descriptors() == descriptors);
          });
  }
  kv_model* model = nullptr;
  sweep([&](kv_error* e) { return kv_open(tiny_path, nullptr, nullptr, &model, e); },
        [&](bool failed) {
          CHECK((model == nullptr) == failed);
          kv_close(model);
          model = nullptr;
          CHECK(open_descriptors() == descriptors);
        });
  sweep([&](kv_error* e) { return kv_file_verify(path.c_str(), nullptr, e); }, [](bool) {});
  kv_file_info info{};
  info.struct_size = sizeof info;
  sweep([&](kv_error* e) { return kv_file_inspect(path.c_str(), &info, e); }, [](bool) {});
}

TEST_CASE("interruptions and transfers in parts are no failures") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const Session session = tiny_session(300);
  for (kvasir::os::Fault f : {interrupt_every_second, transfer_in_parts}) {
    const WithFault fault(f);
    count_faults("interruptions or short transfers", 2);
    save(session.get(), path);
    const Session loaded = load(tiny_model(), path, KV_VERIFY);
    CHECK(peek(loaded.get(), 4) == peek(session.get(), 4));
  }
}
