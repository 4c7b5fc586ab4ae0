// Hosts that end their threads in the middle of a call, by pthread_cancel or by pthread_exit in a
// callback, or whose callbacks throw: the process goes on, and the handle can be used by another
// thread.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <stdexcept>

#include "host.h"
#include "temp_folder.h"

namespace {

enum class End { cancel, cancel_at_once, exit_in_callback };

struct Work {
  End end = End::cancel;
  std::function<void(Work*)> run;
  std::atomic<bool> begun{false};
  bool returned = false;

  // As a host's callback.
  int32_t inside() {
    begun = true;
    if (end == End::exit_in_callback) pthread_exit(nullptr);
    if (end == End::cancel) pthread_testcancel();  // a cancellation point of the host's own
    return 0;
  }
};

int32_t on_text(const char*, std::size_t, void* user) { return static_cast<Work*>(user)->inside(); }
int32_t on_progress(int32_t, uint64_t, uint64_t, void* user) {
  return static_cast<Work*>(user)->inside();
}
void on_log(int32_t, const char*, void* user) { (void)static_cast<Work*>(user)->inside(); }

void* thread_main(void* argument) {
  auto* const work = static_cast<Work*>(argument);
  if (work->end == End::cancel_at_once) pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, nullptr);
  work->run(work);
  work->returned = true;
  for (;;) {
    pthread_testcancel();
    if (work->end == End::exit_in_callback) return nullptr;
    usleep(100);
  }
}

// Whether the call came to its end before the thread did.
bool run_and_end(End end, useconds_t after, std::function<void(Work*)> run) {
  Work work;
  work.end = end;
  work.run = std::move(run);
  pthread_t thread;
  host::require(pthread_create(&thread, nullptr, thread_main, &work) == 0, "a thread");
  if (end != End::exit_in_callback) {
    usleep(after);
    pthread_cancel(thread);
  }
  pthread_join(thread, nullptr);
  return work.returned;
}

kv_control reporting(Work* work) {
  kv_control o;
  kv_init(&o, sizeof o);
  o.progress = on_progress;
  o.user = work;
  return o;
}

// A session on which a call has ended goes on: its contents are whole; prefill and answers work.
void go_on(kv_session* session) {
  kv_error error{};
  std::size_t count = 0;
  const std::size_t before = host::count_tokens(session);
  std::vector<int32_t> tokens(before + 1);
  host::require_ok(kv_session_tokens(session, tokens.data(), tokens.size(), &count, &error), error,
                   "kv_session_tokens");
  const std::vector<int32_t> wanted = host::some_tokens(before);
  host::require(count == before && std::equal(wanted.begin(), wanted.end(), tokens.begin()),
                "a session has a beginning of the tokens that it was given");
  host::read(session, 10);
  host::require(host::count_tokens(session) == before + 10, "a session reads on");
  (void)host::ask(session, "and then", 4);
  host::require(host::count_tokens(session) == before + 10,
                "an answer leaves the sequence as it was");
}

// A prefill that ends within the instructions leaves no turn.
void exit_in_instructions(kv_model* model) {
  const std::string much(2000, 'x');
  kv_session_options o = host::session_options();
  o.instructions = much.c_str();
  kv_session* const session = host::open_session(model, o);
  run_and_end(End::exit_in_callback, 0, [&](Work* work) {
    const kv_control control = reporting(work);
    (void)kv_prefill(session, "a text", 6, &control, nullptr, nullptr, nullptr);
  });
  host::require(host::count_tokens(session) == 0, "no part of the instructions stays");
  kv_error error{};
  host::require_ok(kv_prefill(session, "a text", 6, nullptr, nullptr, nullptr, &error), error,
                   "kv_prefill");
  kv_session_close(session);
}

