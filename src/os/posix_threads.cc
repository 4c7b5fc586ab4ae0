// Threads, their signals and their cancellation.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>

#include "os/calling_thread.h"
#include "os/signals.h"
#include "os/thread.h"

namespace kvasir::os {

static_assert(sizeof(sigset_t) <= sizeof(SignalsHeld) && alignof(sigset_t) <= alignof(SignalsHeld));
static_assert(sizeof(pthread_t) == sizeof(uintptr_t));

SignalsHeld::SignalsHeld() {
  sigset_t held, before;
  sigfillset(&held);
  for (int let_through : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF})
    sigdelset(&held, let_through);
  pthread_sigmask(SIG_SETMASK, &held, &before);
  std::memcpy(before_, &before, sizeof before);
}

SignalsHeld::~SignalsHeld() {
  sigset_t before;
  std::memcpy(&before, before_, sizeof before);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

namespace {

struct Start {
  void (*run)(void* context);
  void* context;
};

void* start_routine(void* argument) {
  const std::unique_ptr<Start> start(static_cast<Start*>(argument));
  start->run(start->context);
  return nullptr;
}

}  // namespace

Status Thread::start(void (*run)(void* context), void* context, Thread* out) {
  auto start = std::make_unique<Start>(Start{run, context});
  pthread_attr_t attributes;
  int error = pthread_attr_init(&attributes);
  pthread_t thread;
  if (error == 0) {
    error = pthread_attr_setstacksize(
        &attributes,
        std::max<std::size_t>(stack_bytes, static_cast<std::size_t>(PTHREAD_STACK_MIN)));
    if (error == 0) error = pthread_create(&thread, &attributes, start_routine, start.get());
    pthread_attr_destroy(&attributes);
  }
  if (error != 0)
    return Status::error(error == ENOMEM ? Code::no_memory : Code::limit, "cannot start a thread")
        .with_errno(error);
  (void)start.release();
  std::memcpy(&out->handle_, &thread, sizeof thread);
  return {};
}

Thread::~Thread() {
  if (!handle_) return;
  pthread_t thread;
  std::memcpy(&thread, &handle_, sizeof thread);
  pthread_join(thread, nullptr);
}

void CallingThread::enter() {
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &host_cancellation_);
  host_floats_ = save_float_environment();
  use_own_float_environment();
}

void CallingThread::leave() {
  restore_float_environment(host_floats_);
  int ours;
  pthread_setcancelstate(host_cancellation_, &ours);
}

void lower_this_thread() {
#ifdef __APPLE__
  pthread_set_qos_class_self_np(QOS_CLASS_UTILITY, 0);
#else
  // Affects the thread alone on Linux. SCHED_IDLE could delay a thread that joins it.
  (void)setpriority(PRIO_PROCESS, 0, 19);
#ifdef SYS_ioprio_set
  constexpr int of_thread = 1, best_effort = 2, lowest = 7;
  (void)syscall(SYS_ioprio_set, of_thread, 0, best_effort << 13 | lowest);
#endif
#endif
}

uint64_t process_id() { return static_cast<uint64_t>(getpid()); }

}  // namespace kvasir::os
