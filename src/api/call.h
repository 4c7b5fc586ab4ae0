// One call of the host, from its entry to its return. The host's thread has the library's
// environment (floating point, cancellation) meanwhile, except in callbacks.
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

  // Runs a callback in the host's environment and returns its result. A C++ exception counts as a
  // non-zero result, and the call's message gets its text, under `name` (null: no message).
  // Unwinding that is no exception (pthread_exit, a cancelled thread) passes through: destructors
  // leave valid handles.
  template <class F>
  static int32_t run_callback(const char* name, F&& callback) {
    Call& call = *current_;
    try {
      const HostScope scope(call.thread_);
      return callback();
    } catch (const std::exception& e) {
      call.note_exception(name, e.what());
    } catch (...) {
      if (!std::current_exception()) throw;
      call.note_exception(name, "one that is no std::exception");
    }
    return 1;
  }

  // Turns the status into the code and the message of the call.
  kv_status finish(Status status, kv_error* error);

 private:
  struct HostScope {
    explicit HostScope(os::CallingThread& t) : thread(t) { thread.leave(); }
    ~HostScope() { thread.enter(); }
    os::CallingThread& thread;
  };
  void note_exception(const char* name, const char* what);

  // the innermost call of this thread: a callback may call other handles
  static constinit thread_local Call* current_;
  Call* outer_;
  char exception_[192] = {};  // text of a callback's exception; "": none
  os::CallingThread thread_;
};

}  // namespace kvasir::api
