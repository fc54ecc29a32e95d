// SPDX-License-Identifier: Apache-2.0

// Launch interface of the CUDA attention kernels. Knows nothing of XLA.

#ifndef JAX_PAGED_CUDA_ATTENTION_LAUNCH_H_
#define JAX_PAGED_CUDA_ATTENTION_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "common/dtypes.h"
#include "cuda/attention/args.h"
#include "cuda/attention/latent_traits.h"
#include "cuda/attention/select.h"
#include "cuda/device_limits.h"

namespace jax_paged::cuda {

// Fills num_workers, stages and prefill_rows: for calls and for their plans, which go by them.
void ShapeLaunches(Dtype dtype, const DeviceLimits& limits, AttentionArgs* args);

// Launches the planner, or for a call with a plan what comes before its kernels (begin.cuh); then
// the decode kernel and, where the shapes leave room for rows that it takes, the prefill kernel.
cudaError_t LaunchAttention(cudaStream_t stream, Dtype dtype, const DeviceLimits& limits,
                            const AttentionArgs& args);

// The parts, one kernel each. Those of kernels with many instances are instantiated in inst/.
cudaError_t LaunchPlan(cudaStream_t stream, const DeviceLimits& limits, const AttentionArgs& args);
cudaError_t LaunchBegin(cudaStream_t stream, const DeviceLimits& limits, const AttentionArgs& args);
template <typename T, int HEAD_DIM, PageKind PAGES = PageKind::kRows>
cudaError_t LaunchDecode(cudaStream_t stream, const DeviceLimits& limits,
                         const AttentionArgs& args);
template <typename T, int HEAD_DIM, PageKind PAGES = PageKind::kRows>
cudaError_t LaunchPrefill(cudaStream_t stream, const DeviceLimits& limits,
                          const AttentionArgs& args);
// For latent rows: both kernels, the second where rows may have prefill units.
template <typename T>
cudaError_t LaunchLatent(cudaStream_t stream, const DeviceLimits& limits,
                         const AttentionArgs& args);
template <typename T>
cudaError_t LaunchSimt(cudaStream_t stream, const DeviceLimits& limits, const AttentionArgs& args);

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_LAUNCH_H_
