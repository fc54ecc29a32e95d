// SPDX-License-Identifier: Apache-2.0

// The handler of jax_paged.lora.v1 on CPU: out[t] = base[t] + b[e] (a[e] x[t]), e = adapters[t].
//
//   group   the tokens of one adapter, padded to whole tiles of rows (linear/kernel.h), so each of
//           its weights is read once for all of them. Adapters of no token are never touched
//   part    some outputs with an `a` of their own: part p takes rows [p rank, (p + 1) rank) of a x
// Steps, each shared by all workers: gather x; a x, rounded to the dtype of the call; load it per
// part; b (a x), added to the base. Bits depend on nothing but the token's inputs.
//
// A call of many tokens runs in turns of at most kMaxTokens, which bounds its memory. `base` and
// `out` may be the same memory.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "cpu/handlers.h"
#include "cpu/linear/kernels.h"
#include "cpu/parallel_for.h"
#include "cpu/scratch.h"
#include "cpu/write/in_place.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr char kOp[] = "jax_paged.lora";
constexpr int64_t kMaxTokens = 1024;
constexpr int64_t kRowsPerItem = 16;              // that are gathered by one worker
constexpr int64_t kSerialWeightBytes = 64 << 10;  // less is not worth a second thread

struct Lora {
  const char* x;
  const char* a;
  const char* b;
  const int32_t* adapters;
  char* out;  // holds the base
  Dtype dtype;
  int64_t num_tokens, depth, num_adapters, rank, num_columns;
  std::vector<int64_t> part_ends;
};

struct Group {
  int64_t adapter;
  int64_t first_row;  // of its tokens, among the padded rows
  int64_t num_rows;
};

// The tokens of one turn, sorted.
struct Tokens {
  std::vector<Group> groups;
  std::vector<int64_t> token_of;  // by padded row: token of the call, or -1
};

Tokens SortTokens(const Lora& call, int64_t begin, int64_t end) {
  std::vector<int64_t> counts(static_cast<size_t>(call.num_adapters), 0);
  const auto is_adapter = [&](int64_t t) {
    return call.adapters[t] >= 0 && call.adapters[t] < call.num_adapters;
  };
  for (int64_t t = begin; t < end; ++t) {
    if (is_adapter(t)) ++counts[static_cast<size_t>(call.adapters[t])];
  }
  Tokens tokens;
  std::vector<int64_t> next(counts.size());
  int64_t rows = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] == 0) continue;
    tokens.groups.push_back({static_cast<int64_t>(e), rows, counts[e]});
    next[e] = rows;
    rows += PadLinearRows(counts[e]);
  }
  tokens.token_of.assign(static_cast<size_t>(rows), -1);
  for (int64_t t = begin; t < end; ++t) {
    if (!is_adapter(t)) continue;
    tokens.token_of[static_cast<size_t>(next[static_cast<size_t>(call.adapters[t])]++)] = t;
  }
  return tokens;
}

// out[token, first_column + n] += sums, of which a tile has `most` rows at most, rounded once.
template <typename T>
void AddSums(const float* sums, const int64_t* token_of, int64_t num_rows, int64_t most,
             int64_t count, int64_t first_column, int64_t num_columns, T* out) {
  const int64_t padded = RoundUp(count, kLinearColumns);
  for (int64_t begin = 0; begin < num_rows;) {
    const int tile = LinearTileRows(num_rows, begin, most);
    const float* const from = sums + begin * padded;
    for (int r = 0; r < tile && begin + r < num_rows; ++r) {
      T* const to = out + token_of[begin + r] * num_columns + first_column;
      for (int64_t n = 0; n < count; ++n) FromFloat(ToFloat(to[n]) + from[n * tile + r], to + n);
    }
    begin += tile;
  }
}

void AddSums(const float* sums, const int64_t* token_of, int64_t num_rows, int64_t most,
             int64_t count, int64_t first_column, int64_t num_columns, Dtype dtype, char* out) {
  const auto add = [&](auto* to) {
    AddSums(sums, token_of, num_rows, most, count, first_column, num_columns, to);
  };
  switch (dtype) {
    case Dtype::kBFloat16:
      return add(reinterpret_cast<BFloat16*>(out));
    case Dtype::kFloat16:
      return add(reinterpret_cast<Float16*>(out));
    case Dtype::kFloat32:
      return add(reinterpret_cast<float*>(out));
    default:  // 8-bit: not a dtype of outputs
      return;
  }
}

// Some columns of one part that a worker takes at once.
struct Block {
  int64_t part;
  int64_t begin;
  int64_t count;
};

