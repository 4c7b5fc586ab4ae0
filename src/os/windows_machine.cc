// The machine and the process.
#include "os/windows_calls.h"  // before the system's other headers, which need its types

#include <bcrypt.h>

#include <process.h>

#include <bit>
#include <cerrno>
#include <memory>

#include "os/calling_thread.h"
#include "os/signals.h"
#include "os/thread.h"

namespace kvasir::os {

bool random_bits(uint64_t* out) {
  return BCryptGenRandom(nullptr, reinterpret_cast<UCHAR*>(out), sizeof *out,
                         BCRYPT_USE_SYSTEM_PREFERRED_RNG) >= 0;
}

// Large pages need an account that may lock memory.
void prefer_huge_pages(void*, std::size_t) {}

void prefer_small_pages(void*, std::size_t) {}

uint32_t cpu_count() {
  DWORD_PTR own = 0, all = 0;
  // The masks are 0 for a process in several groups of 64 CPUs.
  if (GetProcessAffinityMask(GetCurrentProcess(), &own, &all) && own != 0)
    return static_cast<uint32_t>(std::popcount(own));
  const DWORD count = GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
  return count > 0 ? count : 1;
}

uint64_t physical_memory() {
  MEMORYSTATUSEX memory;
  memory.dwLength = sizeof memory;
  return GlobalMemoryStatusEx(&memory) ? memory.ullTotalPhys : UINT64_MAX;
}

uint64_t available_memory() {
  MEMORYSTATUSEX memory;
  memory.dwLength = sizeof memory;
  return GlobalMemoryStatusEx(&memory) ? memory.ullAvailPhys : UINT64_MAX;
}

uint64_t hash_seed() {
  static const uint64_t seed = [] {
    uint64_t random;
    return random_bits(&random) ? random : now_ns() * 0x9E3779B97F4A7C15u;
  }();
  return seed;
}

uint64_t now_ns() {
  LARGE_INTEGER frequency, ticks;
  QueryPerformanceFrequency(&frequency);
  QueryPerformanceCounter(&ticks);
  const uint64_t rate = static_cast<uint64_t>(frequency.QuadPart),
                 count = static_cast<uint64_t>(ticks.QuadPart);
  return count / rate * 1'000'000'000u + count % rate * 1'000'000'000u / rate;
}

void lower_this_thread() { (void)SetThreadPriority(GetCurrentThread(), THREAD_PRIORITY_LOWEST); }

uint64_t process_id() { return GetCurrentProcessId(); }

void name_this_thread(const char* name) {
  wchar_t text[32] = {};
  MultiByteToWideChar(CP_UTF8, 0, name, -1, text, 31);
  using Describe = HRESULT(WINAPI*)(HANDLE, PCWSTR);  // in KERNEL32 from Windows 10 1703 on
  const HMODULE kernel = GetModuleHandleW(L"kernelbase.dll");
  const auto describe = kernel ? reinterpret_cast<Describe>(reinterpret_cast<void*>(
                                     GetProcAddress(kernel, "SetThreadDescription")))
                               : nullptr;
  if (describe) (void)describe(GetCurrentThread(), text);
}

// Windows has no signals that go to a thread of choice: it starts one of its own for Ctrl-C.
SignalsHeld::SignalsHeld() { (void)before_; }
SignalsHeld::~SignalsHeld() = default;

namespace {

struct Start {
  void (*run)(void* context);
  void* context;
};

unsigned __stdcall start_routine(void* argument) {
  const std::unique_ptr<Start> start(static_cast<Start*>(argument));
  start->run(start->context);
  return 0;
}

}  // namespace

Status Thread::start(void (*run)(void* context), void* context, Thread* out) {
  auto start = std::make_unique<Start>(Start{run, context});
  const uintptr_t thread =
      _beginthreadex(nullptr, static_cast<unsigned>(stack_bytes), start_routine, start.get(),
                     STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr);
  if (thread == 0) {
    const int error = errno;
    return Status::error(error == ENOMEM ? Code::no_memory : Code::limit, "cannot start a thread")
        .with_errno(error);
  }
  (void)start.release();
  out->handle_ = thread;
  return {};
}

Thread::~Thread() {
  if (!handle_) return;
  const HANDLE thread = reinterpret_cast<HANDLE>(handle_);
  WaitForSingleObject(thread, INFINITE);
  CloseHandle(thread);
}

void CallingThread::enter() {
  host_floats_ = save_float_environment();
  use_own_float_environment();
}

void CallingThread::leave() {
  (void)host_cancellation_;
  restore_float_environment(host_floats_);
}

}  // namespace kvasir::os
