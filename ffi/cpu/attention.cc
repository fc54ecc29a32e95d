// The handler of jax_paged.attention.v1 on CPU: checks, plan, and the workers that run it.

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

#include "common/ffi_checks.h"
#include "common/params.h"
#include "common/schedule.h"
#include "common/tree.h"
#include "cpu/attend.h"
#include "cpu/handlers.h"
#include "cpu/kernels.h"
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

// Longest items first: a stable counting sort by the power of two of their cost.
void SortByCost(const WorkItem* items, int64_t count, WorkItem* sorted) {
  int64_t start[65] = {0};
  const auto bucket = [](const WorkItem& item) {
    int bits = 0;
    for (uint64_t cost = static_cast<uint64_t>(item.cost); cost; cost >>= 1) ++bits;
    return 64 - bits;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (bucket(items[i]) < 64) ++start[bucket(items[i]) + 1];
  }
  for (int b = 1; b <= 64; ++b) start[b] += start[b - 1];
  for (int64_t i = 0; i < count; ++i) sorted[start[bucket(items[i])]++] = items[i];
}

// Reads the trees of the rows into words [num_rows, 3, max_tree] and sets rows[i].tree_size.
void ReadTrees(const Trees& trees, bool depths, int32_t num_rows, int32_t* words, Row* rows) {
  for (int32_t i = 0; i < num_rows; ++i) {
    const int64_t most = trees.max_tree < rows[i].seq_len ? trees.max_tree : rows[i].seq_len;
    const int32_t size = static_cast<int32_t>(Clamp(trees.sizes[i], 0, most));
    const bool hides = ReadTree(trees.intervals + i * 2 * trees.max_tree, size, trees.max_tree,
                                depths, words + i * 3 * trees.max_tree);
    rows[i].tree_size = hides ? size : 0;
  }
}

// Plans the call and runs it. Throws std::bad_alloc.
void Run(ffi::ThreadPool& pool, AttentionParams params, ScheduleOptions options,
         const RowsOfCall& call) {
  const int64_t max_seqs = call.max_seqs, num_tokens = call.num_tokens;
  const Trees& trees = call.trees;
  const Scratch row_memory(static_cast<size_t>(max_seqs) * (sizeof(Row) + sizeof(RowPlan)) + 1);
  RowPlan* plans = reinterpret_cast<RowPlan*>(row_memory.data());
  Row* rows = reinterpret_cast<Row*>(plans + max_seqs);
  const int32_t num_rows =
      SanitizeRows(call.cu_q_lens, call.seq_lens, call.windows, call.num_seqs, max_seqs, num_tokens,
                   Clamp(params.pages_per_seq * params.k.page_size, 0, INT32_MAX), rows);
  const int64_t tree_words = trees.intervals ? num_rows * 3 * trees.max_tree : 0;
  const Scratch tree_memory(static_cast<size_t>(tree_words) * sizeof(int32_t) + 1);
  if (trees.intervals) {
    int32_t* words = reinterpret_cast<int32_t*>(tree_memory.data());
    const bool depths = call.windows.sliding_window || params.alibi_slopes ||
                        params.soft_cap > 0.0f || params.rope.cos;
    ReadTrees(trees, depths, num_rows, words, rows);
    params.trees = words;
    params.max_tree = trees.max_tree;
  }
  const PlanTotals totals = PlanCall(&options, rows, num_rows, plans);

  WorkerScratch layout;
  const bool staged = IsStaged(params);
  const int64_t worker_floats =
      LayOutScratch(/*base=*/nullptr, params.head_dim, params.v_head_dim, totals.has_prefill,
                    params.has_atoms, staged, &layout);
  Carver size(nullptr);
  Workspace::Carve(&size, totals, options.num_workers, worker_floats);
  const Scratch memory(static_cast<size_t>(size.size()) + 1);
  Carver carver(memory.data());
  const Workspace work = Workspace::Carve(&carver, totals, options.num_workers, worker_floats);
  FillItems(options, rows, num_rows, plans, totals, work.items);
  SortByCost(work.items, totals.items, work.sorted);
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
      WriteEmpty(params, rows[i].q_begin, int64_t{rows[i].q_begin} + rows[i].q_len, params.sinks);
    }
  }

  const Kernels& kernels = ChosenKernels();
  const int dtype = static_cast<int>(staged ? Dtype::kFloat32 : params.dtype);
  const auto run = [&](int64_t index, int64_t worker) {
    const WorkItem& item = work.sorted[index];
    WorkerScratch scratch;
    LayOutScratch(work.workers + worker * work.worker_floats, params.head_dim, params.v_head_dim,
                  totals.has_prefill, params.has_atoms, staged, &scratch);
    const Row& row = rows[item.row];
    const bool words = kernels.run_words && IsEightBit(params.kv_dtype) && !params.trees &&
                       !params.rope.cos && params.dtype == Dtype::kBFloat16 &&
                       int64_t{row.q_len} * params.group_size <= kDecodeMaxRows;
    (words ? kernels.run_words : kernels.run_item[dtype])(params, row, item, scratch,
                                                          work.partials);
    if (item.shared_unit < 0) return;
    // The last to finish folds, always in the order of the splits.
    if (work.unfinished[item.shared_unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      kernels.fold_unit[dtype](params, rows[item.row], item, scratch, work.partials);
    }
  };
  ParallelFor(pool, totals.items, options.num_workers, run);
}

}  // namespace

