// SPDX-License-Identifier: Apache-2.0

// The emulated write_kv kernels.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/write_checks.h"
#include "cuda/write_kv/kernel.cuh"
#include "cuda/write_kv/select.h"
#include "emu/call.h"
#include "emu/claim_slots.h"
#include "emu/machine.h"

namespace jax_paged::emu {
namespace {

struct RunWriteKv {
  const cuda::WriteKvArgs& args;
  uint32_t seed;

  template <typename KWord, typename VWord>
  std::string operator()() const {
    return Launch({NumCtas(args), cuda::kWriteKvThreads, cuda::kWriteKvSharedBytes, seed},
                  [&] { cuda::WriteKvCta<KWord, VWord>(args); });
  }
};

// The pages of the results hold those of the operands already.
std::string WriteKv(Call& in) {
  WriteKvParams params = {};
  const Array workspace = in.Result("workspace");
  std::string error = ReadWriteKv(
      {in.Find("k_pages"), in.Find("v_pages"), in.Find("k"), in.Find("v"), in.Find("slot_mapping"),
       in.Find("layer"), in.Result("k_pages"), in.Result("v_pages")},
      in.Attribute("layout", std::string_view()), &params);
  if (error.empty()) {
    error = cuda::CheckWrittenTokens(kWriteKvOp, params.num_tokens, /*ctas_per_token=*/2,
                                     workspace.shape.count());
  }
  if (!error.empty() || params.num_tokens == 0 || params.k_pool.num_slots() == 0) return error;
  const cuda::WriteKvArgs args =
      cuda::MakeWriteKvArgs(params, static_cast<int32_t*>(workspace.data));
  const uint32_t seed = in.launch().seed;
  error = ClaimSlots(args.tokens, seed);
  return error.empty() ? SelectWriteKv(args, RunWriteKv{args, seed}) : error;
}

}  // namespace
}  // namespace jax_paged::emu

extern "C" {

const char* emulate_write_kv(EmulatedCall* call) {
  return jax_paged::emu::Emulate(call, jax_paged::emu::WriteKv);
}

int64_t write_kv_workspace_words(int64_t num_tokens) {
  return jax_paged::cuda::SlotTableWords(num_tokens);
}

}  // extern "C"
