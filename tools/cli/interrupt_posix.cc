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
  // The handler is gone after its first call, so the second Ctrl-C has its ordinary effect.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

bool Interrupt::fired() const { return interrupted != 0; }

bool Interrupt::wait_for_input() {
  // The signal is held back between the look and the wait, and let in by the wait itself: otherwise
  // it could come just before, and the wait would not know.
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
    if (ready < 0 && errno != EINTR) break;  // reading tells what is wrong
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return !interrupted;
}

}  // namespace tool
