// SPDX-License-Identifier: Apache-2.0

// One call of attention, read from its operands and attributes by their names: for the CPU kernels,
// the CUDA kernels and the emulator. jax_paged/ops/options.py says what each option means.
//
// Latent pages (MLA): in place of k_pages and v_pages there is kv_pages, [(num_layers,) num_pages,
// page_size, width], with one KV head; V is the front of each row of K. Layout rpa: k_pages and
// v_pages are one pool, which is given twice.

#ifndef JAX_PAGED_COMMON_ATTENTION_CALL_H_
#define JAX_PAGED_COMMON_ATTENTION_CALL_H_

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "common/checks.h"
#include "common/dtypes.h"
#include "common/page_view.h"

namespace jax_paged {

inline constexpr char kAttentionOp[] = "jax_paged.attention";  // of its error messages
inline constexpr int64_t kMaxLatentDim = 576;                  // 512 latent + 64 rope

template <typename T>
using PlainPointer = T*;

// What becomes of a logit, beside its scale; a null pointer: not given. The kernels of CUDA have
// pointers of their own.
template <template <typename> class Pointer>
struct LogitOptions {
  Pointer<const float> alibi_slopes;  // [num_q_heads]
  Pointer<const float> sinks;         // [num_q_heads]
  float soft_cap;                     // 0: off

  // Whether a logit is more than a product times sm_scale.
  JAX_PAGED_HOST_DEVICE bool edits() const {
    return soft_cap > 0.0f || static_cast<bool>(alibi_slopes);
  }
  template <template <typename> class Other>
  LogitOptions<Other> As() const {
    return {Other<const float>(alibi_slopes), Other<const float>(sinks), soft_cap};
  }
};

// What stored values are multiplied with: none (1), one per KV head, or one per token and KV head.
struct KvScale {
  const float* data;  // null: none; [num_kv_heads], or [(num_layers,) num_pages, num_kv_heads,
                      // page_size]
  bool per_token;
};

// Rotary embedding inside attention.
struct RopeTables {
  const float* cos;  // [max_positions, half], null: none
  const float* sin;
  int64_t max_positions;
  int64_t half;  // rotary_dim / 2
  bool interleaved;
};

struct AttentionCall {
  Dtype dtype;      // of q
  Dtype kv_dtype;   // of the pages: the same, or 8-bit
  Dtype out_dtype;  // of out: the same, or fp8
  int64_t num_tokens;
  int64_t num_q_heads;
  int64_t max_seqs;
  int64_t pages_per_seq;
  bool is_run;  // a row's pages follow each other: page_table has the first alone
  PoolShape k_pool;
  PoolShape v_pool;  // latent pages: its head_dim counts; where its rows lie, k_pool tells
  bool is_latent;

  const void* q;
  void* k_pages;
  void* v_pages;              // latent: k_pages; else of the first row of V
  const int32_t* page_table;  // [max_seqs, pages_per_seq], of runs [max_seqs, 1]
  const int32_t* seq_lens;    // [max_seqs]
  const int32_t* cu_q_lens;   // [max_seqs + 1]
  const int32_t* num_seqs;    // [1]
  const int32_t* layer;       // scalar
  const float* sm_scale;      // scalar
  // Options; a null pointer: not given.
  const int32_t* sliding_window;  // scalar or [max_seqs]: tokens that a query sees; <= 0: all
  bool has_row_windows;           // it is [max_seqs]
  const int32_t* num_pinned;      // [max_seqs], there where slot_offset is
  const int32_t* slot_offset;     // [max_seqs]
  LogitOptions<PlainPointer> logits;
  KvScale k_scale;  // of 8-bit pages
  KvScale v_scale;
  const int32_t* tree;        // [max_seqs, max_tree, 2], intervals in depth-first order
  const int32_t* tree_sizes;  // [max_seqs], there where tree is
  int64_t max_tree;           // 0: no trees
  RopeTables rope;
  const float* out_scale;  // scalar, of an fp8 output
  bool causal;
  int64_t num_kv_splits;  // 0: automatic
  int64_t split_tokens;   // 0: off
  int64_t max_q_len;      // queries that a row has at most, if nobody errs; 0: not known
  Array plan;             // i32[words] of jax_paged.attention_plan, where it is given
  // Results.
  void* out;   // [num_tokens, num_q_heads, v_head_dim]
  float* lse;  // [num_tokens, num_q_heads]
};

// Reads a call out of a Source, which has
//   Array Find(name): an operand; with null data where it is not given;
//   T Attribute<T>(name, otherwise): bool, int64_t, float or std::string_view;
//   std::string problem(): what was wrong with the names, or with an attribute; or "";
//   std::string Unread(): an operand that nobody asked for; or "".
template <typename Source>
class AttentionReader {
 public:
  AttentionReader(Source* source, AttentionCall* call) : source_(*source), call_(*call) {}