void RunTurn(ffi::ThreadPool& pool, const Lora& call, int64_t first_token, int64_t end_token) {
  LinearKernels kernels = ChosenLinearKernels().Of(call.dtype, call.dtype);
  // To put x in order costs more than a rank's few outputs bring.
  if (kernels.many > 0) kernels.many = std::numeric_limits<int64_t>::max();
  const Tokens tokens = SortTokens(call, first_token, end_token);
  const int64_t num_rows = static_cast<int64_t>(tokens.token_of.size());
  const int64_t num_groups = static_cast<int64_t>(tokens.groups.size());
  if (num_groups == 0) return;
  const int64_t bytes = ByteWidth(call.dtype);
  const int64_t num_parts = static_cast<int64_t>(call.part_ends.size());
  const int64_t inner = num_parts * call.rank;
  const int64_t weight_bytes = (inner * call.depth + call.num_columns * call.rank) * bytes;
  const int64_t workers =
      num_groups * weight_bytes < kSerialWeightBytes ? 1 : Clamp(pool.num_threads(), 1, 1024);
  int64_t most_rows = 0;
  for (const Group& group : tokens.groups) {
    most_rows = std::max(most_rows, PadLinearRows(group.num_rows));
  }
  const int64_t x_stride = kernels.stride(call.depth), h_stride = kernels.stride(call.rank);
  const int64_t a_block = LinearBlockColumns(call.depth * bytes);
  const int64_t b_block = LinearBlockColumns(call.rank * bytes);
  const int64_t sums_floats = most_rows * RoundUp(std::max(a_block, b_block), kLinearColumns);
  const int64_t h_floats = RoundUp(num_rows * inner, kPadFloats);
  const int64_t floats =
      num_rows * (x_stride + num_parts * h_stride) + h_floats + workers * sums_floats;
  const Scratch scratch(static_cast<size_t>(floats) * sizeof(float));
  float* const x_rows = reinterpret_cast<float*>(scratch.data());  // [num_rows, x_stride]
  float* const h_rows = x_rows + num_rows * x_stride;  // [num_parts, num_rows, h_stride]
  float* const sums = h_rows + num_parts * num_rows * h_stride;
  char* const h = reinterpret_cast<char*>(sums + workers * sums_floats);  // [num_rows, inner]

  const auto most = [&](const Group& group) {
    return kernels.Most(/*is_packed=*/false, group.num_rows);
  };

  const auto by_rows = [&](const auto& one) {
    ParallelFor(pool, CeilDiv(num_rows, kRowsPerItem), workers, [&](int64_t item, int64_t) {
      const int64_t end = Clamp((item + 1) * kRowsPerItem, 0, num_rows);
      for (int64_t row = item * kRowsPerItem; row < end; ++row) {
        one(row, tokens.token_of[static_cast<size_t>(row)]);
      }
    });
  };
  by_rows([&](int64_t row, int64_t token) {
    const char* const source = token < 0 ? nullptr : call.x + token * call.depth * bytes;
    kernels.load_rows(source, 0, 1, source ? 1 : 0, call.depth, x_rows + row * x_stride, x_stride);
  });

  const int64_t a_blocks = CeilDiv(inner, a_block);
  ParallelFor(pool, num_groups * a_blocks, workers, [&](int64_t item, int64_t worker) {
    const Group& group = tokens.groups[static_cast<size_t>(item / a_blocks)];
    const int64_t begin = item % a_blocks * a_block;
    const int64_t count = Clamp(inner - begin, 0, a_block);
    float* const mine = sums + worker * sums_floats;
    const char* const w = call.a + (group.adapter * inner + begin) * call.depth * bytes;
    kernels.Sums(/*is_packed=*/false, x_rows + group.first_row * x_stride, x_stride, group.num_rows,
                 w, call.depth, count, /*next=*/nullptr, /*blocks=*/{},
                 /*panel=*/nullptr, mine);
    kernels.store(mine, group.num_rows, most(group), count, inner, call.dtype,
                  h + (group.first_row * inner + begin) * bytes);
  });

  by_rows([&](int64_t row, int64_t token) {
    for (int64_t part = 0; part < num_parts; ++part) {
      const char* const source = token < 0 ? nullptr : h + (row * inner + part * call.rank) * bytes;
      float* const to = h_rows + (part * num_rows + row) * h_stride;
      kernels.load_rows(source, 0, 1, source ? 1 : 0, call.rank, to, h_stride);
    }
  });

  std::vector<Block> blocks;
  int64_t first = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t end = call.part_ends[static_cast<size_t>(part)];
    for (; first < end; first += b_block) {
      blocks.push_back({part, first, Clamp(end - first, 0, b_block)});
    }
    first = end;
  }
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());
  ParallelFor(pool, num_groups * num_blocks, workers, [&](int64_t item, int64_t worker) {
    const Group& group = tokens.groups[static_cast<size_t>(item / num_blocks)];
    const Block& block = blocks[static_cast<size_t>(item % num_blocks)];
    float* const mine = sums + worker * sums_floats;
    const int64_t row_of_b = group.adapter * call.num_columns + block.begin;
    kernels.Sums(/*is_packed=*/false, h_rows + (block.part * num_rows + group.first_row) * h_stride,
                 h_stride, group.num_rows, call.b + row_of_b * call.rank * bytes, call.rank,
                 block.count, /*next=*/nullptr, /*blocks=*/{}, /*panel=*/nullptr, mine);
    AddSums(mine, tokens.token_of.data() + group.first_row, group.num_rows, most(group),
            block.count, block.begin, call.num_columns, call.dtype, call.out);
  });
}

