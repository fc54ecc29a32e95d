// SPDX-License-Identifier: Apache-2.0

// C interface of the emulated merge_attention_states kernel, for ctypes (support/emulation.py).

#include <cstdint>
#include <string>

#include "common/integers.h"
#include "cuda/merge_states/merge.cuh"
#include "emu/machine.h"

extern "C" {

// Returns "" or what went wrong.
const char* emulate_merge_states(const char* out_a, const float* lse_a, const char* out_b,
                                 const float* lse_b, char* out, float* lse, int64_t num_heads,
                                 int64_t head_dim, int32_t dtype, uint32_t seed) {
  namespace emu = jax_paged::emu;
  namespace cuda = jax_paged::cuda;
  using jax_paged::Dtype;
  using jax_paged::Global;
  const Dtype type = static_cast<Dtype>(dtype);
  const int64_t row_bytes = head_dim * jax_paged::ByteWidth(type);
  emu::ClearRegions();
  emu::AddRegion("out_a", out_a, num_heads * row_bytes, /*is_input=*/true);
  emu::AddRegion("lse_a", lse_a, num_heads * 4, true);
  emu::AddRegion("out_b", out_b, num_heads * row_bytes, true);
  emu::AddRegion("lse_b", lse_b, num_heads * 4, true);
  emu::AddRegion("out", out, num_heads * row_bytes, /*is_input=*/false);
  emu::AddRegion("lse", lse, num_heads * 4, false);
  cuda::MergeArgs args;
  args.out_a = Global<const char>(out_a);
  args.lse_a = Global<const float>(lse_a);
  args.out_b = Global<const char>(out_b);
  args.lse_b = Global<const float>(lse_b);
  args.out = Global<char>(out);
  args.lse = Global<float>(lse);
  args.num_heads = num_heads;
  args.row_chunks = static_cast<int32_t>(row_bytes / 16);
  const int64_t chunks = num_heads * args.row_chunks;
  const int32_t ctas = static_cast<int32_t>(jax_paged::CeilDiv(chunks, cuda::kMergeThreads));
  static std::string error;
  error = emu::Launch({ctas, cuda::kMergeThreads, /*shared_bytes=*/0, seed}, [&] {
    switch (type) {
      case Dtype::kBFloat16:
        return cuda::MergeThread<jax_paged::BFloat16>(args);
      case Dtype::kFloat16:
        return cuda::MergeThread<jax_paged::Float16>(args);
      case Dtype::kFloat32:
        return cuda::MergeThread<float>(args);
      default:  // 8-bit: not a dtype of outputs
        return;
    }
  });
  return error.c_str();
}

}  // extern "C"
