// A device made of the processor, in the place of kernels/cuda for tests where there is no GPU: two of them, "cuda:0" and "cuda:1". It is as lazy and as
// strict as a device may be: work is done when it is waited for and not before, its memory cannot be touched by anybody else, of the processor's it
// reads only what was shared with it, at other addresses, and any call can be made to fail.
#pragma once

#include <cstdint>

namespace kvasir::emulated {

constexpr int out_of_memory = 2, lost = 700;  // errors of the table

// Calls of the table that may fail, since the program began.
uint64_t calls();
// The call after so many more fails with the error; `lost`: and so do all after it, of that device as it was opened. 0: none does.
void fail_after(uint64_t more, int error);
// What is held of the devices and not given back: allocations, streams, graphs and shared memory.
uint64_t held();

}  // namespace kvasir::emulated
