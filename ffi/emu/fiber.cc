// SPDX-License-Identifier: Apache-2.0

// The switch between fibers on x86-64: see fiber.h.

#include "emu/fiber.h"

#ifndef JAX_PAGED_EMU_UCONTEXT
asm(R"(
.text
.globl jax_paged_emu_switch
.type jax_paged_emu_switch,@function
jax_paged_emu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size jax_paged_emu_switch,.-jax_paged_emu_switch
)");
#endif