  // Checks and reads everything. Returns "" or one line: argument, expected, got.
  std::string Read(const Array& out, const Array& lse) {
    call_ = {};
    const bool ok = ReadPages(out) && ReadRows() && ReadOptions() && ReadResults(out, lse);
    if (!source_.problem().empty()) return source_.problem();
    return ok ? source_.Unread() : error_;
  }

 private:
  // Whether all was right so far.
  bool Take(std::string error) {
    if (error.empty()) return true;
    error_ = std::move(error);
    return false;
  }
  bool Wrong(const char* argument, const std::string& expected, const std::string& got) {
    return Take(Mismatch(kAttentionOp, argument, expected, got));
  }

  template <typename T>
  bool ReadArray(const char* name, const Array& array, std::initializer_list<int64_t> dims,
                 const T** data) {
    *data = static_cast<const T*>(array.data);
    bool same = array.type == TypeOf<T>() && array.shape.rank == dims.size();
    for (size_t i = 0; same && i < dims.size(); ++i) same = array.shape[i] == dims.begin()[i];
    if (same) return true;  // without a text for every array
    return Take(CheckType(kAttentionOp, name, array.type, TypeOf<T>())) &&
           Take(CheckShape(kAttentionOp, name, array.shape, dims));
  }
  // An operand that must be there.
  template <typename T>
  bool Need(const char* name, std::initializer_list<int64_t> dims, const T** data) {
    const Array array = source_.Find(name);
    if (!array.is_given) return Wrong(name, "an operand", "none");
    return ReadArray(name, array, dims, data);
  }
  // One that need not; null where it is not given.
  template <typename T>
  bool Option(const char* name, std::initializer_list<int64_t> dims, const T** data) {
    const Array array = source_.Find(name);
    *data = nullptr;
    return !array.is_given || ReadArray(name, array, dims, data);
  }

  bool ReadPages(const Array& out) {
    constexpr auto kOp = kAttentionOp;
    const Array q = source_.Find("q"), kv = source_.Find("kv_pages");
    call_.is_latent = kv.is_given;
    const char* const k_name = call_.is_latent ? "kv_pages" : "k_pages";
    const Array k = call_.is_latent ? kv : source_.Find("k_pages");
    const Array v = call_.is_latent ? kv : source_.Find("v_pages");
    if (!q.is_given || !k.is_given || !v.is_given) {
      return Wrong("operands", "q, k_pages and v_pages, or q and kv_pages", "others");
    }
    call_.q = q.data;
    call_.k_pages = k.data;
    call_.v_pages = v.data;
    if (!Take(ReadDtype(kOp, "q", q.type, &call_.dtype)) ||
        !Take(ReadKvDtype(kOp, k_name, k.type, q.type, &call_.kv_dtype)) ||
        !Take(CheckType(kOp, "v_pages", v.type, k.type)) ||
        !Take(CheckRank(kOp, "q", q.shape, 3)) || !Take(CheckRank(kOp, "out", out.shape, 3))) {
      return false;
    }
    call_.num_tokens = q.shape[0];
    call_.num_q_heads = q.shape[1];
    if (call_.is_latent ? !ReadLatentPool(k.shape, out.shape[2]) : !ReadPools(k.shape, v.shape)) {
      return false;
    }
    const int64_t heads = call_.k_pool.num_kv_heads;
    if (call_.num_q_heads < 1 || call_.num_q_heads % heads != 0) {
      return Wrong("q", "a multiple of " + std::to_string(heads) + " KV heads",
                   std::to_string(call_.num_q_heads) + " heads");
    }
    return Take(CheckShape(kOp, "q", q.shape,
                           {call_.num_tokens, call_.num_q_heads, call_.k_pool.head_dim}));
  }

