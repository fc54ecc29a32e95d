// SPDX-License-Identifier: Apache-2.0

// The tokens of a write, and which of them share a slot: what write_kv and qkv_norm_rope_write have
// in common. Knows nothing of XLA; plain C++17, so that handlers, kernels and emulator share it.
// written_tokens.cuh says how it works.

#ifndef JAX_PAGED_CUDA_WRITTEN_TOKENS_H_
#define JAX_PAGED_CUDA_WRITTEN_TOKENS_H_

#include <cstdint>
#include <string>

#include "common/checks.h"
#include "common/integers.h"
#include "cuda/pointers.h"

namespace jax_paged::cuda {

// Up to so many tokens a CTA looks through those behind its own. docs/kernels.md has the reckoning.
inline constexpr int32_t kScannedTokens = 2048;

inline constexpr int32_t kClaimThreads = 128;

struct WrittenTokens {
  Global<const int32_t> slot_mapping;  // [num_tokens]
  Global<const int32_t> positions;     // [num_tokens]; null: all tokens have one
  Global<int32_t> table;               // [table_words]; null: the tokens are few
  int64_t table_words;
  int64_t num_slots;  // of the pools
  int32_t num_tokens;
  int32_t max_positions;  // a token at a position outside [0, max_positions) is not written
  int32_t hash_shift;     // 32 - log2(table_words)
};

// The entries of the table, and so the workspace of a write in words of 4 bytes: a power of two, at
// least 2 num_tokens and 2. jax_paged/ops/write.py computes the same.
inline int64_t SlotTableWords(int64_t num_tokens) {
  int64_t words = 2;
  while (words < 2 * num_tokens) words *= 2;
  return words;
}

// Returns "" or one line: argument, expected, got.
inline std::string CheckWrittenTokens(const char* op, int64_t num_tokens, int64_t ctas_per_token,
                                      int64_t workspace_words) {
  if (num_tokens * ctas_per_token > INT32_MAX || num_tokens > INT32_MAX / 2) {
    return Mismatch(op, "slot_mapping", "fewer tokens than CUDA's limit of blocks allows",
                    std::to_string(num_tokens));
  }
  const int64_t words = SlotTableWords(num_tokens);
  if (workspace_words >= words) return "";
  return Mismatch(op, "workspace", std::to_string(words) + " words",
                  std::to_string(workspace_words));
}

// positions: may be null. workspace: SlotTableWords(num_tokens) words.
inline WrittenTokens MakeWrittenTokens(const int32_t* slot_mapping, const int32_t* positions,
                                       int64_t num_tokens, int64_t max_positions, int64_t num_slots,
                                       int32_t* workspace) {
  WrittenTokens tokens = {};
  tokens.slot_mapping = Global<const int32_t>(slot_mapping);
  if (positions != nullptr) tokens.positions = Global<const int32_t>(positions);
  if (num_tokens > kScannedTokens) tokens.table = Global<int32_t>(workspace);
  tokens.num_slots = num_slots;
  tokens.num_tokens = static_cast<int32_t>(num_tokens);
  tokens.max_positions = static_cast<int32_t>(max_positions);
  tokens.table_words = SlotTableWords(num_tokens);
  tokens.hash_shift = 32;
  for (int64_t words = tokens.table_words; words > 1; words /= 2) --tokens.hash_shift;
  return tokens;
}

// Of the kernel that fills the table.
inline int32_t NumClaimCtas(const WrittenTokens& tokens) {
  return static_cast<int32_t>(CeilDiv(tokens.num_tokens, kClaimThreads));
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_WRITTEN_TOKENS_H_
