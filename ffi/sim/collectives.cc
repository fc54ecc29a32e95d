// SPDX-License-Identifier: Apache-2.0

// Instructions of all lanes together: shuffles, votes, matrices, the warp's barrier.
//
// Fragments are laid out as the PTX ISA draws them: lane l belongs to group l / 4 and is number
// l % 4 of it.

#include <cmath>
#include <cstring>

#include "common/dtypes.h"
#include "emu/state.h"
#include "sim/rules.h"
#include "sim/warp.h"

namespace jax_paged::sim {
namespace {

enum class Shuffle { kUp, kDown, kButterfly, kIndex };

// in: value, lane or distance, segments and clamp, member mask; out: value, whether there was one.
template <Shuffle MODE>
void ShuffleLanes(Warp& warp, const Instruction& i, uint32_t lanes) {
  for (int k = 1; k < 4; ++k) warp.Need(i.in[k], lanes, i, "an operand of shfl");
  uint32_t* const from = warp.Words<uint32_t>(i.in[0]);
  const uint32_t* const b = warp.Words<uint32_t>(i.in[1]);
  const uint32_t* const c = warp.Words<uint32_t>(i.in[2]);
  uint32_t* const out = warp.Words<uint32_t>(i.out[0]);
  uint32_t values[kLanes];
  std::memcpy(values, from, sizeof(values));
  const uint32_t known = warp.Valid(i.in[0]);
  uint32_t found = 0, valid = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const int distance = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(c[lane] & 31);
    const int segment = static_cast<int>(c[lane] >> 8 & 31);
    const int first = lane & segment, last = first | (clamp & ~segment);
    int source = 0;
    bool is_there = false;
    switch (MODE) {
      case Shuffle::kUp:
        source = lane - distance;
        is_there = source >= last;
        break;
      case Shuffle::kDown:
        source = lane + distance;
        is_there = source <= last;
        break;
      case Shuffle::kButterfly:
        source = lane ^ distance;
        is_there = source <= last;
        break;
      case Shuffle::kIndex:
        source = first | (distance & ~segment);
        is_there = source <= last;
        break;
    }
    if (!is_there) source = lane;
    if (!(lanes >> source & 1)) {
      emu::Fail(SiteOf(i), "shfl from lane " + std::to_string(source) + ", which is not here");
    }
    out[lane] = values[source];
    found |= uint32_t{is_there} << lane;
    valid |= (known >> source & 1) << lane;
  }
  warp.SetValid(i.out[0], lanes, valid);
  if (i.num_out == 1) return;
  uint32_t& predicate = warp.Predicate(i.out[1]);
  predicate = (predicate & ~lanes) | found;
  warp.SetValid(i.out[1], lanes, kAllLanes);
}

void SetAll(Warp& warp, Ref out, uint32_t lanes, uint32_t value) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lanes >> lane & 1) warp.Words<uint32_t>(out)[lane] = value;
  }
  warp.SetValid(out, lanes, kAllLanes);
}

void Ballot(Warp& warp, const Instruction& i, uint32_t lanes) {
  warp.Need(i.in[0], lanes, i, "the predicate of a vote");
  SetAll(warp, i.out[0], lanes, warp.Predicate(i.in[0]) & lanes);
}

void MatchAny(Warp& warp, const Instruction& i, uint32_t lanes) {
  warp.Need(i.in[0], lanes, i, "the operand of match");
  const uint32_t* const x = warp.Words<uint32_t>(i.in[0]);
  uint32_t same[kLanes] = {};
  for (int a = 0; a < kLanes; ++a) {
    for (int b = 0; b < kLanes; ++b) same[a] |= uint32_t{x[a] == x[b]} << b;
  }
  for (int a = 0; a < kLanes; ++a) {
    if (lanes >> a & 1) warp.Words<uint32_t>(i.out[0])[a] = same[a] & lanes;
  }
  warp.SetValid(i.out[0], lanes, kAllLanes);
}

void SyncWarp(Warp& warp, const Instruction&, uint32_t) {
  warp.shadow().sync_time = ++emu::machine.clock;
}

// Four 8 x 8 tiles of 16 bits: lane l has the address of row l % 8 of tile l / 8, and gets columns
// 2 (l % 4) and the next of row l / 4; transposed, rows 2 (l % 4) and the next of column l / 4.
template <bool TRANSPOSED>
void LoadMatrix(Warp& warp, const Instruction& i, uint32_t lanes) {
  warp.Need(i.in[0], lanes, i, "an address");
  uint16_t tiles[4][8][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    emu::machine.thread = warp.index * kLanes + lane;
    const int64_t at = int64_t{warp.Words<uint32_t>(i.in[0])[lane]} + i.number;
    std::memcpy(tiles[lane / 8][lane % 8], emu::ReadSharedByWarp(at, 16, SiteOf(i)), 16);
  }
  for (int t = 0; t < 4; ++t) {
    uint32_t* const out = warp.Words<uint32_t>(i.out[t]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int a = lane / 4, b = lane % 4 * 2;
      const uint32_t low = TRANSPOSED ? tiles[t][b][a] : tiles[t][a][b];
      const uint32_t high = TRANSPOSED ? tiles[t][b + 1][a] : tiles[t][a][b + 1];
      out[lane] = low | high << 16;
    }
    warp.SetValid(i.out[t], lanes, kAllLanes);
  }
}

