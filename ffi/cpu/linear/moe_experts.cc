// SPDX-License-Identifier: Apache-2.0

// The handlers of jax_paged.moe_experts.v1 and, of 4-bit experts, jax_paged.moe_experts_int4.v1 on
// CPU: out[t] = sum over j of weights[t, j] times the gated MLP of expert experts[t, j] on x[t].
//
//   pair    (token, chosen expert); pairs are sorted by expert, then by token, so an expert's rows
//           of x lie together and each of its weights is read once for all of them. Experts that
//           no token chose are never touched
//   group   the pairs of one expert, padded to whole tiles of rows (linear/kernel.h, linear/many.h)
// Steps, each shared by all workers: gather x; gate and up -> activation(gate) * up; down; then
// each token adds its experts in the order of j. Bits depend on nothing but the inputs.
//
// A call of many tokens runs in turns of at most kMaxPairs pairs, which bounds its memory.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "common/ffi_checks.h"
#include "common/integers.h"
#include "common/moe_checks.h"
#include "cpu/handlers.h"
#include "cpu/linear/int4_checks.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/packed_checks.h"
#include "cpu/parallel_for.h"
#include "cpu/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_paged::cpu {
namespace {

constexpr int64_t kMaxPairs = 4096;
constexpr int64_t kRowsPerItem = 16;  // that are gathered or added by one worker
constexpr int64_t kSerialRows = 32;   // up to which a second thread is not worth its start

struct Group {
  int32_t expert;
  int64_t first_row;  // of its pairs, among the padded rows
  int64_t num_rows;
};

// The pairs of one turn, sorted.
struct Pairs {
  std::vector<Group> groups;
  std::vector<int64_t> token_of;  // by padded row: token of the turn, or -1
  std::vector<int64_t> row_of;    // by pair in token order: its padded row, or -1 (no such expert)
};

// `padded`: rows of memory that the rows of a group take.
template <typename Padded>
Pairs SortPairs(const MoeParams& call, int64_t first_token, int64_t num_tokens,
                const Padded& padded) {
  const int64_t k = call.experts_per_token;
  const int32_t* const experts = call.experts + first_token * k;
  std::vector<int64_t> counts(static_cast<size_t>(call.num_experts), 0);
  const auto is_expert = [&](int32_t id) { return id >= 0 && id < call.num_experts; };
  for (int64_t i = 0; i < num_tokens * k; ++i) {
    if (is_expert(experts[i])) ++counts[static_cast<size_t>(experts[i])];
  }
  Pairs pairs;
  std::vector<int64_t> next(counts.size());
  int64_t rows = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] == 0) continue;
    pairs.groups.push_back({static_cast<int32_t>(e), rows, counts[e]});
    next[e] = rows;
    rows += padded(counts[e]);
  }
  pairs.token_of.assign(static_cast<size_t>(rows), -1);
  pairs.row_of.assign(static_cast<size_t>(num_tokens * k), -1);
  for (int64_t i = 0; i < num_tokens * k; ++i) {
    if (!is_expert(experts[i])) continue;
    const int64_t row = next[static_cast<size_t>(experts[i])]++;
    pairs.token_of[static_cast<size_t>(row)] = i / k;
    pairs.row_of[static_cast<size_t>(i)] = row;
  }
  return pairs;
}

// What the columns of all groups are cut into: a block of one of them is an item.
class Items {
 public:
  // matrix_rows: of the matrix of an expert, of whose first `columns` rows items are made.
  Items(const std::vector<Group>& groups, int64_t matrix_rows, int64_t columns, int64_t block)
      : groups_(groups),
        matrix_rows_(matrix_rows),
        columns_(columns),
        block_(block),
        of_group_(CeilDiv(columns, block)) {}
  int64_t size() const { return static_cast<int64_t>(groups_.size()) * of_group_; }
  const Group& group(int64_t item) const { return groups_[static_cast<size_t>(item / of_group_)]; }

