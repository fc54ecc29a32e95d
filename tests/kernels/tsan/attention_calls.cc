// SPDX-License-Identifier: Apache-2.0

// Decode with splits that are folded, prefill in blocks, both in one call, 8-bit pages, trees and
// rope, pages cut into atoms, and MLA.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "calls.h"
#include "common/page_view.h"
#include "cpu/handlers.h"

namespace jax_paged::tsan {
namespace {

constexpr int64_t kPageSize = 16;

struct Rows {
  std::vector<int32_t> q_lens;
  std::vector<int32_t> seq_lens;

  int64_t count() const { return static_cast<int64_t>(q_lens.size()); }
};

struct Batch {
  Array page_table, seq_lens, cu_q_lens, num_seqs, layer;
  int64_t num_pages;  // half of which no row has
  int64_t num_tokens;
};

Batch MakeBatch(const Rows& rows) {
  int64_t pages_per_seq = 0, used = 0;
  std::vector<int32_t> starts = {0};
  for (size_t i = 0; i < rows.q_lens.size(); ++i) {
    const int64_t pages = (rows.seq_lens[i] + kPageSize - 1) / kPageSize;
    pages_per_seq = std::max(pages_per_seq, pages);
    used += pages;
    starts.push_back(starts.back() + rows.q_lens[i]);
  }
  const std::vector<int32_t> ids = Shuffled(2 * used);
  std::vector<int32_t> table;
  for (const int32_t seq_len : rows.seq_lens) {
    for (int64_t p = 0; p < pages_per_seq; ++p) {
      const bool is_used = p * kPageSize < seq_len;
      table.push_back(is_used ? ids[static_cast<size_t>(--used)] : 2147480000);
    }
  }
  return {Ints({rows.count(), pages_per_seq}, table),
          Ints({rows.count()}, rows.seq_lens),
          Ints({rows.count() + 1}, starts),
          Ints({1}, {static_cast<int32_t>(rows.count())}),
          Ints({}, {1}),  // of two layers
          static_cast<int64_t>(ids.size()),
          starts.back() + 2};  // two of padding
}

// Random values in the slots of the second layer that rows use.
Array MakePages(const Rows& rows, const Batch& batch, PoolShape shape, std::vector<int64_t> dims,
                XLA_FFI_DataType type) {
  shape.num_layers = 2;
  shape.num_pages = batch.num_pages;
  shape.page_size = kPageSize;
  shape.element_bytes = static_cast<int64_t>(WidthOf(type));
  Array pages = Unused(type, std::move(dims));
  const PageView view = MakePageView(pages.memory.data(), shape, /*layer=*/1);
  const Array values = Random(type, {97, shape.head_dim});
  const int64_t row_bytes = shape.token_bytes(), per_seq = batch.page_table.dims[1];
  const int32_t* const table = reinterpret_cast<const int32_t*>(batch.page_table.memory.data());
  int64_t next = 0;
  for (int64_t i = 0; i < rows.count(); ++i) {
    for (int64_t token = 0; token < rows.seq_lens[static_cast<size_t>(i)]; ++token) {
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        const char* const from = values.memory.data() + next++ % 97 * row_bytes;
        const int32_t page = table[i * per_seq + token / kPageSize];
        char* const to = view.Token(page, head, token % kPageSize);
        const int64_t atom = view.strides.atom_bytes;
        for (int64_t b = 0; b < row_bytes; b += atom) {
          std::memcpy(to + b / atom * view.strides.atom, from + b, static_cast<size_t>(atom));
        }
      }
    }
  }
  return pages;
}

// One more operand, whose name goes into the attribute that has them all.
void Give(const std::string& name, Array array, Call* call) {
  call->operands.push_back(std::move(array));
  const auto found = call->attributes.find("operands");
  const bool is_first = found == call->attributes.end();
  call->attributes["operands"] =
      is_first ? name : std::get<std::string>(found->second) + "," + name;
}

void GiveRows(const Batch& batch, float sm_scale, Call* call) {
  Give("page_table", batch.page_table, call);
  Give("seq_lens", batch.seq_lens, call);
  Give("cu_q_lens", batch.cu_q_lens, call);
  Give("num_seqs", batch.num_seqs, call);
  Give("layer", batch.layer, call);
  Give("sm_scale", Floats({}, {sm_scale}), call);
}

struct Options {
  std::string layout = "HND";
  bool causal = true;
  int64_t num_kv_splits = 0;
  int64_t split_tokens = 0;
  float soft_cap = 0.0f;
  std::map<std::string, Array> operands;  // by their names; the others are not given
};

Call Attention(const std::string& name, XLA_FFI_DataType dtype, XLA_FFI_DataType kv,
               const Rows& rows, int64_t group, int64_t head_dim, Options options) {
  constexpr int64_t kHeads = 2;
  const Batch batch = MakeBatch(rows);
  const int64_t num_q_heads = kHeads * group, pages = batch.num_pages;
  PoolShape shape = {};
  shape.num_kv_heads = kHeads;
  shape.head_dim = head_dim;
  std::vector<int64_t> k_dims = {2, pages, kHeads, kPageSize, head_dim}, v_dims;
  if (options.layout == "NHD") {
    shape.layout = Layout::kNhd;
    std::swap(k_dims[2], k_dims[3]);
  }
  v_dims = k_dims;
  if (options.layout == "vllm5d") {
    shape.layout = Layout::kVllm5d;
    const int64_t atom = kKeyAtomBytes / static_cast<int64_t>(WidthOf(kv));
    k_dims = {2, pages, kHeads, head_dim / atom, kPageSize, atom};
    std::swap(v_dims[3], v_dims[4]);
  }
  Call call;
  call.name = name;
  call.handler = cpu::AttentionHandler;
  Give("q", Random(dtype, {batch.num_tokens, num_q_heads, head_dim}), &call);
  shape.pool = Pool::kKeys;
  Give("k_pages", MakePages(rows, batch, shape, k_dims, kv), &call);
  shape.pool = Pool::kValues;
  Give("v_pages", MakePages(rows, batch, shape, v_dims, kv), &call);
  GiveRows(batch, /*sm_scale=*/0.2f, &call);
  for (const auto& [operand, array] : options.operands) Give(operand, array, &call);
  call.results = {{dtype, {batch.num_tokens, num_q_heads, head_dim}, -1, /*is_real=*/true},
                  {kF32, {batch.num_tokens, num_q_heads}, -1, /*is_real=*/true}};
  call.attributes.insert({{"layout", options.layout},
                          {"causal", options.causal},
                          {"num_kv_splits", options.num_kv_splits},
                          {"split_tokens", options.split_tokens},
                          {"soft_cap", options.soft_cap}});
  return call;
}

Call Mla(const std::string& name, XLA_FFI_DataType dtype, XLA_FFI_DataType kv, const Rows& rows) {
  constexpr int64_t kWidth = 96, kLatent = 64, kHeads = 8;
  const Batch batch = MakeBatch(rows);
  PoolShape shape = {};
  shape.num_kv_heads = 1;
  shape.head_dim = kWidth;
  Call call;
  call.name = name;
  call.handler = cpu::AttentionHandler;
  Give("q", Random(dtype, {batch.num_tokens, kHeads, kWidth}), &call);
  Give("kv_pages", MakePages(rows, batch, shape, {2, batch.num_pages, kPageSize, kWidth}, kv),
       &call);
  GiveRows(batch, /*sm_scale=*/0.1f, &call);
  if (kv != dtype) Give("k_scale", Floats({1}, {0.02f}), &call);
  call.results = {{dtype, {batch.num_tokens, kHeads, kLatent}, -1, /*is_real=*/true},
                  {kF32, {batch.num_tokens, kHeads}, -1, /*is_real=*/true}};
  return call;
}

// Tables of rope, for an angle that grows with the position and falls with the pair.
Array RopeTable(int64_t positions, int64_t half, float (*function)(float)) {
  std::vector<float> table;
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      table.push_back(function(static_cast<float>(p) / static_cast<float>(1 + 9 * i)));
    }
  }
  return Floats({positions, half}, table);
}

}  // namespace

