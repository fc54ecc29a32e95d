// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.attention.v1 on CPU: checks, plan, and the workers that run it.

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>

#include "common/attention_call.h"
#include "common/ffi_checks.h"
#include "common/params.h"
#include "common/schedule.h"
#include "common/tree.h"
#include "cpu/attention/kernels.h"
#include "cpu/handlers.h"
#include "cpu/huge_pages.h"
#include "cpu/parallel_for.h"
#include "cpu/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

// Cuts one block of memory into arrays that start at cache lines. Without a base it only adds up.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}

  template <typename T>
  T* Take(int64_t count) {
    T* array = base_ ? reinterpret_cast<T*>(base_ + size_) : nullptr;
    size_ += RoundUp(count * int64_t{sizeof(T)}, Scratch::kAlignment);
    return array;
  }
  int64_t size() const { return size_; }

 private:
  char* base_;
  int64_t size_ = 0;
};

// Everything that a call needs beside its operands.
struct Workspace {
  WorkItem* items;
  WorkItem* sorted;
  std::atomic<int32_t>* unfinished;  // per shared unit: items still to come
  float* partials;
  float* workers;
  int64_t worker_floats;

  static Workspace Carve(Carver* carver, const PlanTotals& totals, int64_t num_workers,
                         int64_t worker_floats) {
    Workspace w;
    w.items = carver->Take<WorkItem>(totals.items);
    w.sorted = carver->Take<WorkItem>(totals.items);
    w.unfinished = carver->Take<std::atomic<int32_t>>(totals.shared_units);
    w.partials = carver->Take<float>(totals.partial_floats);
    w.workers = carver->Take<float>(num_workers * worker_floats);
    w.worker_floats = worker_floats;
    return w;
  }
};

// The result of tokens [begin, end) that see no key: out = 0, and lse is the sink of their head or
// -inf. Without `sinks`, that of padding.
void WriteEmpty(const AttentionParams& params, int64_t begin, int64_t end, const float* sinks) {
  const int64_t heads = (end - begin) * params.num_q_heads;
  if (heads <= 0) return;
  const int64_t bytes = params.v_head_dim * ByteWidth(params.out_dtype);
  std::memset(static_cast<char*>(params.out) + begin * params.num_q_heads * bytes, 0,
              static_cast<size_t>(heads * bytes));
  float* lse = params.lse + begin * params.num_q_heads;
  for (int64_t i = 0; i < heads; ++i) lse[i] = sinks ? sinks[i % params.num_q_heads] : -INFINITY;
}

// What items are sorted by: the power of two of their cost, the largest first.
int CostBucket(const WorkItem& item) {
  int bits = 0;
  for (uint64_t cost = static_cast<uint64_t>(item.cost); cost; cost >>= 1) ++bits;
  return 64 - bits;
}

// Longest items first: a stable counting sort. Returns whether all are about as long.
bool SortByCost(const WorkItem* items, int64_t count, WorkItem* sorted) {
  if (count == 0) return true;
  int64_t start[65] = {0};
  for (int64_t i = 0; i < count; ++i) {
    if (CostBucket(items[i]) < 64) ++start[CostBucket(items[i]) + 1];
  }
  for (int b = 1; b <= 64; ++b) start[b] += start[b - 1];
  for (int64_t i = 0; i < count; ++i) sorted[start[CostBucket(items[i])]++] = items[i];
  return CostBucket(sorted[0]) == CostBucket(sorted[count - 1]);
}

// Reads the trees of the rows into words [num_rows, 3, max_tree] and sets rows[i].tree_size.
void ReadTrees(const AttentionCall& call, bool depths, int32_t num_rows, int32_t* words,
               Row* rows) {
  for (int32_t i = 0; i < num_rows; ++i) {
    const int64_t most = call.max_tree < rows[i].seq_len ? call.max_tree : rows[i].seq_len;
    const int32_t size = static_cast<int32_t>(Clamp(call.tree_sizes[i], 0, most));
    const bool hides = ReadTree(call.tree + i * 2 * call.max_tree, size, call.max_tree, depths,
                                words + i * 3 * call.max_tree);
    rows[i].tree_size = hides ? size : 0;
  }
}