// To float as tensor cores round: toward zero.
float Truncate(double x) {
  uint64_t bits = std::bit_cast<uint64_t>(x);
  if (std::isfinite(x)) bits &= ~((uint64_t{1} << 29) - 1);
  return static_cast<float>(std::bit_cast<double>(bits));
}

// d = a b + c, a 16 x 16, b 16 x 8. Products are exact, and so is the sum of 8 of them with c but
// for its last rounding, toward zero: no tensor core known rounds worse (Fasi et al. 2021,
// "Numerical behavior of NVIDIA tensor cores"), though some keep more bits between two sums.
template <typename T>
void MultiplyMatrices(Warp& warp, const Instruction& i, uint32_t lanes) {
  double a[16][16], b[16][8], c[16][8];
  const auto half = [](uint32_t word, int high) {
    return double{ToFloat(T{static_cast<uint16_t>(high ? word >> 16 : word)})};
  };
  const uint32_t* words[10];
  for (int k = 0; k < 10; ++k) words[k] = warp.Words<uint32_t>(i.in[k]);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, k = lane % 4 * 2;
    for (int high = 0; high < 2; ++high) {
      a[group][k + high] = half(words[0][lane], high);
      a[group + 8][k + high] = half(words[1][lane], high);
      a[group][k + 8 + high] = half(words[2][lane], high);
      a[group + 8][k + 8 + high] = half(words[3][lane], high);
      b[k + high][group] = half(words[4][lane], high);
      b[k + 8 + high][group] = half(words[5][lane], high);
      c[group][k + high] = std::bit_cast<float>(words[6 + high][lane]);
      c[group + 8][k + high] = std::bit_cast<float>(words[8 + high][lane]);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int first = 0; first < 16; first += 8) {
      for (int k = first; k < first + 8; ++k) {
        for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
      }
      for (int column = 0; column < 8; ++column) c[row][column] = Truncate(c[row][column]);
    }
  }
  uint32_t rows[2] = {kAllLanes, kAllLanes};  // lanes whose row of a is known, of both halves
  uint32_t columns = kAllLanes;               // lanes 4 j whose column j of b is known
  for (int k = 0; k < 4; ++k) rows[k % 2] &= warp.Valid(i.in[k]);
  for (int k = 4; k < 6; ++k) columns &= warp.Valid(i.in[k]);
  const bool all = (rows[0] & rows[1] & columns) == kAllLanes;
  for (int k = 0; k < 4; ++k) {
    uint32_t* const out = warp.Words<uint32_t>(i.out[k]);
    uint32_t valid = kAllLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = lane / 4, column = lane % 4 * 2 + k % 2;
      out[lane] = std::bit_cast<uint32_t>(static_cast<float>(c[group + k / 2 * 8][column]));
      const bool known =
          all || ((rows[k / 2] >> (4 * group) & 15) == 15 && (columns >> (4 * column) & 15) == 15);
      if (!known) valid &= ~(uint32_t{1} << lane);
    }
    warp.SetValid(i.out[k], lanes, valid & warp.Valid(i.in[6 + k]));
  }
}

}  // namespace

void AddCollectives(Rules* rules) {
  const auto add = [&](const char* opcode, Execute execute, std::vector<std::string> out,
                       std::vector<std::string> in) {
    (*rules)[opcode] = {execute, Kind::kConvergent, std::move(out), std::move(in)};
  };
  const std::vector<std::string> shuffle_in = {"b32", "b32", "b32", "b32"};
  add("shfl.sync.up.b32", ShuffleLanes<Shuffle::kUp>, {"b32", "pred"}, shuffle_in);
  add("shfl.sync.down.b32", ShuffleLanes<Shuffle::kDown>, {"b32", "pred"}, shuffle_in);
  add("shfl.sync.bfly.b32", ShuffleLanes<Shuffle::kButterfly>, {"b32", "pred"}, shuffle_in);
  add("shfl.sync.idx.b32", ShuffleLanes<Shuffle::kIndex>, {"b32", "pred"}, shuffle_in);
  add("vote.sync.ballot.b32", Ballot, {"b32"}, {"pred", "b32"});
  add("match.any.sync.b32", MatchAny, {"b32"}, {"b32", "b32"});
  add("bar.warp.sync", SyncWarp, {}, {"b32"});
  const std::vector<std::string> four(4, "b32");
  add("ldmatrix.sync.aligned.m8n8.x4.shared.b16", LoadMatrix<false>, four, {"address"});
  add("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", LoadMatrix<true>, four, {"address"});
  const std::vector<std::string> ten(10, "b32");
  add("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", MultiplyMatrices<BFloat16>, four, ten);
  add("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", MultiplyMatrices<Float16>, four, ten);
}

}  // namespace jax_paged::sim