  // The columns of an item.
  int64_t Begin(int64_t item) const { return item % of_group_ * block_; }
  int64_t Count(int64_t item) const { return Clamp(columns_ - Begin(item), 0, block_); }
  // The row of all matrices that it begins with; of no item -1.
  int64_t FirstRow(int64_t item) const {
    return item < 0 ? -1 : group(item).expert * matrix_rows_ + Begin(item);
  }

 private:
  const std::vector<Group>& groups_;
  int64_t matrix_rows_, columns_, block_;
  int64_t of_group_;  // items
};

// Rows of x, or of what gate and up made of them, as the kernels want them.
struct Rows {
  float* data;
  int64_t stride;
  float* sums;  // of the groups of 4-bit weights with offsets; null: none

  Rows From(int64_t row, int64_t num_groups) const {
    return {data + row * stride, stride, sums ? sums + row * num_groups : nullptr};
  }
};

// One matrix of each expert: plain, packed (linear/packed.h), or in 4 bits (linear/int4.h), each
// with the products of a group's rows in the order of its kernels.
struct Matrix {
  const LinearKernels* kernels;
  const Int4Kernels* int4;  // null: not in 4 bits
  bool is_packed;           // or in 4 bits
  const char* data;         // but of 4 bits
  int64_t row_bytes;
  Int4Panel codes;
  int64_t depth;

  // Rows in a tile of sums, at most.
  int64_t Most(int64_t num_rows) const { return int4 ? 1 : kernels->Most(is_packed, num_rows); }
  // Whether it has kernels that bring the next block in.
  bool ByRows(int64_t num_rows) const { return !int4 && kernels->ByRows(is_packed, num_rows); }
  bool Orders(int64_t num_rows) const { return !int4 && kernels->Orders(is_packed, num_rows); }
  int64_t PaddedRows(int64_t num_rows) const {
    return int4 ? PadLinearRows(num_rows) : kernels->PaddedRows(is_packed, num_rows);
  }
  int64_t num_groups() const { return int4 ? int4->GroupSums(codes) : 0; }
  int64_t stride() const { return kernels->stride(depth); }

  // Floats in which `columns` of it are staged.
  int64_t PanelFloats(Dtype w_dtype, int64_t most_rows, int64_t columns) const {
    if (int4) return int4->PanelFloats(most_rows, depth) * columns / kPanelOutputs;
    return kernels->PanelFloats(is_packed, w_dtype, most_rows, depth, columns);
  }

  // Columns that one worker takes at once, of a group of `most_rows` rows at most.
  // `blocks`: that a group should have, or a multiple.
  // There are `groups` of them, which take `parts` matrices of so many columns each.
  int64_t BlockColumns(Dtype w_dtype, int64_t most_rows, int64_t columns, int64_t blocks,
                       int64_t parts, int64_t groups) const {
    if (int4) {
      const int64_t most = LinearBlockColumns(parts * depth / 2);
      const int64_t panel_floats = int4->PanelFloats(most_rows, depth);
      if (panel_floats == 0) return most;
      return Clamp(Int4Kernels::PanelsInL2(panel_floats) * kPanelOutputs, kPanelOutputs, most);
    }
    return kernels->BlockColumns(is_packed, w_dtype, most_rows, columns, depth, blocks, parts,
                                 groups);
  }

  // Loads one row; null: zeros.
  void Load(const char* source, const Rows& to) const {
    if (!int4) {
      kernels->load_rows(source, 0, 1, source ? 1 : 0, depth, to.data, to.stride);
    } else if (source) {
      int4->load_rows(source, 0, 1, depth, codes.group, to.data, to.stride, to.sums);
    } else {
      std::memset(to.data, 0, static_cast<size_t>(to.stride) * sizeof(float));
      if (to.sums) std::memset(to.sums, 0, static_cast<size_t>(num_groups()) * sizeof(float));
    }
  }

