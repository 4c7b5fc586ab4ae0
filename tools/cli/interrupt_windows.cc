#include "interrupt.h"

#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>

#include <atomic>

#include "failure.h"

namespace tool {
namespace {

// The system calls the handler in a thread of its own.
std::atomic<kv_cancel*> fired_by_key{nullptr};
std::atomic<bool> interrupted{false};

BOOL WINAPI on_key(DWORD kind) {
  // The second one ends the process.
  if ((kind != CTRL_C_EVENT && kind != CTRL_BREAK_EVENT) || interrupted.exchange(true))
    return FALSE;
  kv_cancel_fire(fired_by_key);
  return TRUE;
}

}  // namespace

Interrupt::Interrupt() {
  kv_error error{};
  kv_cancel* cancel = nullptr;
  check(kv_cancel_create(&cancel, &error), error);
  cancel_.reset(cancel);
  fired_by_key = cancel;
  SetConsoleCtrlHandler(on_key, TRUE);
  arm();
}

Interrupt::~Interrupt() {
  SetConsoleCtrlHandler(on_key, FALSE);
  fired_by_key = nullptr;
}

void Interrupt::arm() {
  kv_cancel_reset(cancel_.get());
  interrupted = false;
}

bool Interrupt::fired() const { return interrupted; }

// Does not wait: a read from the console ends at a Ctrl-C.
bool Interrupt::wait_for_input() { return !fired(); }

}  // namespace tool