// What the kernels are told; trees are to come.
AttentionParams MakeParams(const AttentionCall& call) {
  const int32_t layer = *call.layer;
  const auto of_layer = [&](KvScale scale) -> KvScale {
    const PoolShape& pool = call.k_pool;
    const int64_t layer_floats = pool.num_slots() * pool.num_kv_heads;
    if (scale.per_token) scale.data += Clamp(layer, 0, pool.num_layers - 1) * layer_floats;
    return scale;
  };
  AttentionParams params = {};
  params.q = call.q;
  params.out = call.out;
  params.lse = call.lse;
  params.k = MakePageView(call.k_pages, call.k_pool, layer);
  params.v = MakePageView(call.v_pages, call.is_latent ? call.k_pool : call.v_pool, layer);
  params.page_table = call.page_table;
  params.pages_per_seq = call.pages_per_seq;
  params.is_run = call.is_run;
  params.num_q_heads = static_cast<int32_t>(call.num_q_heads);
  params.num_kv_heads = static_cast<int32_t>(call.k_pool.num_kv_heads);
  params.group_size = params.num_q_heads / params.num_kv_heads;
  params.head_dim = static_cast<int32_t>(call.k_pool.head_dim);
  params.v_head_dim = static_cast<int32_t>(call.v_pool.head_dim);
  params.sm_scale = *call.sm_scale;
  params.logits = call.logits;
  params.k_scale = of_layer(call.k_scale);
  params.v_scale = of_layer(call.v_scale);
  params.out_scale = call.out_scale ? *call.out_scale : 1.0f;
  params.rope = call.rope;
  params.causal = call.causal;
  params.has_atoms = call.k_pool.layout == Layout::kVllm5d;
  params.dtype = call.dtype;
  params.kv_dtype = call.kv_dtype;
  params.out_dtype = call.out_dtype;
  return params;
}

ScheduleOptions MakeScheduleOptions(const ffi::ThreadPool& pool, const AttentionCall& call,
                                    const AttentionParams& params) {
  ScheduleOptions options;
  options.group_size = params.group_size;
  options.num_kv_heads = params.num_kv_heads;
  options.head_dim = params.head_dim;
  options.v_head_dim = params.v_head_dim;
  options.causal = params.causal;
  options.num_workers = Clamp(pool.num_threads(), 1, 1024);
  options.num_kv_splits = call.num_kv_splits;
  options.split_tokens = call.split_tokens;
  return options;
}

// Whether rows of decode take run_words.
bool TakesWords(const Kernels& kernels, const AttentionParams& params) {
  return kernels.run_words && IsEightBit(params.kv_dtype) && !params.trees && !params.rope.cos &&
         params.dtype == Dtype::kBFloat16;
}

// KV heads of a row that a worker takes together: several where all items are whole units of decode
// that read the pages as they are, and where twice as many items are left as splits aim at.
int64_t HeadsTogether(const ScheduleOptions& options, const PlanTotals& totals,
                      const RowPlan* plans, int32_t num_rows, bool reads_pages) {
  if (totals.has_prefill || !reads_pages) return 1;
  for (int32_t i = 0; i < num_rows; ++i) {
    if (plans[i].kv_splits > 1) return 1;
  }
  const int64_t wanted = options.num_workers > 1 ? 2 * WantedItems(options) : 1;
  int64_t heads = kHeadsTogether;
  while (options.num_kv_heads % heads != 0 || (heads > 1 && totals.items / heads < wanted)) --heads;
  return heads;
}