  // The products with `count` rows of all experts' matrices from number `first` on. `next`: the
  // number of the row from which on the caller will ask next, or -1.
  void Run(const Rows& x, int64_t num_rows, int64_t first, int64_t count, int64_t next,
           const LinearBlocks& blocks, float* panel, float* sums) const {
    if (int4) {
      int4->sums({x.data, x.stride, x.sums}, num_rows, codes.Behind(first / kPanelOutputs),
                 count / kPanelOutputs, panel, sums, /*sums_stride=*/count);
    } else {
      kernels->Sums(is_packed, x.data, x.stride, num_rows, data + first * row_bytes, depth, count,
                    next < 0 ? nullptr : data + next * row_bytes, blocks, panel, sums);
    }
  }
};

// Loads the rows of all groups, each where the padded rows of `pairs` say, in the order that the
// kernels want. source(row): of a padded row; null: zeros. Each worker has own_floats at `own`, so
// many as kRowsOfOrder rows take.
template <typename Source>
void LoadGroups(ffi::ThreadPool& pool, int64_t workers, const Pairs& pairs, const Matrix& matrix,
                bool has_blocks, const Source& source, const Rows& to, float* own,
                int64_t own_floats) {
  struct Part {
    const Group* group;
    int64_t begin, end;  // of its rows
    bool orders;
  };
  std::vector<Part> parts;
  for (const Group& group : pairs.groups) {
    const bool orders = matrix.Orders(group.num_rows);
    const int64_t rows = orders ? group.num_rows : PadLinearRows(group.num_rows);
    const int64_t step = orders ? matrix.kernels->tile_rows : kRowsPerItem;
    for (int64_t begin = 0; begin < rows; begin += step) {
      parts.push_back({&group, begin, std::min(begin + step, rows), orders});
    }
  }
  const int64_t num_groups = matrix.num_groups();
  if (static_cast<int64_t>(pairs.token_of.size()) <= kSerialRows) workers = 1;
  ParallelFor(pool, static_cast<int64_t>(parts.size()), workers, [&](int64_t item, int64_t worker) {
    const Part& part = parts[static_cast<size_t>(item)];
    const int64_t first = part.group->first_row;
    float* const mine = own + worker * own_floats;
    for (int64_t i = part.begin; i < part.end; ++i) {
      const Rows row = part.orders ? Rows{mine + (i - part.begin) * to.stride, to.stride, nullptr}
                                   : to.From(first + i, num_groups);
      matrix.Load(source(first + i), row);
    }
    if (!part.orders) return;
    const int64_t tile = part.begin / matrix.kernels->tile_rows;
    matrix.kernels->order_rows(mine, to.stride, part.end - part.begin, matrix.depth, has_blocks,
                               to.data + (first + tile * kRowsOfOrder) * to.stride);
  });
}