  bool ReadPools(ShapeView k, ShapeView v) {
    constexpr auto kOp = kAttentionOp;
    const std::string_view name =
        source_.template Attribute<std::string_view>("layout", std::string_view("HND"));
    Layout layout = Layout::kHnd;
    if (!Take(ReadLayout(kOp, name.data(), name.size(), &layout))) return false;
    const int64_t bytes = ByteWidth(call_.kv_dtype);
    PoolShape &k_pool = call_.k_pool, &v_pool = call_.v_pool;
    const bool ok = Take(ReadPoolShape(kOp, "k_pages", k, layout, Pool::kKeys, bytes, &k_pool)) &&
                    Take(ReadPoolShape(kOp, "v_pages", v, layout, Pool::kValues, bytes, &v_pool)) &&
                    Take(CheckSamePool(kOp, k_pool, v_pool, v)) &&
                    Take(CheckHeadDim(kOp, "k_pages", k_pool.head_dim)) &&
                    Take(CheckHeadDim(kOp, "v_pages", v_pool.head_dim));
    if (ok) call_.v_pages = static_cast<char*>(call_.v_pages) + v_pool.first_byte();
    return ok;
  }

  bool ReadLatentPool(ShapeView pages, int64_t v_head_dim) {
    if (pages.rank != 3 && pages.rank != 4) {
      return Wrong("kv_pages", "rank 3 or 4", ShapeText(pages.dims, pages.rank));
    }
    const int64_t* dims = pages.dims + (pages.rank - 3);
    const int64_t page_size = dims[1], width = dims[2];
    if (page_size < 1 || width < 8 || width > kMaxLatentDim || width % 8 != 0) {
      return Wrong("kv_pages", "page_size >= 1 and rows of a multiple of 8 up to 576",
                   ShapeText(pages.dims, pages.rank));
    }
    if (v_head_dim < 8 || v_head_dim > width || v_head_dim % 8 != 0) {
      return Wrong("out", "v_head_dim a multiple of 8 up to " + std::to_string(width),
                   std::to_string(v_head_dim));
    }
    call_.k_pool = {/*num_layers=*/pages.rank == 4 ? pages[0] : 1,
                    /*num_pages=*/dims[0],
                    /*num_kv_heads=*/1,
                    page_size,
                    /*head_dim=*/width,
                    ByteWidth(call_.kv_dtype),
                    Layout::kHnd,
                    Pool::kKeys};
    call_.v_pool = call_.k_pool;
    call_.v_pool.pool = Pool::kValues;
    call_.v_pool.head_dim = v_head_dim;
    return true;
  }

  bool ReadRows() {
    const ShapeView table = source_.Find("page_table").shape;
    if (!Take(CheckRank(kAttentionOp, "page_table", table, 2))) return false;
    const int64_t rows = call_.max_seqs = table[0];
    const int64_t run = source_.Attribute("run_pages", int64_t{0});
    call_.is_run = run > 0;
    call_.pages_per_seq = call_.is_run ? run : table[1];
    return Need("page_table", {rows, call_.is_run ? 1 : table[1]}, &call_.page_table) &&
           Need("seq_lens", {rows}, &call_.seq_lens) &&
           Need("cu_q_lens", {rows + 1}, &call_.cu_q_lens) &&
           Need("num_seqs", {1}, &call_.num_seqs) && Need("layer", {}, &call_.layer) &&
           Need("sm_scale", {}, &call_.sm_scale);
  }

  bool ReadOptions() {
    const int64_t heads = call_.num_q_heads, rows = call_.max_seqs;
    call_.causal = source_.Attribute("causal", true);
    call_.num_kv_splits = source_.Attribute("num_kv_splits", int64_t{0});
    call_.split_tokens = source_.Attribute("split_tokens", int64_t{0});
    call_.max_q_len = source_.Attribute("max_q_len", int64_t{0});
    const float cap = call_.logits.soft_cap = source_.Attribute("soft_cap", 0.0f);
    if (!(cap >= 0.0f && cap < INFINITY)) {
      return Wrong("soft_cap", "finite, 0 (off) or more", std::to_string(cap));
    }
    const int64_t splits = call_.num_kv_splits, tokens = call_.split_tokens;
    if (splits < 0 || tokens < 0 || (splits > 0 && tokens > 0)) {
      return Wrong("num_kv_splits, split_tokens", "non-negative, at most one of them set",
                   std::to_string(splits) + ", " + std::to_string(tokens));
    }
    return ReadWindows() && Option("alibi_slopes", {heads}, &call_.logits.alibi_slopes) &&
           Option("sinks", {heads}, &call_.logits.sinks) && ReadScale("k_scale", &call_.k_scale) &&
           ReadVScale() && ReadTree() && Option("tree_sizes", {rows}, &call_.tree_sizes) &&
           Both("tree", "tree_sizes") && ReadRope() && Option("out_scale", {}, &call_.out_scale) &&
           ReadPlan();
  }

