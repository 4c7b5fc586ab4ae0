#include "api/call.h"

#include <cstdio>

namespace kvasir::api {

constinit thread_local Call* Call::current_ = nullptr;

// Keeps the first exception: the reason of the stop.
void Call::note_exception(const char* name, const char* what) {
  if (exception_[0] || !name) return;
  std::snprintf(exception_, sizeof exception_, "%s threw an exception: %s", name, what);
}

kv_status Call::finish(Status status, kv_error* error) {
  if (status.code() == Code::cancelled && exception_[0])
    status = Status::error(Code::cancelled, "%s", exception_);
  if (error && !status.ok()) {
    error->status = static_cast<kv_status>(status.code());
    error->sys_errno = status.sys_errno();
    error->offset = status.offset();
    std::snprintf(error->message, sizeof error->message, "%s", status.message());
  }
  return static_cast<kv_status>(status.code());
}

}  // namespace kvasir::api