void RunTurn(ffi::ThreadPool& pool, const MoeParams& call, const Matrix& gate_up,
             const Matrix& down, int64_t first_token, int64_t num_tokens) {
  const LinearKernels& kernels = ChosenLinearKernels().Of(call.dtype, call.w_dtype);
  const auto padded_rows = [&](int64_t rows) {
    return std::max(gate_up.PaddedRows(rows), down.PaddedRows(rows));
  };
  const Pairs pairs = SortPairs(call, first_token, num_tokens, padded_rows);
  const int64_t num_rows = static_cast<int64_t>(pairs.token_of.size());
  const int64_t num_groups = static_cast<int64_t>(pairs.groups.size());
  const int64_t bytes = ByteWidth(call.dtype);
  const int64_t workers = Clamp(pool.num_threads(), 1, 1024);
  const int64_t x_stride = gate_up.stride(), h_stride = down.stride();
  const int64_t x_groups = gate_up.num_groups(), h_groups = down.num_groups();
  int64_t most_rows = 0;
  for (const Group& group : pairs.groups) {
    const int64_t padded = PadLinearRows(group.num_rows);
    if (padded > most_rows) most_rows = padded;
  }
  const int64_t blocks_of_group = CeilDiv(2 * workers, Clamp(num_groups, 1, workers * 2));
  const int64_t gate_block = gate_up.BlockColumns(call.w_dtype, most_rows, call.inner,
                                                  blocks_of_group, /*parts=*/2, num_groups);
  const int64_t down_block = down.BlockColumns(call.w_dtype, most_rows, call.hidden,
                                               blocks_of_group, /*parts=*/1, num_groups);
  const int64_t gate_floats = most_rows * RoundUp(gate_block, kLinearColumns);
  const int64_t down_floats = most_rows * RoundUp(down_block, kLinearColumns);
  const int64_t panel_floats = std::max(gate_up.PanelFloats(call.w_dtype, most_rows, gate_block),
                                        down.PanelFloats(call.w_dtype, most_rows, down_block));
  // For gate, up and down; or for the sum of one token. Then the panel of the worker.
  // Or for a tile of rows on its way into order.
  const int64_t order_floats = gate_up.Orders(most_rows) || down.Orders(most_rows)
                                   ? kRowsOfOrder * std::max(x_stride, h_stride)
                                   : 0;
  const int64_t own_floats =
      RoundUp(std::max({2 * gate_floats + down_floats, call.hidden, order_floats}), kPadFloats);
  const int64_t sums_floats = own_floats + panel_floats;

  const int64_t x_sums_floats = RoundUp(num_rows * x_groups, kPadFloats);
  const int64_t h_sums_floats = RoundUp(num_rows * h_groups, kPadFloats);
  const int64_t floats = num_rows * (x_stride + 2 * h_stride + call.hidden) + x_sums_floats +
                         h_sums_floats + workers * sums_floats;
  const Scratch scratch(static_cast<size_t>(floats) * sizeof(float));
  float* const x_rows = reinterpret_cast<float*>(scratch.data());  // [num_rows, x_stride]
  float* const h_rows = x_rows + num_rows * x_stride;              // [num_rows, h_stride]
  float* const h = h_rows + num_rows * h_stride;  // [num_rows, inner] in the dtype of the call
  float* const y = h + num_rows * h_stride;       // [num_rows, hidden]
  float* const x_sums = y + num_rows * call.hidden;
  float* const h_sums = x_sums + x_sums_floats;
  float* const sums = h_sums + h_sums_floats;
  const Rows x_of_all = {x_rows, x_stride, x_groups ? x_sums : nullptr};
  const Rows h_of_all = {h_rows, h_stride, h_groups ? h_sums : nullptr};

  const auto token_source = [&](int64_t row) -> const char* {
    const int64_t token = pairs.token_of[static_cast<size_t>(row)];
    return token < 0 ? nullptr : call.x + (first_token + token) * call.hidden * bytes;
  };
  LoadGroups(pool, workers, pairs, gate_up, call.gate_up_block_scale != nullptr, token_source,
             x_of_all, sums, sums_floats);

  const float limit = call.limit ? *call.limit : 0.0f;
  const Items gate_items(pairs.groups, 2 * call.inner, call.inner, gate_block);
  ParallelFor(pool, gate_items.size(), workers, [&](int64_t item, int64_t worker, int64_t next) {
    const Group& group = gate_items.group(item);
    float* const gate = sums + worker * sums_floats;
    float* const up = gate + gate_floats;
    float* const panel = gate + own_floats;
    const Rows x = x_of_all.From(group.first_row, x_groups);
    const int64_t most = gate_up.Most(group.num_rows);
    const int64_t rows = most == 1 ? group.num_rows : PadLinearRows(group.num_rows);
    const int64_t begin = gate_items.Begin(item), count = gate_items.Count(item);
    const int64_t first = gate_items.FirstRow(item);  // of gate; that of up is `inner` behind
    const auto blocks = [&](int64_t is_up) {
      return LinearBlocksOf(call.gate_up_block_scale, 2 * group.expert + is_up, call.inner,
                            call.hidden, begin);
    };
    gate_up.Run(x, group.num_rows, first, count, first + call.inner, blocks(0), panel, gate);
    gate_up.Run(x, group.num_rows, first + call.inner, count, gate_items.FirstRow(next), blocks(1),
                panel, up);
    if (call.gate_up_scale) {
      const float* const scale = call.gate_up_scale + first;
      ScaleLinearSums(scale, group.num_rows, most, count, gate);
      ScaleLinearSums(scale + call.inner, group.num_rows, most, count, up);
    }
    if (call.gate_up_bias.data) {
      const MoeBias& bias = call.gate_up_bias;
      const char* const from = bias.data + first * ByteWidth(bias.dtype);
      AddLinearBias(from, bias.dtype, group.num_rows, most, count, gate);
      AddLinearBias(from + call.inner * ByteWidth(bias.dtype), bias.dtype, group.num_rows, most,
                    count, up);
    }
    kernels.gate(call.activation, limit, up, rows * RoundUp(count, kLinearColumns), gate);
    kernels.store(gate, group.num_rows, most, count, call.inner, call.dtype,
                  reinterpret_cast<char*>(h) + (group.first_row * call.inner + begin) * bytes);
  });

  const auto gated_source = [&](int64_t row) -> const char* {
    const bool is_pair = pairs.token_of[static_cast<size_t>(row)] >= 0;
    return is_pair ? reinterpret_cast<const char*>(h) + row * call.inner * bytes : nullptr;
  };
  LoadGroups(pool, workers, pairs, down, call.down_block_scale != nullptr, gated_source, h_of_all,
             sums, sums_floats);

  const Items down_items(pairs.groups, call.hidden, call.hidden, down_block);
  ParallelFor(pool, down_items.size(), workers, [&](int64_t item, int64_t worker, int64_t next) {
    const Group& group = down_items.group(item);
    float* const mine = sums + worker * sums_floats + 2 * gate_floats;
    float* const panel = sums + worker * sums_floats + own_floats;
    const Rows x = h_of_all.From(group.first_row, h_groups);
    const int64_t most = down.Most(group.num_rows);
    const int64_t begin = down_items.Begin(item), count = down_items.Count(item);
    const int64_t first = down_items.FirstRow(item);
    const LinearBlocks blocks =
        LinearBlocksOf(call.down_block_scale, group.expert, call.hidden, call.inner, begin);
    down.Run(x, group.num_rows, first, count, down_items.FirstRow(next), blocks, panel, mine);
    if (call.down_scale) {
      ScaleLinearSums(call.down_scale + first, group.num_rows, most, count, mine);
    }
    if (call.down_bias.data) {
      const MoeBias& bias = call.down_bias;
      AddLinearBias(bias.data + first * ByteWidth(bias.dtype), bias.dtype, group.num_rows, most,
                    count, mine);
    }
    kernels.store(mine, group.num_rows, most, count, call.hidden, Dtype::kFloat32,
                  y + group.first_row * call.hidden + begin);
  });

  ParallelFor(pool, CeilDiv(num_tokens, kRowsPerItem), workers, [&](int64_t item, int64_t worker) {
    float* const sum = sums + worker * sums_floats;
    const int64_t end = Clamp((item + 1) * kRowsPerItem, 0, num_tokens);
    for (int64_t token = item * kRowsPerItem; token < end; ++token) {
      std::memset(sum, 0, static_cast<size_t>(call.hidden) * sizeof(float));
      for (int64_t j = 0; j < call.experts_per_token; ++j) {
        const int64_t pair = token * call.experts_per_token + j;
        const int64_t row = pairs.row_of[static_cast<size_t>(pair)];
        if (row < 0) continue;
        const float weight = call.weights[first_token * call.experts_per_token + pair];
        const float* const from = y + row * call.hidden;
        for (int64_t d = 0; d < call.hidden; ++d) sum[d] += weight * from[d];
      }
      const int64_t element = (first_token + token) * call.hidden;
      kernels.store(sum, 1, /*most=*/1, call.hidden, call.hidden, call.out_dtype,
                    call.out + element * ByteWidth(call.out_dtype));
    }
  });
}