std::vector<Call> AttentionCalls() {
  const Rows decode = {{1, 1, 1}, {700, 300, 64}};
  const Rows mixed = {{70, 1, 0}, {90, 400, 17}};
  const Rows trees = {{6, 6}, {300, 260}};
  std::vector<Call> calls;
  calls.push_back(Attention("decode f32", kF32, kF32, decode, 2, 64, {}));

  Options options;
  options.layout = "NHD";
  options.operands = {{"sliding_window", Ints({3}, {60, 0, 5})},
                      {"num_pinned", Ints({3}, {20, 9, 0})},
                      {"slot_offset", Ints({3}, {0, 0, 0})},
                      {"alibi_slopes", Random(kF32, {8}, 0.1f)},
                      {"sinks", Random(kF32, {8})}};
  calls.push_back(Attention("prefill and decode bf16", kBf16, kBf16, mixed, 4, 32, options));

  options = {};
  options.num_kv_splits = 5;
  const int64_t num_pages = MakeBatch(decode).num_pages;
  for (const char* name : {"k_scale", "v_scale"}) {
    options.operands[name] = Random(kF32, {2, num_pages, 2, kPageSize}, 0.02f);
  }
  calls.push_back(Attention("decode bf16 on int8", kBf16, kInt8, decode, 2, 64, options));

  options = {};
  options.operands = {{"k_scale", Floats({2}, {0.02f, 0.03f})},
                      {"v_scale", Floats({2}, {0.02f, 0.03f})}};
  options.causal = false;
  calls.push_back(Attention("prefill and decode f32 on fp8", kF32, kFp8, mixed, 4, 32, options));

  options = {};
  options.split_tokens = 48;
  options.soft_cap = 5.0f;
  std::vector<int32_t> intervals;  // node i sees those from its first on: chains of two
  for (int i = 0; i < 12; ++i) {
    const int32_t node = i % 6;
    intervals.push_back(node / 2 * 2);
    intervals.push_back(node / 2 * 2 + 2);
  }
  options.operands = {{"tree", Ints({2, 6, 2}, intervals)},
                      {"tree_sizes", Ints({2}, {6, 6})},
                      {"cos", RopeTable(400, 8, std::cos)},
                      {"sin", RopeTable(400, 8, std::sin)}};
  calls.push_back(Attention("trees and rope f32", kF32, kF32, trees, 3, 40, options));

  options = {};
  options.layout = "vllm5d";
  calls.push_back(Attention("prefill and decode f16 in atoms", kF16, kF16, mixed, 4, 32, options));

  calls.push_back(Mla("MLA f32", kF32, kF32, decode));
  calls.push_back(Mla("MLA bf16 on fp8", kBf16, kFp8, {{1, 3}, {300, 200}}));
  return calls;
}

}  // namespace jax_paged::tsan
