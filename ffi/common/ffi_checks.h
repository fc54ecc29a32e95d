// What the handlers ask of XLA's buffers. The one file here that knows XLA; kernels do not include
// it.

#ifndef JAX_PAGED_COMMON_FFI_CHECKS_H_
#define JAX_PAGED_COMMON_FFI_CHECKS_H_

#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_paged {

template <typename Buffer>
ShapeView Shape(const Buffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().size()};
}

inline std::string TypeText(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::BF16:
      return "bfloat16";
    case xla::ffi::DataType::F16:
      return "float16";
    case xla::ffi::DataType::F32:
      return "float32";
    case xla::ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    case xla::ffi::DataType::F8E5M2:
      return "float8_e5m2";
    case xla::ffi::DataType::S8:
      return "int8";
    default:
      return "XLA element type " + std::to_string(static_cast<int>(type));
  }
}

inline std::string ReadDtype(const char* op, const char* argument, xla::ffi::DataType type,
                             Dtype* dtype) {
  switch (type) {
    case xla::ffi::DataType::BF16:
      *dtype = Dtype::kBFloat16;
      return "";
    case xla::ffi::DataType::F16:
      *dtype = Dtype::kFloat16;
      return "";
    case xla::ffi::DataType::F32:
      *dtype = Dtype::kFloat32;
      return "";
    default:
      return Mismatch(op, argument, "bfloat16, float16 or float32", TypeText(type));
  }
}

// The same for pages, which may be 8-bit.
inline std::string ReadKvDtype(const char* op, const char* argument, xla::ffi::DataType type,
                               Dtype* dtype) {
  switch (type) {
    case xla::ffi::DataType::F8E4M3FN:
      *dtype = Dtype::kFloat8E4M3;
      return "";
    case xla::ffi::DataType::F8E5M2:
      *dtype = Dtype::kFloat8E5M2;
      return "";
    case xla::ffi::DataType::S8:
      *dtype = Dtype::kInt8;
      return "";
    default:
      return ReadDtype(op, argument, type, dtype);
  }
}

// Pages have the dtype of q, or they are 8-bit.
inline std::string CheckKvType(const char* op, const char* argument, xla::ffi::DataType pages,
                               xla::ffi::DataType q) {
  Dtype dtype = Dtype::kFloat32;
  const std::string error = ReadKvDtype(op, argument, pages, &dtype);
  if (!error.empty() || pages == q || IsEightBit(dtype)) return error;
  return Mismatch(op, argument, TypeText(q) + " or 8-bit", TypeText(pages));
}

inline std::string CheckType(const char* op, const char* argument, xla::ffi::DataType got,
                             xla::ffi::DataType expected) {
  if (got == expected) return "";
  return Mismatch(op, argument, TypeText(expected), TypeText(got));
}

// Weights have the dtype of x, or they are int8 or fp8 (E4M3).
inline std::string ReadWeightDtype(const char* op, const char* argument, xla::ffi::DataType type,
                                   xla::ffi::DataType x, Dtype* dtype) {
  const bool quantized = type == xla::ffi::DataType::S8 || type == xla::ffi::DataType::F8E4M3FN;
  if (quantized || type == x) return ReadKvDtype(op, argument, type, dtype);
  return Mismatch(op, argument, TypeText(x) + " or int8 or float8_e4m3fn", TypeText(type));
}

// Scales go with 8-bit weights, and with no others: then they are [0].
inline std::string CheckWeightScale(const char* op, const char* argument, Dtype weight,
                                    ShapeView got, std::initializer_list<int64_t> expected) {
  return IsEightBit(weight) ? CheckShape(op, argument, got, expected)
                            : CheckShape(op, argument, got, {0});
}

// The operands of jax_paged.attention that may be absent, and then are [0]. They follow sm_scale in
// this order, on CPU and CUDA alike; attribute soft_cap is 0 where there is none.
struct AttentionOptions {
  ShapeView sliding_window;  // i32[1] or [max_seqs], tokens that a query sees, itself included;
                             //   <= 0: off
  ShapeView num_pinned;      // i32[max_seqs], tokens at the front of a row that no window hides
  ShapeView slot_offset;     // i32[max_seqs], there where num_pinned is (Row)
  ShapeView alibi_slopes;    // f32[num_q_heads]
  ShapeView sinks;           // f32[num_q_heads]
  ShapeView k_scale;         // f32[num_kv_heads], or per token: f32[(num_layers,) num_pages,
  ShapeView v_scale;         //   num_kv_heads, page_size]; only with 8-bit pages
  ShapeView tree;            // i32[max_seqs, max_tree, 2], intervals in depth-first order
  ShapeView tree_sizes;      // i32[max_seqs], there where tree is
  ShapeView cos;             // f32[max_positions, half], tables of rope inside attention
  ShapeView sin;             // the same
  ShapeView out_scale;       // f32[1], only with an fp8 output
};

