#include <pthread.h>
#include <signal.h>

#include <cstring>
#include <initializer_list>

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

}  // namespace kvasir::os
