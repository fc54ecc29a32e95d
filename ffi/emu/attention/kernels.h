// SPDX-License-Identifier: Apache-2.0

// The attention kernels as the emulator runs them; one source per element type, so that they
// compile in parallel.

#ifndef JAX_PAGED_EMU_ATTENTION_KERNELS_H_
#define JAX_PAGED_EMU_ATTENTION_KERNELS_H_

#include "cuda/attention/args.h"
#include "cuda/attention/latent_traits.h"
#include "cuda/attention/select.h"
#include "cuda/device_limits.h"

namespace jax_paged::emu {

// What runs as one CTA, and how much shared memory it asks for.
struct AttentionKernel {
  void (*run)(const cuda::AttentionArgs& args);  // null: no such kernel
  int32_t shared_bytes;
};

// What serves a call after the planner, as on a device with `limits`.
struct AttentionKernels {
  cuda::KernelChoice choice;
  cuda::LatentChoice latent;  // where it has rows, the other choice has none
  AttentionKernel decode;
  AttentionKernel prefill;  // runs if choice.prefill_rows or latent.prefill.rows > 0
};

AttentionKernels BFloat16Kernels(const cuda::AttentionArgs& args, const cuda::DeviceLimits& limits);
AttentionKernels Float16Kernels(const cuda::AttentionArgs& args, const cuda::DeviceLimits& limits);
AttentionKernels Float32Kernels(const cuda::AttentionArgs& args);

}  // namespace jax_paged::emu

#endif  // JAX_PAGED_EMU_ATTENTION_KERNELS_H_