// Plans the call and runs it. Throws std::bad_alloc.
void Run(ffi::ThreadPool& pool, const AttentionCall& call, AttentionParams params) {
  const int64_t max_seqs = call.max_seqs, num_tokens = call.num_tokens;
  const RowWindows windows = {call.sliding_window, !call.has_row_windows, call.num_pinned,
                              call.slot_offset};
  ScheduleOptions options = MakeScheduleOptions(pool, call, params);
  const Scratch row_memory(static_cast<size_t>(max_seqs) * (sizeof(Row) + sizeof(RowPlan)) + 1);
  RowPlan* plans = reinterpret_cast<RowPlan*>(row_memory.data());
  Row* rows = reinterpret_cast<Row*>(plans + max_seqs);
  const int32_t num_rows =
      SanitizeRows(call.cu_q_lens, call.seq_lens, windows, *call.num_seqs, max_seqs, num_tokens,
                   Clamp(params.pages_per_seq * params.k.page_size, 0, INT32_MAX), rows);
  const int64_t tree_words = call.tree ? num_rows * 3 * call.max_tree : 0;
  const Scratch tree_memory(static_cast<size_t>(tree_words) * sizeof(int32_t) + 1);
  if (call.tree) {
    int32_t* words = reinterpret_cast<int32_t*>(tree_memory.data());
    const bool depths = call.sliding_window || params.logits.edits() || params.rope.cos;
    ReadTrees(call, depths, num_rows, words, rows);
    params.trees = words;
    params.max_tree = call.max_tree;
  }
  const PlanTotals totals = PlanCall(&options, rows, num_rows, plans);

  const bool staged = IsStaged(params);
  const auto lay_out = [&](float* base, WorkerScratch* scratch) {
    return LayOutScratch(base, params.head_dim, params.v_head_dim, totals.has_prefill,
                         params.has_atoms, staged, scratch);
  };
  WorkerScratch layout;
  const int64_t head_floats = lay_out(/*base=*/nullptr, &layout);
  const Kernels& kernels = ChosenKernels();
  const bool words = TakesWords(kernels, params);
  const int64_t heads = HeadsTogether(options, totals, plans, num_rows, !staged || words);
  const int64_t worker_floats = heads * head_floats;
  Carver size(nullptr);
  Workspace::Carve(&size, totals, options.num_workers, worker_floats);
  const Scratch memory(static_cast<size_t>(size.size()) + 1);
  Carver carver(memory.data());
  const Workspace work = Workspace::Carve(&carver, totals, options.num_workers, worker_floats);
  FillItems(options, rows, num_rows, plans, totals, work.items);
  const bool alike = SortByCost(work.items, totals.items, work.sorted);
  for (int64_t i = 0; i < totals.shared_units; ++i)
    new (&work.unfinished[i]) std::atomic<int32_t>(0);
  for (int64_t i = 0; i < totals.items; ++i) {
    if (work.items[i].shared_unit >= 0) ++work.unfinished[work.items[i].shared_unit];
  }

  if (num_rows == 0) {
    WriteEmpty(params, 0, num_tokens, /*sinks=*/nullptr);
  } else {
    const Row& last = rows[num_rows - 1];
    WriteEmpty(params, 0, rows[0].q_begin, /*sinks=*/nullptr);
    WriteEmpty(params, int64_t{last.q_begin} + last.q_len, num_tokens, /*sinks=*/nullptr);
  }
  for (int32_t i = 0; i < num_rows; ++i) {
    if (plans[i].kind == RowKind::kEmpty) {
      WriteEmpty(params, rows[i].q_begin, int64_t{rows[i].q_begin} + rows[i].q_len,
                 params.logits.sinks);
    }
  }

  ExpectOutput(params.out,
               num_tokens * params.num_q_heads * params.v_head_dim * ByteWidth(params.out_dtype));
  const int dtype = static_cast<int>(staged ? Dtype::kFloat32 : params.dtype);
  // The heads of a row lie one behind the other, also when sorted.
  const auto run = [&](int64_t index, int64_t worker, int64_t next) {
    const WorkItem* const items = work.sorted + index * heads;
    const WorkItem& item = items[0];
    WorkerScratch scratch[kHeadsTogether];
    float* memory_of_head = work.workers + worker * work.worker_floats;
    for (int64_t i = 0; i < heads; ++i) memory_of_head += lay_out(memory_of_head, &scratch[i]);
    const Row& row = rows[item.row];
    const WorkItem* const next_items = next < 0 ? nullptr : work.sorted + next * heads;
    const bool is_decode = int64_t{row.q_len} * params.group_size <= kDecodeMaxRows;
    (words && is_decode ? kernels.run_words : kernels.run_items[dtype])(
        params, row, items, static_cast<int>(heads), next_items, scratch, work.partials);
    if (item.shared_unit < 0) return;
    // The last to finish folds, always in the order of the splits.
    if (work.unfinished[item.shared_unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      kernels.fold_unit[dtype](params, row, item, scratch[0], work.partials);
    }
  };
  ParallelFor(pool, totals.items / heads, options.num_workers, run, /*in_order=*/!alike);
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::Dictionary attributes,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse) {
  NamedOperands operands(arguments, attributes);
  AttentionCall call;
  const std::string error = AttentionReader(&operands, &call).Read(ArrayOf(*out), ArrayOf(*lse));
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  try {
    Run(pool, call, MakeParams(call));
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(kAttentionOp) + ": out of memory for partial results");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionHandler, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Attrs()
                                  .Ret<ffi::AnyBuffer>()    // out
                                  .Ret<ffi::AnyBuffer>());  // lse

}  // namespace jax_paged::cpu
