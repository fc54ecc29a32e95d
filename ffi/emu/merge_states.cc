// SPDX-License-Identifier: Apache-2.0

// The emulated merge_attention_states kernel.

#include <cstdint>
#include <string>

#include "common/integers.h"
#include "common/merge_checks.h"
#include "cuda/merge_states/merge.cuh"
#include "emu/call.h"
#include "emu/machine.h"

namespace jax_paged::emu {
namespace {

std::string MergeStates(Call& in) {
  const MergeArrays x = {in.Find("out_a"), in.Find("lse_a"), in.Find("out_b"),
                         in.Find("lse_b"), in.Result("out"), in.Result("lse")};
  Dtype dtype;
  const std::string error = ReadMergeStates(x, &dtype);
  if (!error.empty()) return error;
  cuda::MergeArgs args;
  args.out_a = Global<const char>(static_cast<const char*>(x.out_a.data));
  args.lse_a = Global<const float>(static_cast<const float*>(x.lse_a.data));
  args.out_b = Global<const char>(static_cast<const char*>(x.out_b.data));
  args.lse_b = Global<const float>(static_cast<const float*>(x.lse_b.data));
  args.out = Global<char>(static_cast<char*>(x.out.data));
  args.lse = Global<float>(static_cast<float*>(x.lse.data));
  args.num_heads = x.lse.shape.count();
  args.row_chunks = static_cast<int32_t>(x.out.shape[2] * ByteWidth(dtype) / 16);
  const int64_t chunks = args.num_heads * args.row_chunks;
  const int32_t ctas = static_cast<int32_t>(CeilDiv(chunks, cuda::kMergeThreads));
  if (ctas == 0) return "";
  return Launch({ctas, cuda::kMergeThreads, /*shared_bytes=*/0, in.launch().seed}, [&] {
    switch (dtype) {
      case Dtype::kBFloat16:
        return cuda::MergeThread<BFloat16>(args);
      case Dtype::kFloat16:
        return cuda::MergeThread<Float16>(args);
      case Dtype::kFloat32:
        return cuda::MergeThread<float>(args);
      default:  // 8-bit: not a dtype of outputs
        return;
    }
  });
}

}  // namespace
}  // namespace jax_paged::emu

extern "C" const char* emulate_merge_attention_states(EmulatedCall* call) {
  return jax_paged::emu::Emulate(call, jax_paged::emu::MergeStates);
}
