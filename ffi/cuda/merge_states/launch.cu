// SPDX-License-Identifier: Apache-2.0

#include "common/integers.h"
#include "cuda/merge_states/launch.h"
#include "cuda/merge_states/merge.cuh"

namespace jax_paged::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    MergeStatesKernel(__grid_constant__ const MergeArgs args) {
  MergeThread<T>(args);
}

}  // namespace

cudaError_t LaunchMergeStates(cudaStream_t stream, Dtype dtype, const MergeCall& call) {
  MergeArgs args;
  args.out_a = Global<const char>(static_cast<const char*>(call.out_a));
  args.lse_a = Global<const float>(call.lse_a);
  args.out_b = Global<const char>(static_cast<const char*>(call.out_b));
  args.lse_b = Global<const float>(call.lse_b);
  args.out = Global<char>(static_cast<char*>(call.out));
  args.lse = Global<float>(call.lse);
  args.num_heads = call.num_heads;
  args.row_chunks = static_cast<int32_t>(call.head_dim * ByteWidth(dtype) / 16);
  const int64_t ctas = CeilDiv(call.num_heads * args.row_chunks, kMergeThreads);
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  const unsigned grid = static_cast<unsigned>(ctas);
  switch (dtype) {
    case Dtype::kBFloat16:
      MergeStatesKernel<BFloat16><<<grid, kMergeThreads, /*smem=*/0, stream>>>(args);
      break;
    case Dtype::kFloat16:
      MergeStatesKernel<Float16><<<grid, kMergeThreads, /*smem=*/0, stream>>>(args);
      break;
    case Dtype::kFloat32:
      MergeStatesKernel<float><<<grid, kMergeThreads, /*smem=*/0, stream>>>(args);
      break;
    default:  // 8-bit: not a dtype of outputs
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace jax_paged::cuda