// Experts with the shape that they have unpacked: of panels whose elements each are `depth` of it.
class UnpackedShape {
 public:
  explicit UnpackedShape(const Array& array, int64_t depth = 1) : array_(array) {
    if (array.shape.rank != 4) return;
    const ShapeView& shape = array.shape;
    dims_[0] = shape[0];
    dims_[1] = shape[1] * kPanelOutputs;
    dims_[2] = shape[2] * shape[3] / kPanelOutputs * depth;
  }
  // With `type` in place of the array's own.
  Array array(ArrayType type) const {
    Array array = array_;
    array.type = type;
    if (array.shape.rank == 4) array.shape = {dims_, 3};
    return array;
  }

 private:
  Array array_;
  int64_t dims_[3] = {};
};

ffi::Error Run(ffi::ThreadPool& pool, const MoeParams& call, const Matrix& gate_up,
               const Matrix& down) {
  const int64_t turn = Clamp(kMaxPairs / Clamp(call.experts_per_token, 1, kMaxPairs), 1, kMaxPairs);
  try {
    for (int64_t token = 0; token < call.num_tokens; token += turn) {
      RunTurn(pool, call, gate_up, down, token, Clamp(call.num_tokens - token, 0, turn));
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kMoeOp) + ": out of memory");
  }
  return ffi::Error::Success();
}

