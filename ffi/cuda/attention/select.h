// SPDX-License-Identifier: Apache-2.0

// Which kernel serves a call, and with what launch shape. Plain C++, shared with the emulator.

#ifndef JAX_PAGED_CUDA_ATTENTION_SELECT_H_
#define JAX_PAGED_CUDA_ATTENTION_SELECT_H_

#include <cstdint>
#include <type_traits>

#include "cuda/attention/args.h"
#include "cuda/device_limits.h"

namespace jax_paged::cuda {

// Whether the tensor-core kernels take these pages: of vllm5d those of 16 bits, and they load 8
// tokens of V at once. Rows are copied by 16 bytes.
inline bool HasTensorCorePages(const AttentionArgs& args) {
  if (IsEightBit(args.kv_dtype)) {
    return args.layout != Layout::kVllm5d && args.head_dim % 16 == 0 && args.v_head_dim % 16 == 0;
  }
  return args.layout != Layout::kVllm5d || args.page_size % 8 == 0;
}

// Whether the tensor-core kernels turn queries and keys as the call says: two pairs at a time.
// 8-bit keys are turned in f32.
inline bool HasTensorCoreRope(const AttentionArgs& args) {
  return !args.cos || (!IsEightBit(args.kv_dtype) && args.rope_half % 2 == 0);
}

// Whether rows of a call may have a tree or pinned tokens.
inline bool HasTreesOrPins(const AttentionArgs& args) {
  return args.max_tree > 0 || args.num_pinned;
}

// Calls f(std::integral_constant<PageKind, PAGES>) for what the pages are; where
// HasTensorCorePages.
template <typename F>
void WithPageKind(const AttentionArgs& args, F&& f) {
  if (IsEightBit(args.kv_dtype)) {
    f(std::integral_constant<PageKind, PageKind::kEightBit>());
  } else if (args.layout == Layout::kVllm5d) {
    f(std::integral_constant<PageKind, PageKind::kVllm5d>());
  } else {
    f(std::integral_constant<PageKind, PageKind::kRows>());
  }
}

// Calls f(std::integral_constant<int, HEAD_DIM>) for the tensor-core kernels that serve these dims:
// those of the next HEAD_DIM, where what a row has less is zero. false when there is none, then
// simt.cuh serves them.
template <typename F>
bool WithDecodeHeadDim(int32_t head_dim, int32_t v_head_dim, F&& f) {
  const int32_t widest = head_dim > v_head_dim ? head_dim : v_head_dim;
  if (widest <= 64) {
    f(std::integral_constant<int, 64>());
  } else if (widest <= 80) {
    f(std::integral_constant<int, 80>());
  } else if (widest <= 96) {
    f(std::integral_constant<int, 96>());
  } else if (widest <= 112) {
    f(std::integral_constant<int, 112>());
  } else if (widest <= 128) {
    f(std::integral_constant<int, 128>());
  } else if (widest <= 192) {
    f(std::integral_constant<int, 192>());
  } else if (widest <= 256) {
    f(std::integral_constant<int, 256>());
  } else {
    return false;
  }
  return true;
}

// Whether the shapes of a call leave room for a row with more packed rows than the decode kernel
// takes at once (plan.cuh). If not, or where ALiBi asks where tokens of trees or behind pinned ones
// stand, the prefill kernel is not launched. Where max_q_len says less than is true, the decode
// kernel serves the rows.
inline bool MayPrefill(const AttentionArgs& args) {
  const int32_t known = args.max_q_len;
  const int32_t queries = known > 0 && known < args.num_tokens ? known : args.num_tokens;
  return !(args.logits.alibi_slopes && HasTreesOrPins(args)) && queries > 1 &&
         int64_t{queries} * args.group_size > kTileRows;
}

// Packed rows of a prefill unit: 32 per warp, or 16 where O of 32 rows would not fit in registers.
constexpr int32_t PrefillRows(int32_t head_dim) { return head_dim <= 128 ? 128 : 64; }

// Most prefill units that a call of these shapes can have: the tiles that are full, and for each
// row one that is not.
inline int64_t MaxPrefillUnits(const AttentionArgs& args) {
  const int64_t rows = args.num_tokens / 2 < args.max_seqs ? args.num_tokens / 2 : args.max_seqs;
  const int64_t full_tiles = int64_t{args.num_tokens} * args.group_size / args.prefill_rows;
  return (full_tiles + rows) * args.num_kv_heads;
}

// All that run at a time must be in the first wave, since a CTA's first unit is the one of its
// number.
inline int32_t PrefillCtasPerMultiprocessor(const DeviceLimits& limits, int32_t shared_bytes) {
  if (shared_bytes > limits.shared_bytes_per_cta) return 0;
  return 2 * (shared_bytes + kReservedBytes) <= limits.shared_bytes_per_multiprocessor ? 2 : 1;
}

struct DecodeShape {
  int32_t stages;  // 0: the device is too small
  int32_t ctas_per_multiprocessor;
};

// Two CTAs per multiprocessor with as many stages as fit, else one; a ring without a tile ahead
// only where no other fits.
inline DecodeShape ShapeDecode(const DeviceLimits& limits,
                               int32_t (*shared_bytes)(int32_t stages)) {
  for (int32_t ctas = 2; ctas >= 1; --ctas) {
    for (int32_t stages = kMaxStages; stages >= kMinStages; --stages) {
      const int32_t bytes = shared_bytes(stages);
      if (bytes <= limits.shared_bytes_per_cta &&
          ctas * (bytes + kReservedBytes) <= limits.shared_bytes_per_multiprocessor &&
          (ctas == 1 || stages > kMinStages)) {
        return {stages, ctas};
      }
    }
  }
  if (shared_bytes(1) <= limits.shared_bytes_per_cta) return {1, 1};
  return {0, 0};
}

// CTAs of the attention launch.
inline int32_t NumWorkers(const DeviceLimits& limits, int32_t ctas_per_multiprocessor) {
  const int32_t workers = limits.multiprocessors * ctas_per_multiprocessor;
  return workers < kMaxWorkers ? workers : kMaxWorkers;
}

// How many KV heads neighbouring workers take side by side, so that they read the same pages at the
// same time: what of kMaxHeadsTogether divides them.
inline int32_t HeadsTogether(int32_t num_kv_heads, int32_t num_workers) {
  const int32_t most = num_workers < kMaxHeadsTogether ? num_workers : kMaxHeadsTogether;
  int32_t together = most > 1 ? most : 1;
  while (num_kv_heads % together != 0) --together;
  return together;
}

// Which kernels serve a call.
struct KernelChoice {
  DecodeShape decode;  // no stages: simt.cuh takes the place of the decode kernel
  int32_t
      prefill_rows;  // packed rows of a prefill unit; 0: no prefill kernel, the other serves all
};

// For a head_dim with tensor-core kernels, given the shared memory that they need and whether
// decode takes trees and pinned tokens: both, or what of them the pages and the device allow.
inline KernelChoice ChooseKernels(const AttentionArgs& args, const DeviceLimits& limits,
                                  int32_t (*decode_bytes)(int32_t stages), int32_t prefill_bytes,
                                  bool takes_trees_and_pins) {
  KernelChoice choice = {};
  if (!HasTensorCorePages(args) || !HasTensorCoreRope(args) || args.is_latent ||
      (HasTreesOrPins(args) && !takes_trees_and_pins))
    return choice;
  choice.decode = ShapeDecode(limits, decode_bytes);
  if (MayPrefill(args) && PrefillCtasPerMultiprocessor(limits, prefill_bytes) > 0) {
    choice.prefill_rows =
        PrefillRows(args.head_dim > args.v_head_dim ? args.head_dim : args.v_head_dim);
  }
  return choice;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_ATTENTION_SELECT_H_
