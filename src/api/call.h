// One call of a host's, from its entry to its return: the host's thread works for the library
// meanwhile, but for the host's callbacks.
#pragma once

#include <cstdint>
#include <exception>

#include "base/status.h"
#include "kvasir.h"
#include "os/calling_thread.h"

namespace kvasir::api {

class Call {
 public:
  Call() : outer_(current_) { current_ = this; }
  ~Call() noexcept(false) { current_ = outer_; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Runs a callback as the host's own code, with all that it has set for its thread, and returns
  // what it returns. A C++ exception ends here, as if the callback had returned non-zero; the
  // call's message then has its text. name: for it; null: none is wanted. What unwinds without
  // being one (pthread_exit, a cancelled thread) passes through: the library's destructors leave
  // whole handles.
  template <class F>
  static int32_t run_callback(const char* name, F&& callback) {
    Call& call = *current_;
    try {
      const HostsTurn turn(call.thread_);
      return callback();
    } catch (const std::exception& e) {
      call.note_exception(name, e.what());
    } catch (...) {
      if (!std::current_exception()) throw;
      call.note_exception(name, "one that is no std::exception");
    }
    return 1;
  }

  // What the call returns and says.
  kv_status finish(Status status, kv_error* error);

 private:
  struct HostsTurn {
    explicit HostsTurn(os::CallingThread& t) : thread(t) { thread.leave(); }
    ~HostsTurn() { thread.enter(); }
    os::CallingThread& thread;
  };
  void note_exception(const char* name, const char* what);

  // the innermost of this thread: a callback may call other handles
  static constinit thread_local Call* current_;
  Call* outer_;
  char exception_[192] = {};  // of a callback, "" for none
  os::CallingThread thread_;
};

}  // namespace kvasir::api