ffi::Error RunLora(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer a, ffi::AnyBuffer b,
                   ffi::Buffer<ffi::S32> adapters, ffi::AnyBuffer base,
                   ffi::Span<const int64_t> part_sizes, ffi::Result<ffi::AnyBuffer> out) {
  std::string error;
  const auto failed = [&](std::string text) {
    error = std::move(text);
    return !error.empty();
  };
  Lora call;
  if (failed(ReadDtype(kOp, "x", TypeOf(x), &call.dtype)) ||
      failed(CheckRank(kOp, "x", Shape(x), 2)) || failed(CheckRank(kOp, "b", Shape(b), 3))) {
    return ffi::Error::InvalidArgument(error);
  }
  const std::pair<const char*, ArrayType> types[] = {
      {"a", TypeOf(a)}, {"b", TypeOf(b)}, {"base", TypeOf(base)}, {"out", TypeOf(*out)}};
  for (const auto& [name, type] : types) {
    if (failed(CheckType(kOp, name, type, TypeOf(x)))) return ffi::Error::InvalidArgument(error);
  }
  call.num_tokens = Shape(x)[0], call.depth = Shape(x)[1];
  call.num_adapters = Shape(b)[0], call.num_columns = Shape(b)[1], call.rank = Shape(b)[2];
  int64_t end = 0;
  for (const int64_t size : part_sizes) {
    if (size < 1 || size > call.num_columns - end) {
      return ffi::Error::InvalidArgument(Mismatch(
          kOp, "part_sizes", "sizes that add up to " + std::to_string(call.num_columns), "others"));
    }
    call.part_ends.push_back(end += size);
  }
  const int64_t inner = static_cast<int64_t>(call.part_ends.size()) * call.rank;
  if (end != call.num_columns) {
    return ffi::Error::InvalidArgument(Mismatch(
        kOp, "part_sizes", "a sum of " + std::to_string(call.num_columns), std::to_string(end)));
  }
  if (failed(CheckShape(kOp, "a", Shape(a), {call.num_adapters, inner, call.depth})) ||
      failed(CheckShape(kOp, "adapters", Shape(adapters), {call.num_tokens})) ||
      failed(CheckShape(kOp, "base", Shape(base), {call.num_tokens, call.num_columns})) ||
      failed(CheckShape(kOp, "out", Shape(*out), {call.num_tokens, call.num_columns}))) {
    return ffi::Error::InvalidArgument(error);
  }
  if (call.depth % 8 != 0 || call.depth < 8 || call.rank % 8 != 0 || call.rank < 8) {
    return ffi::Error::InvalidArgument(
        Mismatch(kOp, "a", "columns and a rank that are positive multiples of 8",
                 std::to_string(call.depth) + " and " + std::to_string(call.rank)));
  }
  call.x = static_cast<const char*>(x.untyped_data());
  call.a = static_cast<const char*>(a.untyped_data());
  call.b = static_cast<const char*>(b.untyped_data());
  call.adapters = adapters.typed_data();
  call.out = static_cast<char*>(out->untyped_data());
  CopyUnlessAliased(base, *out);
  try {
    for (int64_t token = 0; token < call.num_tokens; token += kMaxTokens) {
      RunTurn(pool, call, token, Clamp(token + kMaxTokens, 0, call.num_tokens));
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kOp) + ": out of memory");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LoraHandler, RunLora,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::AnyBuffer>()         // a
                                  .Arg<ffi::AnyBuffer>()         // b
                                  .Arg<ffi::Buffer<ffi::S32>>()  // adapters
                                  .Arg<ffi::AnyBuffer>()         // base
                                  .Attr<ffi::Span<const int64_t>>("part_sizes")
                                  .Ret<ffi::AnyBuffer>());  // out

}  // namespace jax_paged::cpu
