// SPDX-License-Identifier: Apache-2.0

// The interface between the handler and the kernels of one instruction set.

#ifndef JAX_PAGED_CPU_ATTENTION_KERNELS_H_
#define JAX_PAGED_CPU_ATTENTION_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "common/params.h"
#include "common/qkv_params.h"
#include "common/schedule.h"

namespace jax_paged::cpu {

// Buffers of floats are padded to this many, the widest step of any kernel.
inline constexpr int64_t kPadFloats = 32;

// 2^f on [-1/2, 1/2], powers ascending: a least-maximum fit with relative error 2e-9.
inline constexpr float kExp2[7] = {1.0f,         0.6931472f,    0.24022648f,   0.055503324f,
                                   0.009618437f, 0.0013398875f, 0.00015353362f};

// KV heads of a row of decode that one worker takes together, at most. In a page they lie side by
// side, and runs of memory that are read at about the same time should be long
// (docs/performance.md, Pages of 16).
inline constexpr int kHeadsTogether = 4;

// Working memory of one worker for one head, for units of up to `rows` packed rows. Each array
// starts at a cache line. The prefill arrays are null when the call has no prefill rows, the stages
// when K and V are not 8-bit.
struct WorkerScratch {
  float* q;         // [rows, q_stride] queries as floats
  float* o;         // [rows, o_stride] running sum of weight x value of a split
  float* m;         // [rows] log2 of the scale of o and l
  float* l;         // [rows] running sum of weights
  float* total_o;   // [rows, o_stride] the same, folded over splits
  float* total_m;   // [rows]
  float* total_l;   // [rows]
  float* scores;    // [rows, kKeyBlock] logits, then weights
  float* k_panels;  // prefill: keys as floats, transposed
  float* v_panels;  // prefill: values as floats
  // Pages whose rows are cut into atoms: key blocks gathered to whole rows, of the pages' dtype.
  // Two have room, and of 8-bit pages more.
  float* k_rows;   // [2, kKeyBlock, head_dim]
  float* v_rows;   // [2, kKeyBlock, v_head_dim]
  float* k_stage;  // 8-bit pages: [kKeyBlock, q_stride] keys of a block as floats, or queries
  float* v_stage;  // 8-bit pages: [kKeyBlock, o_stride] the same of values
  int64_t q_stride;
  int64_t o_stride;
};

// Lays a worker's arrays out from `base` (which may be null) and returns their size in floats.
inline int64_t LayOutScratch(float* base, int64_t head_dim, int64_t v_head_dim, bool has_prefill,
                             bool has_atoms, bool staged, WorkerScratch* scratch) {
  const int64_t rows = has_prefill ? kPrefillBlock : kDecodeMaxRows;
  int64_t size = 0;
  const auto take = [&](int64_t floats) {
    float* array = base ? base + size : nullptr;
    size += RoundUp(floats, kPadFloats);
    return array;
  };
  scratch->q_stride = RoundUp(head_dim, kPadFloats);
  scratch->o_stride = RoundUp(v_head_dim, kPadFloats);
  scratch->q = take(rows * scratch->q_stride);
  scratch->o = take(rows * scratch->o_stride);
  scratch->total_o = take(rows * scratch->o_stride);
  scratch->m = take(rows);
  scratch->l = take(rows);
  scratch->total_m = take(rows);
  scratch->total_l = take(rows);
  scratch->scores = take(rows * kKeyBlock);
  scratch->k_panels = has_prefill ? take(kKeyBlock * scratch->q_stride) : nullptr;
  scratch->v_panels = has_prefill ? take(kKeyBlock * scratch->o_stride) : nullptr;
  scratch->k_rows = has_atoms ? take(2 * kKeyBlock * head_dim) : nullptr;
  scratch->v_rows = has_atoms ? take(2 * kKeyBlock * v_head_dim) : nullptr;
  scratch->k_stage = staged ? take(kKeyBlock * scratch->q_stride) : nullptr;
  scratch->v_stage = staged ? take(kKeyBlock * scratch->o_stride) : nullptr;
  return size;
}

// Where qkv_norm_rope_write writes K or V: a layer.
struct QkvTarget {
  PageView pages;
  int64_t head_dim;
  const float* given_scale;  // see QkvScale
  PageView scales;           // base null: none is computed
};

// A call of qkv_norm_rope_write and what the handler prepared for it.
struct QkvWork {
  const QkvParams* params;
  const float* q_norm;  // [head_dim], null: none
  const float* k_norm;
  QkvTarget k;
  QkvTarget v;
};

// Two attention results of the same queries, to be merged into one; rows are tokens x query heads.
struct MergeParams {
  const void* out_a;  // [rows, head_dim]
  const float* lse_a;
  const void* out_b;
  const float* lse_b;
  void* out;
  float* lse;
  int64_t head_dim;
};

struct Kernels {
  // Computes an item, or those of num_heads KV heads of a row of decode, each with scratch of its
  // own; several must be whole units of one split. A whole unit goes to params.out and params.lse;
  // splits of a shared unit go to `partials`. Of `next`, as many items that the same worker
  // probably takes then, the first keys are fetched; null: nothing is.
  using RunItems = void (*)(const AttentionParams& params, const Row& row, const WorkItem* items,
                            int num_heads, const WorkItem* next, const WorkerScratch* scratch,
                            float* partials);
  // Folds the partials of item's shared unit, all of them there, into params.out and params.lse.
  using FoldUnit = void (*)(const AttentionParams& params, const Row& row, const WorkItem& item,
                            const WorkerScratch& scratch, float* partials);
  // Norm and RoPE of q's heads for tokens [begin, end).
  using QkvQueries = void (*)(const QkvWork& work, int64_t begin, int64_t end);
  // The same of K, and V, into the pages: KV heads [begin, end) of all tokens, in order.
  using QkvPages = QkvQueries;
  // Merges rows [begin, end).
  using MergeHeads = void (*)(const MergeParams& params, int64_t begin, int64_t end);

  const char* isa;
  RunItems run_items[kNumDtypes];
  // Items of decode with bf16 queries and 8-bit pages, without trees; null: run_items of f32, as
  // for other queries. The units are those of f32, too.
  RunItems run_words;
  FoldUnit fold_unit[kNumDtypes];
  QkvQueries qkv_queries[kNumDtypes];
  QkvPages qkv_pages[kNumDtypes];
  MergeHeads merge_heads[kNumDtypes];
};

const Kernels& GenericKernels();
#ifndef JAX_PAGED_GENERIC_ONLY
const Kernels& Avx2Kernels();
const Kernels& Avx512Kernels();
const Kernels& Avx512Bf16Kernels();
const Kernels& AmxKernels();
#endif

// The kernels in use, chosen once: the best that the CPU runs, or what JAX_PAGED_CPU_ISA names.
// Throws std::runtime_error when that names none that can run.
const Kernels& ChosenKernels();

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_ATTENTION_KERNELS_H_
