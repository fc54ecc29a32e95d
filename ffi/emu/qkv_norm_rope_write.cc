// SPDX-License-Identifier: Apache-2.0

// The emulated qkv_norm_rope_write kernels.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/qkv_checks.h"
#include "cuda/qkv_norm_rope_write/kernel.cuh"
#include "cuda/qkv_norm_rope_write/select.h"
#include "emu/call.h"
#include "emu/claim_slots.h"
#include "emu/machine.h"

namespace jax_paged::emu {
namespace {

struct RunQkv {
  const cuda::QkvArgs& args;
  uint32_t seed;

  template <typename T, int VEC>
  std::string operator()() const {
    return Launch({cuda::NumCtas(args), cuda::kQkvThreads, cuda::kQkvSharedBytes, seed},
                  [&] { cuda::QkvCta<T, VEC>(args); });
  }
};

// The pages of the results hold those of the operands already.
std::string QkvNormRopeWrite(Call& in) {
  QkvParams params = {};
  const Array workspace = in.Result("workspace");
  std::string error = ReadQkv(
      {in.Find("qkv"), in.Find("k_pages"), in.Find("v_pages"), in.Find("k_scale"),
       in.Find("v_scale"), in.Find("positions"), in.Find("slot_mapping"), in.Find("cos"),
       in.Find("sin"), in.Find("q_norm"), in.Find("k_norm"), in.Find("layer"), in.Result("q"),
       in.Result("k_pages"), in.Result("v_pages"), in.Result("k_scale"), in.Result("v_scale")},
      in.Attribute("eps", 0.0f), in.Attribute("style", std::string_view()),
      in.Attribute("layout", std::string_view()), &params);
  if (!error.empty()) return error;
  const cuda::QkvArgs args = cuda::MakeQkvArgs(params, static_cast<int32_t*>(workspace.data));
  error = cuda::CheckWrittenTokens(kQkvOp, params.num_tokens, args.ctas_per_token,
                                   workspace.shape.count());
  if (!error.empty() || params.num_tokens == 0) return error;
  const uint32_t seed = in.launch().seed;
  error = ClaimSlots(args.tokens, seed);
  return error.empty() ? SelectQkv(params.dtype, args, RunQkv{args, seed}) : error;
}

}  // namespace
}  // namespace jax_paged::emu

extern "C" const char* emulate_qkv_norm_rope_write(EmulatedCall* call) {
  return jax_paged::emu::Emulate(call, jax_paged::emu::QkvNormRopeWrite);
}