void end_calls(kv_model* model, End end, useconds_t after, const std::string& folder) {
  const std::vector<int32_t> tokens = host::some_tokens(600);
  kv_session* session = host::open_session(model);
  run_and_end(end, after, [&](Work* work) {
    const kv_control o = reporting(work);
    (void)kv_prefill_tokens(session, tokens.data(), tokens.size(), &o, nullptr, nullptr);
  });
  go_on(session);
  kv_session_close(session);

  session = host::open_session(model);
  host::read(session, 600);
  for (const uint32_t flags : {0u, KV_KEEP_TURN}) {
    kv_session* fork = nullptr;
    host::require(kv_session_fork(session, &fork, nullptr) == KV_OK, "kv_session_fork");
    run_and_end(end, after, [&](Work* work) {
      kv_generate_options g = host::generate_options(100);
      g.flags = flags;
      (void)kv_generate(fork, "a question", 10, &g, nullptr, on_text, work, nullptr, nullptr);
    });
    if (flags == 0) go_on(fork);
    (void)host::ask(fork);
    kv_session_close(fork);
  }
  const std::string path = folder + "/a.kv";
  run_and_end(end, after, [&](Work* work) {
    const kv_control o = reporting(work);
    (void)kv_save(session, path.c_str(), &o, nullptr);
  });
  kv_error error{};
  host::require_ok(kv_save(session, path.c_str(), nullptr, &error), error, "kv_save");
  run_and_end(end, after, [&](Work* work) {
    kv_control o = reporting(work);
    o.flags = KV_VERIFY;
    kv_session* loaded = nullptr;
    if (kv_load(model, path.c_str(), nullptr, &o, &loaded, nullptr) == KV_OK)
      kv_session_close(loaded);
  });
  run_and_end(end, after, [&](Work* work) {
    const kv_control o = reporting(work);
    (void)kv_pack(path.c_str(), (path + "z").c_str(), 0, &o, nullptr);
  });
  go_on(session);
  kv_session_close(session);

  kv_session_options logging = host::session_options("bounded");
  Work in_log;
  in_log.end = End::cancel_at_once;  // which does nothing in the callback
  logging.log = on_log;
  logging.log_user = &in_log;
  session = host::open_session(model, logging);
  host::read(session, 600);
  in_log.end = end;
  run_and_end(end, after, [&](Work*) {
    (void)kv_generate(session, "a", 1, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  });
  in_log.end = End::cancel_at_once;
  go_on(session);
  kv_session_close(session);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr End ends[] = {End::cancel};  // a sanitizer's own work may not be cut off anywhere
#else
constexpr End ends[] = {End::cancel, End::cancel_at_once};
#endif

struct Thrower {
  int calls = 0;
  [[noreturn]] void go() {
    if (++calls % 2) throw std::runtime_error("the window is gone");
    throw 42;
  }
};

int32_t throw_text(const char*, std::size_t, void* user) { static_cast<Thrower*>(user)->go(); }
int32_t throw_progress(int32_t, uint64_t, uint64_t, void* user) {
  static_cast<Thrower*>(user)->go();
}
void throw_log(int32_t, const char*, void* user) { static_cast<Thrower*>(user)->go(); }

void require_stop(kv_status status, const kv_error& error, const char* text) {
  if (status == KV_CANCELLED && std::strstr(error.message, text)) return;
  std::fprintf(stderr, "%s: '%s' where '%s' was expected\n", kv_status_text(status), error.message,
               text);
  std::exit(1);
}

// What a callback throws stops the call, under the callback's name.
void throw_out(kv_model* model, const std::string& folder) {
  Thrower thrower;
  kv_session_options o = host::session_options("bounded");
  o.log = throw_log;
  o.log_user = &thrower;
  kv_session* const session = host::open_session(model, o);
  host::read(session, 600);
  (void)host::ask(session);  // logs: what a log callback throws changes nothing
  host::require(thrower.calls > 0, "something was logged");
  thrower.calls = 0;
  kv_error error{};
  kv_answer answer{};
  answer.struct_size = sizeof answer;
  require_stop(
      kv_generate(session, "a", 1, nullptr, nullptr, throw_text, &thrower, &answer, &error), error,
      "the text callback threw an exception: the window is gone");
  host::require(answer.stop_reason == KV_STOP_CANCELLED, "the answer says that it was stopped");
  require_stop(
      kv_generate(session, "a", 1, nullptr, nullptr, throw_text, &thrower, nullptr, &error), error,
      "the text callback threw an exception: one that is");
  kv_control c;
  kv_init(&c, sizeof c);
  c.progress = throw_progress;
  c.user = &thrower;
  const std::vector<int32_t> tokens = host::some_tokens(600);
  require_stop(kv_prefill_tokens(session, tokens.data(), 300, &c, nullptr, &error), error,
               "the progress callback threw an exception: the window is gone");
  require_stop(kv_save(session, (folder + "/t.kv").c_str(), &c, &error), error,
               "the progress callback threw an exception");
  host::require(host::count_tokens(session) == 664, "what was read before stays");
  (void)host::ask(session);
  kv_session_close(session);
}

}  // namespace

int main(int argc, char** argv) {
  const TempFolder folder;
  kv_model* const model = host::open_model();
  throw_out(model, folder.path());
  end_calls(model, End::exit_in_callback, 0, folder.path());
  exit_in_instructions(model);
  const int rounds = host::times(argc, argv, 3);
  for (int i = 0; i < rounds; ++i)
    for (const End end : ends)
      end_calls(model, end, static_cast<useconds_t>(i * 7919 % 20000), folder.path());
  host::require(folder.entries() <= 2, "no temporary file is left");
  kv_close(model);
  return 0;
}