ffi::Error MoeExperts(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer gate_up,
                      ffi::AnyBuffer down, ffi::Buffer<ffi::S32> experts,
                      ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::F32> gate_up_scale,
                      ffi::Buffer<ffi::F32> down_scale, ffi::AnyBuffer gate_up_bias,
                      ffi::AnyBuffer down_bias, ffi::Buffer<ffi::F32> limit,
                      ffi::Result<ffi::AnyBuffer> out, std::string_view activation) {
  MoeParams call = {};
  const bool packs_gate_up = Shape(gate_up).rank == 4, packs_down = Shape(down).rank == 4;
  const UnpackedShape gate_up_shape(ArrayOf(gate_up)), down_shape(ArrayOf(down));
  std::string error =
      ReadMoe({ArrayOf(x), gate_up_shape.array(TypeOf(gate_up)), down_shape.array(TypeOf(down)),
               ArrayOf(experts), ArrayOf(weights), ArrayOf(gate_up_scale), ArrayOf(down_scale),
               ArrayOf(gate_up_bias), ArrayOf(down_bias), ArrayOf(limit), ArrayOf(*out)},
              activation, &call);
  const auto check = [&](const char* argument, const ShapeView& shape, int64_t depth) {
    error = CheckPacked(kMoeOp, argument, call.dtype, call.w_dtype, shape, /*leading=*/1, depth);
  };
  if (error.empty() && packs_gate_up) check("gate_up", Shape(gate_up), call.hidden);
  if (error.empty() && packs_down) check("down", Shape(down), call.inner);
  if (error.empty() && packs_gate_up && call.inner % kPanelOutputs != 0) {
    error = Mismatch(kMoeOp, "gate_up", "an inner size that is a multiple of 16 where it is packed",
                     std::to_string(call.inner));
  }
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  const LinearKernels* const kernels = &ChosenLinearKernels().Of(call.dtype, call.w_dtype);
  const int64_t bytes = ByteWidth(call.w_dtype);
  return Run(
      pool, call,
      {kernels,
       /*int4=*/nullptr,
       packs_gate_up,
       call.gate_up,
       call.hidden * bytes,
       {},
       call.hidden},
      {kernels, /*int4=*/nullptr, packs_down, call.down, call.inner * bytes, {}, call.inner});
}