// Checks a scale of 8-bit pages.
inline std::string CheckKvScale(const char* argument, ShapeView scale, const AttentionShape& call) {
  if (!IsGiven(scale)) return "";
  if (!IsEightBit(call.kv_dtype)) return Mismatch(kAttentionOp, argument, "[0]", "a scale");
  const PoolShape& pool = call.k_pool;
  if (scale.rank == 1) return CheckShape(kAttentionOp, argument, scale, {pool.num_kv_heads});
  if (scale.rank == 3 && pool.num_layers == 1) {
    return CheckShape(kAttentionOp, argument, scale,
                      {pool.num_pages, pool.num_kv_heads, pool.page_size});
  }
  return CheckShape(kAttentionOp, argument, scale,
                    {pool.num_layers, pool.num_pages, pool.num_kv_heads, pool.page_size});
}

inline std::string CheckTree(const AttentionOptions& options, int64_t max_seqs) {
  if (!IsGiven(options.tree)) {
    return CheckShape(kAttentionOp, "tree_sizes", options.tree_sizes, {0});
  }
  const std::string error = CheckRank(kAttentionOp, "tree", options.tree, 3);
  if (!error.empty()) return error;
  const std::string wrong =
      CheckShape(kAttentionOp, "tree", options.tree, {max_seqs, options.tree[1], 2});
  if (!wrong.empty()) return wrong;
  return CheckShape(kAttentionOp, "tree_sizes", options.tree_sizes, {max_seqs});
}

inline std::string CheckWindows(const AttentionOptions& options, int64_t max_seqs) {
  const ShapeView& window = options.sliding_window;
  const int64_t windows = window.rank == 1 && window[0] != 1 ? max_seqs : 1;
  const std::string wrong = CheckOptional(kAttentionOp, "sliding_window", window, {windows});
  if (!wrong.empty()) return wrong;
  const std::string pinned =
      CheckOptional(kAttentionOp, "num_pinned", options.num_pinned, {max_seqs});
  if (!pinned.empty()) return pinned;
  const int64_t offsets = IsGiven(options.num_pinned) ? max_seqs : 0;
  return CheckShape(kAttentionOp, "slot_offset", options.slot_offset, {offsets});
}

inline std::string CheckRope(const AttentionOptions& options, int64_t head_dim) {
  if (!IsGiven(options.cos)) return CheckShape(kAttentionOp, "sin", options.sin, {0});
  const std::string error = CheckRank(kAttentionOp, "cos", options.cos, 2);
  if (!error.empty()) return error;
  if (options.cos[0] < 1 || options.cos[1] < 1 || 2 * options.cos[1] > head_dim) {
    return Mismatch(kAttentionOp, "cos", "[positions, at most half of head_dim]",
                    std::to_string(options.cos[0]) + ", " + std::to_string(options.cos[1]));
  }
  return CheckShape(kAttentionOp, "sin", options.sin, {options.cos[0], options.cos[1]});
}

inline std::string CheckSplits(const char* op, int64_t num_kv_splits, int64_t split_tokens) {
  if (num_kv_splits >= 0 && split_tokens >= 0 && (num_kv_splits == 0 || split_tokens == 0))
    return "";
  return Mismatch(op, "num_kv_splits, split_tokens", "non-negative, at most one of them set",
                  std::to_string(num_kv_splits) + ", " + std::to_string(split_tokens));
}

// Reads the dtype of the output: q's or fp8.
inline std::string ReadOutDtype(xla::ffi::DataType q, xla::ffi::DataType out, Dtype* dtype) {
  if (out == xla::ffi::DataType::F8E4M3FN || out == xla::ffi::DataType::F8E5M2) {
    return ReadKvDtype(kAttentionOp, "out", out, dtype);
  }
  const std::string error = CheckType(kAttentionOp, "out", out, q);
  return error.empty() ? ReadDtype(kAttentionOp, "out", out, dtype) : error;
}

