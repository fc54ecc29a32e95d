// SPDX-License-Identifier: Apache-2.0

// A stack that can be left and entered again: one per emulated thread.
//
// On x86-64 a switch saves six registers (about 10 ns); elsewhere, or with JAX_PAGED_EMU_UCONTEXT,
// ucontext does it (about 30 times slower: it also saves the signal mask, by a system call).

#ifndef JAX_PAGED_EMU_FIBER_H_
#define JAX_PAGED_EMU_FIBER_H_

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(JAX_PAGED_EMU_UCONTEXT)
#define JAX_PAGED_EMU_UCONTEXT
#endif
#ifdef JAX_PAGED_EMU_UCONTEXT
#include <ucontext.h>
#endif

namespace jax_paged::emu {

#ifdef JAX_PAGED_EMU_UCONTEXT

struct Fiber {
  ucontext_t context;
};

inline void StartFiber(Fiber* fiber, char* stack, size_t stack_bytes, void (*entry)()) {
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = stack;
  fiber->context.uc_stack.ss_size = stack_bytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, entry, 0);
}

inline void SwitchFiber(Fiber* from, Fiber* to) { swapcontext(&from->context, &to->context); }

#else

struct Fiber {
  void* stack_pointer = nullptr;
};

extern "C" void jax_paged_emu_switch(void** save, void* load);

inline void StartFiber(Fiber* fiber, char* stack, size_t stack_bytes, void (*entry)()) {
  void** top =
      reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + stack_bytes) & ~15ull);
  *--top = nullptr;  // the return address of `entry`, which never returns
  *--top = reinterpret_cast<void*>(entry);
  top -= 6;  // the registers that the first switch pops; their values do not matter
  fiber->stack_pointer = top;
}

inline void SwitchFiber(Fiber* from, Fiber* to) {
  jax_paged_emu_switch(&from->stack_pointer, to->stack_pointer);
}

#endif

}  // namespace jax_paged::emu

#endif  // JAX_PAGED_EMU_FIBER_H_
