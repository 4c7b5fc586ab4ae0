#include "interrupt.h"

#include <sys/select.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "failure.h"

namespace tool {
namespace {

kv_cancel* volatile fired_by_signal = nullptr;
volatile std::sig_atomic_t interrupted = 0;

extern "C" void on_interrupt(int) {
  interrupted = 1;
  kv_cancel_fire(fired_by_signal);
}

}  // namespace

Interrupt::Interrupt() {
  kv_error error{};
  kv_cancel* cancel = nullptr;
  check(kv_cancel_create(&cancel, &error), error);
  cancel_.reset(cancel);
  fired_by_signal = cancel;
  arm();
}

Interrupt::~Interrupt() {
  std::signal(SIGINT, SIG_DFL);
  fired_by_signal = nullptr;
}

void Interrupt::arm() {
  kv_cancel_reset(cancel_.get());
  interrupted = 0;
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  // Removes the handler at its first call: the second Ctrl-C ends the process.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

bool Interrupt::fired() const { return interrupted != 0; }

bool Interrupt::wait_for_input() {
  // Blocks the signal until the wait, which unblocks it. Otherwise one that arrives just before the
  // wait would be missed.
  sigset_t held, before;
  sigemptyset(&held);
  sigaddset(&held, SIGINT);
  sigprocmask(SIG_BLOCK, &held, &before);
  int ready = 0;
  while (ready <= 0 && !interrupted) {
    fd_set descriptors;
    FD_ZERO(&descriptors);
    FD_SET(STDIN_FILENO, &descriptors);
    ready = pselect(STDIN_FILENO + 1, &descriptors, nullptr, nullptr, nullptr, &before);
    if (ready < 0 && errno != EINTR) break;  // the read will fail too
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return !interrupted;
}

}  // namespace tool