ffi::Error MoeExpertsInt4(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U32> gate_up,
                          ffi::Buffer<ffi::U32> down, ffi::Buffer<ffi::S32> experts,
                          ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer gate_up_scale,
                          ffi::AnyBuffer down_scale, ffi::AnyBuffer gate_up_bias,
                          ffi::AnyBuffer down_bias, ffi::Buffer<ffi::F32> limit,
                          ffi::Result<ffi::AnyBuffer> out, std::string_view activation) {
  MoeParams call = {};
  constexpr int64_t kOfWord = 8;
  const UnpackedShape gate_up_shape(ArrayOf(gate_up), kOfWord), down_shape(ArrayOf(down), kOfWord);
  constexpr int64_t kNone[] = {0};
  const Array no_scale = {nullptr, TypeOf<float>(), {kNone, 1}, /*is_given=*/true};
  Int4Panel gate_up_codes, down_codes;
  std::string error = ReadInt4(kMoeOp, "gate_up", ArrayOf(gate_up), "gate_up_scale",
                               ArrayOf(gate_up_scale), /*leading=*/1, &gate_up_codes);
  if (error.empty()) {
    error = ReadInt4(kMoeOp, "down", ArrayOf(down), "down_scale", ArrayOf(down_scale),
                     /*leading=*/1, &down_codes);
  }
  if (error.empty()) {
    error = ReadMoe({ArrayOf(x), gate_up_shape.array(TypeOf(x)), down_shape.array(TypeOf(x)),
                     ArrayOf(experts), ArrayOf(weights), no_scale, no_scale, ArrayOf(gate_up_bias),
                     ArrayOf(down_bias), ArrayOf(limit), ArrayOf(*out)},
                    activation, &call);
  }
  if (error.empty() && call.inner % kPanelOutputs != 0) {
    error = Mismatch(kMoeOp, "gate_up", "an inner size that is a multiple of 16",
                     std::to_string(call.inner));
  }
  if (!error.empty()) return ffi::Error::InvalidArgument(error);
  const LinearKernelTable& all = ChosenLinearKernels();
  const LinearKernels* const kernels = &all.Of(call.dtype, call.dtype);
  const Int4Kernels* const int4 = &all.int4[static_cast<int>(call.dtype)];
  return Run(pool, call,
             {kernels, int4, /*is_packed=*/true, nullptr, 0, gate_up_codes, call.hidden},
             {kernels, int4, /*is_packed=*/true, nullptr, 0, down_codes, call.inner});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeExpertsHandler, MoeExperts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::AnyBuffer>()         // gate_up
                                  .Arg<ffi::AnyBuffer>()         // down
                                  .Arg<ffi::Buffer<ffi::S32>>()  // experts
                                  .Arg<ffi::Buffer<ffi::F32>>()  // weights
                                  .Arg<ffi::Buffer<ffi::F32>>()  // gate_up_scale, [0] = none
                                  .Arg<ffi::Buffer<ffi::F32>>()  // down_scale, [0] = none
                                  .Arg<ffi::AnyBuffer>()         // gate_up_bias, [0] = none
                                  .Arg<ffi::AnyBuffer>()         // down_bias, [0] = none
                                  .Arg<ffi::Buffer<ffi::F32>>()  // limit, [0] = none
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<std::string_view>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeExpertsInt4Handler, MoeExpertsInt4,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::U32>>()  // codes of gate_up
                                  .Arg<ffi::Buffer<ffi::U32>>()  // codes of down
                                  .Arg<ffi::Buffer<ffi::S32>>()  // experts
                                  .Arg<ffi::Buffer<ffi::F32>>()  // weights
                                  .Arg<ffi::AnyBuffer>()         // scales of gate_up
                                  .Arg<ffi::AnyBuffer>()         // scales of down
                                  .Arg<ffi::AnyBuffer>()         // gate_up_bias, [0] = none
                                  .Arg<ffi::AnyBuffer>()         // down_bias, [0] = none
                                  .Arg<ffi::Buffer<ffi::F32>>()  // limit, [0] = none
                                  .Ret<ffi::AnyBuffer>()         // out
                                  .Attr<std::string_view>("activation"));

}  // namespace jax_paged::cpu