// Checks the operands, attributes and results of jax_paged.attention, and reads its sizes.
inline std::string ReadAttention(const xla::ffi::AnyBuffer& q, const xla::ffi::AnyBuffer& k_pages,
                                 const xla::ffi::AnyBuffer& v_pages, ShapeView page_table,
                                 ShapeView seq_lens, ShapeView cu_q_lens, ShapeView num_seqs,
                                 ShapeView layer, ShapeView sm_scale,
                                 const AttentionOptions& options, std::string_view layout_name,
                                 int64_t num_kv_splits, int64_t split_tokens, float soft_cap,
                                 const xla::ffi::AnyBuffer& out, ShapeView lse,
                                 AttentionShape* shape) {
  constexpr auto kOp = kAttentionOp;
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  PoolShape& k_pool = shape->k_pool;
  PoolShape& v_pool = shape->v_pool;
  Layout layout = Layout::kHnd;
  if (failed(ReadDtype(kOp, "q", q.element_type(), &shape->dtype)) ||
      failed(ReadKvDtype(kOp, "k_pages", k_pages.element_type(), &shape->kv_dtype)) ||
      failed(CheckType(kOp, "v_pages", v_pages.element_type(), k_pages.element_type())) ||
      failed(ReadOutDtype(q.element_type(), out.element_type(), &shape->out_dtype)) ||
      failed(ReadLayout(kOp, layout_name.data(), layout_name.size(), &layout))) {
    return error;
  }
  if (failed(CheckKvType(kOp, "k_pages", k_pages.element_type(), q.element_type()))) return error;
  if (IsEightBit(shape->kv_dtype) && layout == Layout::kVllm5d) {
    return Mismatch(kOp, "layout", "\"HND\" or \"NHD\" for 8-bit pages", "\"vllm5d\"");
  }
  const int64_t kv_bytes = ByteWidth(shape->kv_dtype);
  if (failed(
          ReadPoolShape(kOp, "k_pages", Shape(k_pages), layout, Pool::kKeys, kv_bytes, &k_pool)) ||
      failed(ReadPoolShape(kOp, "v_pages", Shape(v_pages), layout, Pool::kValues, kv_bytes,
                           &v_pool)) ||
      failed(CheckSamePool(kOp, k_pool, v_pool, Shape(v_pages))) ||
      failed(CheckHeadDim(kOp, "k_pages", k_pool.head_dim)) ||
      failed(CheckHeadDim(kOp, "v_pages", v_pool.head_dim)) ||
      failed(CheckRank(kOp, "q", Shape(q), 3)) ||
      failed(CheckRank(kOp, "page_table", page_table, 2))) {
    return error;
  }
  const int64_t num_tokens = shape->num_tokens = Shape(q)[0];
  const int64_t num_q_heads = shape->num_q_heads = Shape(q)[1];
  const int64_t max_seqs = shape->max_seqs = page_table[0];
  shape->pages_per_seq = page_table[1];
  if (failed(CheckShape(kOp, "q", Shape(q), {num_tokens, num_q_heads, k_pool.head_dim})) ||
      failed(CheckShape(kOp, "seq_lens", seq_lens, {max_seqs})) ||
      failed(CheckShape(kOp, "cu_q_lens", cu_q_lens, {max_seqs + 1})) ||
      failed(CheckShape(kOp, "num_seqs", num_seqs, {1})) ||
      failed(CheckShape(kOp, "layer", layer, {})) ||
      failed(CheckShape(kOp, "sm_scale", sm_scale, {})) ||
      failed(CheckWindows(options, max_seqs)) ||
      failed(CheckOptional(kOp, "alibi_slopes", options.alibi_slopes, {num_q_heads})) ||
      failed(CheckOptional(kOp, "sinks", options.sinks, {num_q_heads})) ||
      failed(CheckKvScale("k_scale", options.k_scale, *shape)) ||
      failed(CheckKvScale("v_scale", options.v_scale, *shape)) ||
      failed(CheckTree(options, max_seqs)) || failed(CheckRope(options, k_pool.head_dim)) ||
      failed(CheckOptional(kOp, "out_scale", options.out_scale, {1})) ||
      failed(CheckShape(kOp, "out", Shape(out), {num_tokens, num_q_heads, v_pool.head_dim})) ||
      failed(CheckShape(kOp, "lse", lse, {num_tokens, num_q_heads}))) {
    return error;
  }
  if (num_q_heads < 1 || num_q_heads % k_pool.num_kv_heads != 0) {
    return Mismatch(kOp, "q", "a multiple of " + std::to_string(k_pool.num_kv_heads) + " KV heads",
                    std::to_string(num_q_heads) + " heads");
  }
  if (!(soft_cap >= 0.0f && soft_cap < INFINITY)) {
    return Mismatch(kOp, "soft_cap", "finite, 0 (off) or more", std::to_string(soft_cap));
  }
  return CheckSplits(kOp, num_kv_splits, split_tokens);
}

