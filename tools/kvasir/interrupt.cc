#include "interrupt.h"

#include <csignal>

#include "failure.h"

namespace tool {
namespace {

kv_cancel* volatile fired_by_signal = nullptr;

extern "C" void on_interrupt(int) { kv_cancel_fire(fired_by_signal); }

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
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  // The handler is gone after its first call, so the second Ctrl-C has its ordinary effect. Without SA_RESTART a read
  // from the terminal is interrupted too.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace tool
