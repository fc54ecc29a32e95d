// SPDX-License-Identifier: Apache-2.0

// Writing, merging, norms and rope, projections and experts.

#include <utility>

#include "calls.h"
#include "cpu/handlers.h"

namespace jax_paged::tsan {
namespace {

// Slots of a pool for `count` tokens: shuffled, the last one again, and two that are none.
Array Slots(int64_t count, int64_t num_slots) {
  std::vector<int32_t> slots = Shuffled(num_slots);
  slots.resize(static_cast<size_t>(count));
  slots[static_cast<size_t>(count) - 1] = slots[0];
  slots[1] = -1;
  slots[2] = 2147480000;
  return Ints({count}, slots);
}

Call WriteKv(const std::string& name, XLA_FFI_DataType type, const std::string& layout,
             bool in_place) {
  constexpr int64_t kTokens = 220, kHeads = 4, kDim = 64, kPages = 30, kPageSize = 8;
  std::vector<int64_t> dims = {2, kPages, kHeads, kPageSize, kDim};
  if (layout == "NHD") std::swap(dims[2], dims[3]);
  const Array k = Random(type, {kTokens, kHeads, kDim});
  const Array v = Random(type, {kTokens, kHeads, kDim}, 2.0f);
  Call call;
  call.name = name;
  call.handler = cpu::WriteKvHandler;
  call.operands = {Unused(type, dims), Unused(type, dims), k, v, Slots(kTokens, kPages * kPageSize),
                   Ints({}, {1})};
  call.results = {{type, dims, in_place ? 0 : -1}, {type, dims, in_place ? 1 : -1}};
  call.attributes = {{"layout", layout}};
  return call;
}

// kv_type: of the pages; where it is 8-bit, scales per token are computed.
Call Qkv(const std::string& name, XLA_FFI_DataType type, const std::string& style,
         XLA_FFI_DataType kv_type) {
  constexpr int64_t kTokens = 180, kHeads = 4, kKvHeads = 3, kDim = 64, kPages = 30, kPageSize = 8;
  const std::vector<int64_t> dims = {2, kPages, kKvHeads, kPageSize, kDim};
  std::vector<int64_t> scales = {0};
  if (kv_type != type) scales = {2, kPages, kKvHeads, kPageSize};
  const std::vector<int32_t> positions = Shuffled(kTokens);
  Call call;
  call.name = name;
  call.handler = cpu::QkvNormRopeWriteHandler;
  call.operands = {Random(type, {kTokens, (kHeads + 2 * kKvHeads) * kDim}),
                   Unused(kv_type, dims),
                   Unused(kv_type, dims),
                   Unused(kF32, scales),
                   Unused(kF32, scales),
                   Ints({kTokens}, positions),
                   Slots(kTokens, kPages * kPageSize),
                   Random(kF32, {kTokens, kDim / 2}),
                   Random(kF32, {kTokens, kDim / 2}),
                   Random(type, {kDim}),
                   Random(type, {kDim}),
                   Ints({}, {0})};
  call.results = {{type, {kTokens, kHeads, kDim}, -1, /*is_real=*/true},
                  {kv_type, dims, 1},
                  {kv_type, dims, 2},
                  {kF32, scales, 3},
                  {kF32, scales, 4}};
  call.attributes = {{"eps", 1e-6f}, {"style", style}, {"layout", "HND"}};
  return call;
}

Call Merge(const std::string& name, XLA_FFI_DataType type) {
  constexpr int64_t kTokens = 90, kHeads = 8, kDim = 64;
  Call call;
  call.name = name;
  call.handler = cpu::MergeStatesHandler;
  call.operands = {Random(type, {kTokens, kHeads, kDim}), Random(kF32, {kTokens, kHeads}, 9.0f),
                   Random(type, {kTokens, kHeads, kDim}), Random(kF32, {kTokens, kHeads}, 5.0f)};
  call.results = {{type, {kTokens, kHeads, kDim}, -1, /*is_real=*/true},
                  {kF32, {kTokens, kHeads}, -1, /*is_real=*/true}};
  return call;
}

Call ScatterRows(const std::string& name) {
  constexpr int64_t kRows = 120, kWidth = 512;
  Call call;
  call.name = name;
  call.handler = cpu::ScatterRowsHandler;
  std::vector<int32_t> rows = Shuffled(2 * kRows);  // of two workers, none writes the other's
  rows.resize(kRows);
  rows[3] = -1;
  rows[4] = 2147480000;
  call.operands = {Unused(kF32, {2, kRows, kWidth}), Ints({kRows}, rows),
                   Random(kF32, {kRows, kWidth})};
  call.results = {{kF32, {2, kRows, kWidth}, 0}};
  return call;
}

Call CopyRows(const std::string& name) {
  constexpr int64_t kRows = 240, kWidth = 512, kPairs = 180;  // some rows are read and written
  Call call;
  call.name = name;
  call.handler = cpu::CopyRowsHandler;
  std::vector<int32_t> target = Shuffled(kRows), source(target.rbegin(), target.rend());
  target.resize(kPairs);
  source.resize(kPairs);
  target[3] = -1;
  source[4] = 2147480000;
  call.operands = {Random(kF32, {kRows, kWidth}), Ints({kPairs}, target), Ints({kPairs}, source)};
  call.attributes = {{"leading", int64_t{1}}};
  call.results = {{kF32, {kRows, kWidth}, 0}};
  return call;
}

Call ZeroPool(const std::string& name) {
  Call call;
  call.name = name;
  call.handler = cpu::ZeroPoolHandler;
  call.results = {{kBf16, {3, 900'000}, -1, /*is_real=*/true}};  // 5.4 MB: three chunks
  return call;
}

Call Linear(const std::string& name, XLA_FFI_DataType type, XLA_FFI_DataType w, int64_t num_rows) {
  constexpr int64_t kDepth = 1408, kColumns = 100;  // two chunks deep
  Call call;
  call.name = name;
  call.handler = cpu::LinearHandler;
  call.operands = {Random(type, {num_rows, kDepth}), Random(w, {kColumns, kDepth}),
                   w == type ? None(kF32) : Random(kF32, {kColumns}, 0.02f),
                   None(XLA_FFI_DataType_PRED)};
  call.results = {{type, {num_rows, kColumns}, -1, /*is_real=*/true}};
  return call;
}

// The same of so many rows that two threads clear those that do not count: all but a few.
Call LinearOfFewLive(const std::string& name) {
  constexpr int64_t kRows = 3000;
  Call call = Linear(name, kF32, kF32, kRows);
  Array& live = call.operands[3];
  live = {XLA_FFI_DataType_PRED, {kRows}, Memory(kRows, 0)};
  for (const size_t row : {0, 7, 19}) live.memory.data()[row] = 1;
  return call;
}

// Words of 4-bit codes.
Array Codes(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  std::vector<int32_t> words;
  for (int64_t i = 0; i < count; ++i) words.push_back(static_cast<int32_t>(i * 2'654'435'761));
  Array codes = Ints(shape, words);
  codes.type = XLA_FFI_DataType_U32;
  return codes;
}

Call LinearInt4(const std::string& name, XLA_FFI_DataType type, int64_t num_rows) {
  constexpr int64_t kDepth = 1408, kPanels = 40, kGroups = kDepth / 32;
  Call call;
  call.name = name;
  call.handler = cpu::LinearInt4Handler;
  call.operands = {Random(type, {num_rows, kDepth}), Codes({kPanels, kDepth / 8, 16}),
                   Random(kF32, {kPanels, kGroups, 2, 16}, 0.02f), None(XLA_FFI_DataType_PRED)};
  call.results = {{type, {num_rows, 16 * kPanels}, -1, /*is_real=*/true}};
  return call;
}

Call Lora(const std::string& name, XLA_FFI_DataType type) {
  constexpr int64_t kTokens = 60, kAdapters = 5, kDepth = 520, kRank = 16, kColumns = 300;
  std::vector<int32_t> adapters;
  for (int32_t t = 0; t < kTokens; ++t) {
    adapters.push_back(t % 9 == 4 ? -1 : t * t % (kAdapters - 1));  // the last one is nobody's
  }
  Call call;
  call.name = name;
  call.handler = cpu::LoraHandler;
  call.operands = {Random(type, {kTokens, kDepth}), Random(type, {kAdapters, 2 * kRank, kDepth}),
                   Random(type, {kAdapters, kColumns, kRank}), Ints({kTokens}, adapters),
                   Random(type, {kTokens, kColumns})};
  call.attributes = {{"part_sizes", std::vector<int64_t>{200, 100}}};
  call.results = {{type, {kTokens, kColumns}, -1, /*is_real=*/true}};
  return call;
}

// Tokens' experts: one is none, and the last one is nobody's.
Array Experts(int32_t tokens, int32_t chosen, int32_t experts) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < tokens * chosen; ++i) ids.push_back(i == 5 ? -1 : i * i % (experts - 1));
  return Ints({tokens, chosen}, ids);
}

Call MoeInt4(const std::string& name, XLA_FFI_DataType type) {
  constexpr int32_t kTokens = 35, kExperts = 6, kChosen = 2, kHidden = 64, kInner = 96;
  Call call;
  call.name = name;
  call.handler = cpu::MoeExpertsInt4Handler;
  call.operands = {Random(type, {kTokens, kHidden}),
                   Codes({kExperts, 2 * kInner / 16, kHidden / 8, 16}),
                   Codes({kExperts, kHidden / 16, kInner / 8, 16}),
                   Experts(kTokens, kChosen, kExperts),
                   Random(kF32, {kTokens, kChosen}),
                   Random(kF32, {kExperts, 2 * kInner / 16, kHidden / 32, 2, 16}, 0.02f),
                   Random(kF32, {kExperts, kHidden / 16, kInner / 32, 2, 16}, 0.02f),
                   None(kF32),
                   None(kF32),
                   None(kF32)};
  call.results = {{type, {kTokens, kHidden}, -1, /*is_real=*/true}};
  call.attributes = {{"activation", std::string("silu")}};
  return call;
}

Call Moe(const std::string& name, XLA_FFI_DataType type, XLA_FFI_DataType w,
         const std::string& activation) {
  constexpr int32_t kTokens = 35, kExperts = 6, kChosen = 2, kHidden = 48, kInner = 40;
  const bool is_scaled = w != type, is_clamped = activation == "swiglu_oai";
  Call call;
  call.name = name;
  call.handler = cpu::MoeExpertsHandler;
  call.operands = {Random(type, {kTokens, kHidden}),
                   Random(w, {kExperts, 2 * kInner, kHidden}),
                   Random(w, {kExperts, kHidden, kInner}),
                   Experts(kTokens, kChosen, kExperts),
                   Random(kF32, {kTokens, kChosen}),
                   is_scaled ? Random(kF32, {kExperts, 2 * kInner}, 0.02f) : None(kF32),
                   is_scaled ? Random(kF32, {kExperts, kHidden}, 0.02f) : None(kF32),
                   is_clamped ? Random(type, {kExperts, 2 * kInner}) : None(kF32),
                   is_clamped ? Random(kF32, {kExperts, kHidden}) : None(kF32),
                   is_clamped ? Floats({}, {0.5f}) : None(kF32)};
  call.results = {{type, {kTokens, kHidden}, -1, /*is_real=*/true}};
  call.attributes = {{"activation", activation}};
  return call;
}

}  // namespace

std::vector<Call> OtherCalls() {
  std::vector<Call> calls = {WriteKv("write_kv in place", kBf16, "NHD", /*in_place=*/true),
                             WriteKv("write_kv to a copy", kF32, "HND", /*in_place=*/false),
                             Qkv("qkv_norm_rope_write f32", kF32, "half", kF32),
                             Qkv("qkv_norm_rope_write f16", kF16, "interleaved", kF16),
                             Qkv("qkv_norm_rope_write fp8", kBf16, "half", kFp8),
                             Merge("merge f32", kF32),
                             Merge("merge bf16", kBf16),
                             CopyRows("copy_rows"),
                             ScatterRows("scatter_rows"),
                             Lora("lora f32", kF32),
                             Lora("lora bf16", kBf16),
                             Moe("moe_experts f32", kF32, kF32, "silu"),
                             Moe("moe_experts f16 on fp8", kF16, kFp8, "swiglu_oai"),
                             MoeInt4("moe_experts_int4 f32", kF32),
                             MoeInt4("moe_experts_int4 bf16", kBf16)};
  for (Call& call : calls) call.times = 3;
  calls.push_back(ZeroPool("zero_pool"));
  calls.push_back(Linear("linear f32", kF32, kF32, 20));
  calls.push_back(Linear("linear bf16 on int8", kBf16, kInt8, 33));
  calls.push_back(LinearOfFewLive("linear f32, few live"));
  calls.push_back(LinearInt4("linear_int4 f32", kF32, 20));
  calls.push_back(LinearInt4("linear_int4 bf16", kBf16, 33));
  return calls;
}

}  // namespace jax_paged::tsan
