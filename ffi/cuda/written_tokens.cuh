// SPDX-License-Identifier: Apache-2.0

// Of several tokens for one slot the last one that is written wins, whole: a CTA that copies a
// token asks first whether another one comes behind it. A token is written if it has a slot of the
// pool and, where tokens have positions, one in range.
//
// Few tokens: the threads of the CTA look through those behind, 4 slots a load. That is
// num_tokens / 512 loads per thread at most, from L1, in a launch that is needed anyhow.
//
// Many tokens: a table in device memory, hashed by slot, tells the last token of each slot. All its
// bytes are first set to 0xff, so that entries are kFreeEntry. Then a kernel of a thread per token
// claims the slots. An entry belongs to the slot of the token that first comes to it, and holds the
// largest index of all tokens of that slot, whatever their order. The word is both key and value:
// its slot is that of the token it names. There are twice as many entries as tokens, so a search
// meets a free one, whatever the slots are; most end at their first entry. The copying CTA then
// reads an entry in place of num_tokens slots.

#ifndef JAX_PAGED_CUDA_WRITTEN_TOKENS_CUH_
#define JAX_PAGED_CUDA_WRITTEN_TOKENS_CUH_

#include <cstdint>

#include "cuda/prim.h"
#include "cuda/written_tokens.h"

namespace jax_paged::cuda {

inline constexpr int32_t kFreeEntry = -1;

JAX_PAGED_DEVICE bool HasPosition(const WrittenTokens& tokens, int32_t token) {
  if (!tokens.positions) return true;
  const int32_t position = prim::LoadConst(tokens.positions + token);
  return position >= 0 && position < tokens.max_positions;
}

// Where the search for a slot begins, and how it goes on. Slots that are neighbours lie far apart
// (Fibonacci hashing: the factor is 2^32 over the golden ratio).
JAX_PAGED_DEVICE uint32_t FirstEntry(const WrittenTokens& tokens, int32_t slot) {
  return static_cast<uint32_t>(slot) * 2654435769u >> tokens.hash_shift;
}
JAX_PAGED_DEVICE uint32_t NextEntry(const WrittenTokens& tokens, uint32_t entry) {
  return (entry + 1) & static_cast<uint32_t>(tokens.table_words - 1);
}

// The kernel that fills the table.
JAX_PAGED_DEVICE void ClaimSlot(const WrittenTokens& tokens) {
  const int32_t token = prim::BlockIndex() * kClaimThreads + prim::ThreadIndex();
  if (token >= tokens.num_tokens) return;
  const int32_t slot = prim::LoadConst(tokens.slot_mapping + token);
  if (slot < 0 || slot >= tokens.num_slots || !HasPosition(tokens, token)) return;
  uint32_t entry = FirstEntry(tokens, slot);
  while (true) {
    const int32_t holder = prim::AtomicCompareExchange(tokens.table + entry, kFreeEntry, token);
    if (holder == kFreeEntry) return;
    if (prim::LoadConst(tokens.slot_mapping + holder) == slot) {
      if (holder < token) prim::AtomicMax(tokens.table + entry, token);
      return;
    }
    entry = NextEntry(tokens, entry);
  }
}

// Whether the table has a later token for this token's slot; it must have claimed it.
JAX_PAGED_DEVICE bool IsInTableLater(const WrittenTokens& tokens, int32_t token, int32_t slot) {
  uint32_t entry = FirstEntry(tokens, slot);
  while (true) {
    const int32_t holder = prim::LoadConst<int32_t>(tokens.table + entry);
    if (holder == token) return false;
    if (prim::LoadConst(tokens.slot_mapping + holder) == slot) return true;
    entry = NextEntry(tokens, entry);
  }
}

// Whether a later token that is written has the slot of this one, which is written itself. All
// THREADS of the CTA take part; it has a word of shared memory for each warp.
template <int32_t THREADS>
JAX_PAGED_DEVICE bool IsOverwritten(const WrittenTokens& tokens, int32_t token, int32_t slot) {
  if (tokens.table) return IsInTableLater(tokens, token, slot);
  bool found = false;
  const auto look = [&](int32_t begin, int32_t end) {
    JAX_PAGED_NO_UNROLL
    for (int32_t later = begin > token ? begin : token + 1; later < end; ++later) {
      if (prim::LoadConst(tokens.slot_mapping + later) != slot) continue;
      found |= HasPosition(tokens, later);
    }
  };
  const int32_t fours = tokens.num_tokens / 4;
  for (int32_t i = (token + 1) / 4 + prim::ThreadIndex(); i < fours; i += THREADS) {
    const Word4 slots = prim::LoadConst((tokens.slot_mapping + int64_t{4} * i).As<const Word4>());
    const uint32_t wanted = static_cast<uint32_t>(slot);
    const bool is_among =
        slots.x == wanted || slots.y == wanted || slots.z == wanted || slots.w == wanted;
    if (is_among) look(4 * i, 4 * i + 4);  // rarely
  }
  if (prim::ThreadIndex() == 0) look(4 * fours, tokens.num_tokens);
  const Shared<uint32_t> votes = prim::SharedMemory().As<uint32_t>();
  const uint32_t vote = prim::Ballot(found);
  if (prim::LaneIndex() == 0) prim::Store(votes + prim::WarpIndex(), vote);
  prim::SyncThreads();
  uint32_t any = 0;
  JAX_PAGED_UNROLL
  for (int32_t warp = 0; warp < THREADS / kWarpLanes; ++warp) any |= prim::Load(votes + warp);
  return any != 0;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_WRITTEN_TOKENS_CUH_