  // The kernels of the CPU plan for themselves.
  bool ReadPlan() {
    call_.plan = source_.Find("plan");
    if (!call_.plan.is_given) return true;
    return Take(CheckType(kAttentionOp, "plan", call_.plan.type, ArrayType::kInt32)) &&
           Take(CheckRank(kAttentionOp, "plan", call_.plan.shape, 1));
  }

  // Two operands that come together.
  bool Both(const char* name, const char* other) {
    const bool is_given = source_.Find(name).is_given;
    if (is_given == source_.Find(other).is_given) return true;
    return Wrong(is_given ? other : name,
                 "an operand beside " + std::string(is_given ? name : other), "none");
  }

  bool ReadWindows() {
    const int64_t rows = call_.max_seqs;
    call_.has_row_windows = source_.Find("sliding_window").shape.rank == 1;
    const bool window = call_.has_row_windows
                            ? Option("sliding_window", {rows}, &call_.sliding_window)
                            : Option("sliding_window", {}, &call_.sliding_window);
    return window && Option("num_pinned", {rows}, &call_.num_pinned) &&
           Option("slot_offset", {rows}, &call_.slot_offset) && Both("num_pinned", "slot_offset");
  }

  bool ReadScale(const char* name, KvScale* scale) {
    const Array array = source_.Find(name);
    if (!array.is_given) return true;
    if (!IsEightBit(call_.kv_dtype)) return Wrong(name, "none beside pages of q's dtype", "one");
    const PoolShape& pool = call_.k_pool;
    scale->per_token = array.shape.rank > 1;
    if (!scale->per_token) return ReadArray(name, array, {pool.num_kv_heads}, &scale->data);
    if (array.shape.rank == 3 && pool.num_layers == 1) {
      return ReadArray(name, array, {pool.num_pages, pool.num_kv_heads, pool.page_size},
                       &scale->data);
    }
    return ReadArray(name, array,
                     {pool.num_layers, pool.num_pages, pool.num_kv_heads, pool.page_size},
                     &scale->data);
  }
  bool ReadVScale() {
    if (!call_.is_latent) return ReadScale("v_scale", &call_.v_scale);
    call_.v_scale = call_.k_scale;
    return true;
  }

  bool ReadTree() {
    const Array tree = source_.Find("tree");
    if (!tree.is_given) return true;
    if (!Take(CheckRank(kAttentionOp, "tree", tree.shape, 3))) return false;
    call_.max_tree = tree.shape[1];
    return ReadArray("tree", tree, {call_.max_seqs, call_.max_tree, 2}, &call_.tree);
  }

  bool ReadRope() {
    const Array cos = source_.Find("cos");
    RopeTables& rope = call_.rope;
    if (cos.is_given) {
      if (!Take(CheckRank(kAttentionOp, "cos", cos.shape, 2))) return false;
      rope.max_positions = cos.shape[0];
      rope.half = cos.shape[1];
      rope.interleaved = source_.Attribute("rope_interleaved", false);
      if (rope.max_positions < 1 || rope.half < 1 || 2 * rope.half > call_.k_pool.head_dim) {
        return Wrong("cos", "[positions, at most half of head_dim]",
                     ShapeText(cos.shape.dims, cos.shape.rank));
      }
    }
    return Option("cos", {rope.max_positions, rope.half}, &rope.cos) &&
           Option("sin", {rope.max_positions, rope.half}, &rope.sin) && Both("cos", "sin");
  }

  bool ReadResults(const Array& out, const Array& lse) {
    constexpr auto kOp = kAttentionOp;
    const int64_t tokens = call_.num_tokens, heads = call_.num_q_heads;
    const float* lse_data = nullptr;
    if (!Take(ReadOutDtype(kOp, "out", out.type, call_.dtype, &call_.out_dtype)) ||
        !Take(CheckShape(kOp, "out", out.shape, {tokens, heads, call_.v_pool.head_dim})) ||
        !ReadArray("lse", lse, {tokens, heads}, &lse_data)) {
      return false;
    }
    call_.out = out.data;
    call_.lse = const_cast<float*>(lse_data);
    return true;
  }

  Source& source_;
  AttentionCall& call_;
  std::string error_;
};

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_ATTENTION_CALL_H_
