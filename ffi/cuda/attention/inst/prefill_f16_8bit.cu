// SPDX-License-Identifier: Apache-2.0

#include "cuda/attention/launch_inst.cuh"

namespace jax_paged::cuda {

JAX_PAGED_INSTANTIATE_ALL(LaunchPrefill, Float16, PageKind::kEightBit)

}  // namespace jax_paged::cuda
