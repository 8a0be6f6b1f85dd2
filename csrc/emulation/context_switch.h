// Fibers: a hand-written switch of the callee-saved registers.
#pragma once
#include <cstddef>

namespace pyengine::emulation {

// Saves the running fiber's stack pointer to *save and continues at `load`.
extern "C" void pyengine_emulation_switch(void** save, void* load);

// A stack pointer for pyengine_emulation_switch that starts `entry` on a fresh stack. `entry` never returns.
void* make_stack(char* base, size_t bytes, void (*entry)());

}  // namespace pyengine::emulation