ffi::Error Attend(const char* op, ffi::ThreadPool& pool, const AttentionParams& params,
                  const RowsOfCall& call) {
  ScheduleOptions options;
  options.group_size = params.group_size;
  options.num_kv_heads = params.num_kv_heads;
  options.head_dim = params.head_dim;
  options.v_head_dim = params.v_head_dim;
  options.causal = params.causal;
  options.num_workers = Clamp(pool.num_threads(), 1, 1024);
  options.num_kv_splits = call.num_kv_splits;
  options.split_tokens = call.split_tokens;
  try {
    Run(pool, params, options, call);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(op) + ": out of memory for partial results");
  }
  return ffi::Error::Success();
}

namespace {

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
                     ffi::AnyBuffer v_pages, ffi::Buffer<ffi::S32> page_table,
                     ffi::Buffer<ffi::S32> seq_lens, ffi::Buffer<ffi::S32> cu_q_lens,
                     ffi::Buffer<ffi::S32> num_seqs, ffi::Buffer<ffi::S32> layer,
                     ffi::Buffer<ffi::F32> sm_scale, ffi::Buffer<ffi::S32> sliding_window,
                     ffi::Buffer<ffi::S32> num_pinned, ffi::Buffer<ffi::S32> slot_offset,
                     ffi::Buffer<ffi::F32> alibi_slopes, ffi::Buffer<ffi::F32> sinks,
                     ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale,
                     ffi::Buffer<ffi::S32> tree, ffi::Buffer<ffi::S32> tree_sizes,
                     ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                     ffi::Buffer<ffi::F32> out_scale, std::string_view layout_name, bool causal,
                     int64_t num_kv_splits, int64_t split_tokens, float soft_cap,
                     bool rope_interleaved, ffi::Result<ffi::AnyBuffer> out,
                     ffi::ResultBuffer<ffi::F32> lse) {
  AttentionShape shape;
  const AttentionOptions given = {
      Shape(sliding_window), Shape(num_pinned), Shape(slot_offset), Shape(alibi_slopes),
      Shape(sinks),          Shape(k_scale),    Shape(v_scale),     Shape(tree),
      Shape(tree_sizes),     Shape(cos),        Shape(sin),         Shape(out_scale)};
  const std::string error =
      ReadAttention(q, k_pages, v_pages, Shape(page_table), Shape(seq_lens), Shape(cu_q_lens),
                    Shape(num_seqs), Shape(layer), Shape(sm_scale), given, layout_name,
                    num_kv_splits, split_tokens, soft_cap, *out, Shape(*lse), &shape);
  if (!error.empty()) return ffi::Error::InvalidArgument(error);

  AttentionParams params;
  params.q = q.untyped_data();
  params.out = out->untyped_data();
  params.lse = lse->typed_data();
  params.page_table = page_table.typed_data();
  params.pages_per_seq = shape.pages_per_seq;
  params.num_q_heads = static_cast<int32_t>(shape.num_q_heads);
  params.num_kv_heads = static_cast<int32_t>(shape.k_pool.num_kv_heads);
  params.group_size = params.num_q_heads / params.num_kv_heads;
  params.head_dim = static_cast<int32_t>(shape.k_pool.head_dim);
  params.v_head_dim = static_cast<int32_t>(shape.v_pool.head_dim);
  params.sm_scale = *sm_scale.typed_data();
  params.soft_cap = soft_cap;
  params.alibi_slopes = IsGiven(given.alibi_slopes) ? alibi_slopes.typed_data() : nullptr;
  params.sinks = IsGiven(given.sinks) ? sinks.typed_data() : nullptr;
  const int32_t layer_index = *layer.typed_data();
  const auto kv_scale = [&](const ffi::Buffer<ffi::F32>& scale, ShapeView given) -> KvScale {
    if (!IsGiven(given)) return {nullptr, false};
    if (given.rank == 1) return {scale.typed_data(), false};
    const PoolShape& pool = shape.k_pool;
    const int64_t layer_floats = pool.num_slots() * pool.num_kv_heads;
    return {scale.typed_data() + Clamp(layer_index, 0, pool.num_layers - 1) * layer_floats, true};
  };
  params.k_scale = kv_scale(k_scale, given.k_scale);
  params.v_scale = kv_scale(v_scale, given.v_scale);
  params.kv_dtype = shape.kv_dtype;
  params.trees = nullptr;  // set by Attend
  params.max_tree = 0;
  params.out_dtype = shape.out_dtype;
  params.out_scale = IsGiven(given.out_scale) ? *out_scale.typed_data() : 1.0f;
  params.rope = {nullptr, nullptr, 0, 0, rope_interleaved};
  if (IsGiven(given.cos)) {
    params.rope = {cos.typed_data(), sin.typed_data(), given.cos[0], given.cos[1],
                   rope_interleaved};
  }
  params.causal = causal;
  params.has_atoms = shape.k_pool.layout == Layout::kVllm5d;
  params.dtype = shape.dtype;
  params.k = MakePageView(k_pages.untyped_data(), shape.k_pool, layer_index);
  params.v = MakePageView(v_pages.untyped_data(), shape.v_pool, layer_index);

  Trees trees = {nullptr, nullptr, 0};
  if (IsGiven(given.tree)) trees = {tree.typed_data(), tree_sizes.typed_data(), given.tree[1]};
  RowWindows windows = {nullptr, given.sliding_window[0] == 1, nullptr, nullptr};
  if (IsGiven(given.sliding_window)) windows.sliding_window = sliding_window.typed_data();
  if (IsGiven(given.num_pinned)) {
    windows.num_pinned = num_pinned.typed_data();
    windows.slot_offset = slot_offset.typed_data();
  }
  return Attend(kAttentionOp, pool, params,
                {cu_q_lens.typed_data(), seq_lens.typed_data(), windows, *num_seqs.typed_data(),
                 shape.max_seqs, shape.num_tokens, num_kv_splits, split_tokens, trees});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionHandler, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // q
                                  .Arg<ffi::AnyBuffer>()         // k_pages
                                  .Arg<ffi::AnyBuffer>()         // v_pages
                                  .Arg<ffi::Buffer<ffi::S32>>()  // page_table
                                  .Arg<ffi::Buffer<ffi::S32>>()  // seq_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()  // cu_q_lens
                                  .Arg<ffi::Buffer<ffi::S32>>()  // num_seqs
                                  .Arg<ffi::Buffer<ffi::S32>>()  // layer
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sm_scale
                                  .Arg<ffi::Buffer<ffi::S32>>()  // sliding_window
                                  .Arg<ffi::Buffer<ffi::S32>>()  // num_pinned
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slot_offset
                                  .Arg<ffi::Buffer<ffi::F32>>()  // alibi_slopes
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sinks
                                  .Arg<ffi::Buffer<ffi::F32>>()  // k_scale
                                  .Arg<ffi::Buffer<ffi::F32>>()  // v_scale
                                  .Arg<ffi::Buffer<ffi::S32>>()  // tree
                                  .Arg<ffi::Buffer<ffi::S32>>()  // tree_sizes
                                  .Arg<ffi::Buffer<ffi::F32>>()  // cos
                                  .Arg<ffi::Buffer<ffi::F32>>()  // sin
                                  .Arg<ffi::Buffer<ffi::F32>>()  // out_scale
                                  .Attr<std::string_view>("layout")
                                  .Attr<bool>("causal")
                                  .Attr<int64_t>("num_kv_splits")
                                  .Attr<int64_t>("split_tokens")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("rope_interleaved")
                                  .Ret<ffi::AnyBuffer>()           // out
                                  .Ret<ffi::Buffer<ffi::F32>>());  // lse

}  // namespace jax_paged::cpu
