// What is asked of threads and of the process: their signals, their priority.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>

#include "os/os.h"
#include "os/signals.h"

namespace kvasir::os {

static_assert(sizeof(sigset_t) <= sizeof(SignalsHeld) && alignof(sigset_t) <= alignof(SignalsHeld));

SignalsHeld::SignalsHeld() {
  sigset_t held, before;
  sigfillset(&held);
  for (int let_through : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) sigdelset(&held, let_through);
  pthread_sigmask(SIG_SETMASK, &held, &before);
  std::memcpy(before_, &before, sizeof before);
}

SignalsHeld::~SignalsHeld() {
  sigset_t before;
  std::memcpy(&before, before_, sizeof before);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void lower_this_thread() {
#ifdef __APPLE__
  pthread_set_qos_class_self_np(QOS_CLASS_UTILITY, 0);
#else
  (void)setpriority(
      PRIO_PROCESS, 0,
      19);  // of the thread alone, as Linux has it. SCHED_IDLE could keep whoever joins it waiting
#ifdef SYS_ioprio_set
  constexpr int of_thread = 1, best_effort = 2, lowest = 7;
  (void)syscall(SYS_ioprio_set, of_thread, 0, best_effort << 13 | lowest);
#endif
#endif
}

uint64_t process_id() { return static_cast<uint64_t>(getpid()); }

}  // namespace kvasir::os