inline constexpr char kMergeStatesOp[] = "jax_paged.merge_attention_states";

// Checks the operands and results of jax_paged.merge_attention_states and reads their dtype.
inline std::string ReadMergeStates(const xla::ffi::AnyBuffer& out_a, ShapeView lse_a,
                                   const xla::ffi::AnyBuffer& out_b, ShapeView lse_b,
                                   const xla::ffi::AnyBuffer& out, ShapeView lse, Dtype* dtype) {
  constexpr auto kOp = kMergeStatesOp;
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  const ShapeView shape = Shape(out_a);
  if (failed(ReadDtype(kOp, "out_a", out_a.element_type(), dtype)) ||
      failed(CheckType(kOp, "out_b", out_b.element_type(), out_a.element_type())) ||
      failed(CheckType(kOp, "out", out.element_type(), out_a.element_type())) ||
      failed(CheckRank(kOp, "out_a", shape, 3)) || failed(CheckHeadDim(kOp, "out_a", shape[2])) ||
      failed(CheckSameShape(kOp, "out_b", Shape(out_b), shape)) ||
      failed(CheckSameShape(kOp, "out", Shape(out), shape)) ||
      failed(CheckShape(kOp, "lse_a", lse_a, {shape[0], shape[1]})) ||
      failed(CheckShape(kOp, "lse_b", lse_b, {shape[0], shape[1]}))) {
    return error;
  }
  return CheckShape(kOp, "lse", lse, {shape[0], shape[1]});
}

// Checks the operands and results of jax_paged.write_kv and reads the two pools.
inline std::string ReadWriteKv(const xla::ffi::AnyBuffer& k_pages,
                               const xla::ffi::AnyBuffer& v_pages, const xla::ffi::AnyBuffer& k,
                               const xla::ffi::AnyBuffer& v, ShapeView slot_mapping,
                               ShapeView layer, std::string_view layout_name,
                               const xla::ffi::AnyBuffer& k_result,
                               const xla::ffi::AnyBuffer& v_result, PoolShape* k_pool,
                               PoolShape* v_pool) {
  constexpr char kOp[] = "jax_paged.write_kv";
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Dtype k_dtype = Dtype::kFloat32, v_dtype = Dtype::kFloat32;
  Layout layout = Layout::kHnd;
  if (failed(ReadKvDtype(kOp, "k_pages", k_pages.element_type(), &k_dtype)) ||
      failed(ReadKvDtype(kOp, "v_pages", v_pages.element_type(), &v_dtype)) ||
      failed(CheckType(kOp, "k", k.element_type(), k_pages.element_type())) ||
      failed(CheckType(kOp, "v", v.element_type(), v_pages.element_type())) ||
      failed(CheckType(kOp, "k_pages result", k_result.element_type(), k_pages.element_type())) ||
      failed(CheckType(kOp, "v_pages result", v_result.element_type(), v_pages.element_type())) ||
      failed(ReadLayout(kOp, layout_name.data(), layout_name.size(), &layout)) ||
      failed(ReadPoolShape(kOp, "k_pages", Shape(k_pages), layout, Pool::kKeys, ByteWidth(k_dtype),
                           k_pool)) ||
      failed(ReadPoolShape(kOp, "v_pages", Shape(v_pages), layout, Pool::kValues,
                           ByteWidth(v_dtype), v_pool)) ||
      failed(CheckSamePool(kOp, *k_pool, *v_pool, Shape(v_pages))) ||
      failed(CheckSameShape(kOp, "k_pages result", Shape(k_result), Shape(k_pages))) ||
      failed(CheckSameShape(kOp, "v_pages result", Shape(v_result), Shape(v_pages))) ||
      failed(CheckRank(kOp, "slot_mapping", slot_mapping, 1)) ||
      failed(CheckShape(kOp, "layer", layer, {}))) {
    return error;
  }
  const int64_t num_tokens = slot_mapping[0], heads = k_pool->num_kv_heads;
  if (failed(CheckShape(kOp, "k", Shape(k), {num_tokens, heads, k_pool->head_dim}))) return error;
  return CheckShape(kOp, "v", Shape(v), {num_tokens, heads, v_pool->head_dim});
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_FFI_CHECKS_H_
