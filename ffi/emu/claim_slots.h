// SPDX-License-Identifier: Apache-2.0

// The emulated twin of cuda/claim_slots.cu.

#ifndef JAX_PAGED_EMU_CLAIM_SLOTS_H_
#define JAX_PAGED_EMU_CLAIM_SLOTS_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "cuda/written_tokens.cuh"
#include "emu/machine.h"

namespace jax_paged::emu {

inline std::string ClaimSlots(const cuda::WrittenTokens& tokens, uint32_t seed) {
  if (!tokens.table) return "";
  const int64_t bytes = tokens.table_words * int64_t{sizeof(int32_t)};
  std::memset(reinterpret_cast<void*>(tokens.table.address()), 0xff, static_cast<size_t>(bytes));
  MarkWritten(tokens.table.region(), /*offset=*/0, bytes);
  return Launch({cuda::NumClaimCtas(tokens), cuda::kClaimThreads, /*shared_bytes=*/0, seed},
                [&] { cuda::ClaimSlot(tokens); });
}

}  // namespace jax_paged::emu

#endif  // JAX_PAGED_EMU_CLAIM_SLOTS_H_
