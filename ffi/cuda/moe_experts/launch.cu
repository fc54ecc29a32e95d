// SPDX-License-Identifier: Apache-2.0

// The launches of moe_experts; plan.cuh, gemm.cuh, simt.cuh and combine.cuh say how they work.

#include <type_traits>

#include "common/integers.h"
#include "cuda/moe_experts/combine.cuh"
#include "cuda/moe_experts/launch.h"
#include "cuda/moe_experts/plan.cuh"
#include "cuda/moe_experts/select.h"
#include "cuda/moe_experts/simt.cuh"

namespace jax_paged::cuda {
namespace {

__global__ void __launch_bounds__(kMoePlanWarps* kWarpLanes)
    MoePlanKernel(__grid_constant__ const MoeArgs args) {
  MoePlanCta(args, static_cast<int32_t>(blockDim.x) / kWarpLanes).Run();
}

template <typename T, typename W, bool IS_GATED>
__global__ void __launch_bounds__(kMoeThreads, 4)
    MoeSimtKernel(__grid_constant__ const MoeArgs args) {
  MoeSimtCta<T, W, IS_GATED>(args);
}

template <typename T>
__global__ void __launch_bounds__(kMoeCombineThreads)
    MoeCombineKernel(__grid_constant__ const MoeArgs args) {
  MoeCombineThread<T>(args);
}

template <typename T, typename W, bool IS_GATED>
cudaError_t LaunchMoeSimt(cudaStream_t stream, const DeviceLimits& limits, const MoeArgs& args) {
  const int64_t warps = kMoeThreads / kWarpLanes;
  const int64_t row_pairs = IS_GATED ? args.inner : args.hidden / 2;
  const unsigned ctas = MoeCtas(limits, args, CeilDiv(row_pairs, kMoeSimtRowPairs * warps),
                                /*ctas_per_multiprocessor=*/4);
  MoeSimtKernel<T, W, IS_GATED><<<ctas, kMoeThreads, /*smem=*/0, stream>>>(args);
  return cudaGetLastError();
}

struct LaunchTurn {
  cudaStream_t stream;
  const DeviceLimits& limits;
  const MoeParams& params;
  const MoeArgs& args;

  template <typename T, typename W>
  cudaError_t operator()() const {
    if (args.num_pairs > 0) {
      MoePlanKernel<<<1, MoePlanWarps(args) * kWarpLanes, MoePlanSharedBytes(args), stream>>>(args);
      cudaError_t error = cudaGetLastError();
      if (error == cudaSuccess) error = Products<T, W>();
      if (error != cudaSuccess) return error;
    }
    const bool is_wide = params.out_dtype == Dtype::kFloat32;
    const unsigned ctas = static_cast<unsigned>(MoeCombineCtas(args));
    const auto combine = is_wide ? MoeCombineKernel<float> : MoeCombineKernel<T>;
    combine<<<ctas, kMoeCombineThreads, /*smem=*/0, stream>>>(args);
    return cudaGetLastError();
  }

  template <typename T, typename W>
  cudaError_t Products() const {
    if constexpr (!std::is_same_v<T, float>) {
      if (UsesMoeTensorCores(params)) return LaunchMoeGemms<T, W>(stream, limits, args);
    }
    if constexpr (std::is_same_v<T, float> || sizeof(W) == 1) {
      const cudaError_t error = LaunchMoeSimt<T, W, /*IS_GATED=*/true>(stream, limits, args);
      return error == cudaSuccess ? LaunchMoeSimt<T, W, /*IS_GATED=*/false>(stream, limits, args)
                                  : error;
    }
    return cudaErrorInvalidValue;  // never: 16-bit experts are for tensor cores
  }
};

}  // namespace

cudaError_t LaunchMoe(cudaStream_t stream, const DeviceLimits& limits, const MoeParams& params,
                      int32_t* workspace) {
  const int64_t turn = MoeTurnTokens(params.num_tokens, params.experts_per_token);
  for (int64_t token = 0; token < params.num_tokens; token += turn) {
    const MoeArgs args = MakeMoeArgs(params, workspace, token);
    const cudaError_t error = SelectMoe(params, LaunchTurn{stream, limits, params, args});
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_paged::cuda
