// SPDX-License-Identifier: Apache-2.0

// What the CUDA kernels of moe_experts are told about one call. Knows nothing of XLA; plain C++17,
// so that handler, kernels and emulator share it.

#ifndef JAX_PAGED_CUDA_MOE_EXPERTS_ARGS_H_
#define JAX_PAGED_CUDA_MOE_EXPERTS_ARGS_H_

#include <cstdint>
#include <string>

#include "common/activations.h"
#include "common/checks.h"
#include "common/dtypes.h"
#include "common/integers.h"
#include "common/moe_params.h"
#include "cuda/pointers.h"

namespace jax_paged::cuda {

inline constexpr int64_t kMoeTurnPairs = 16384;   // a call of more runs in turns
inline constexpr int64_t kMoeMaxExperts = 8192;   // their counts lie in 32 KiB of shared memory
inline constexpr int64_t kMoeMaxWidth = 1 << 20;  // hidden and inner
inline constexpr int32_t kMoeSimtTokens = 8;      // of a tile: simt.cuh
inline constexpr int32_t kMoeTokens = 64;         // of a tile: gemm.cuh

// A tile: pairs [first, first + count) of the sorted ones, all of one expert.
struct alignas(16) MoeTile {
  int32_t expert;
  int32_t first;
  int32_t count;
  int32_t unused;
};

// What is added to a product: [num_experts, outputs]; null data: nothing.
struct MoeBiasArgs {
  Global<const char> data;
  bool is_float;  // rather than of x's dtype
};

// One turn of a call.
struct MoeArgs {
  Global<const char> x;               // [num_tokens, hidden]
  Global<const char> gate_up;         // [num_experts, 2 inner, hidden]
  Global<const char> down;            // [num_experts, hidden, inner]
  Global<const int32_t> experts;      // [num_tokens, experts_per_token]
  Global<const float> weights;        // the same
  Global<const float> gate_up_scale;  // MoeParams explains these four; null: none
  Global<const float> down_scale;
  Global<const float> gate_up_block_scale;
  Global<const float> down_block_scale;
  Global<const float> limit;  // scalar, of Activation::kSwigluOai; null with the others
  Global<char> out;           // [num_tokens, hidden]
  MoeBiasArgs gate_up_bias;   // [num_experts, 2 inner]
  MoeBiasArgs down_bias;      // [num_experts, hidden]

  // Workspace. The planner writes the first three.
  Global<int32_t> num_tiles;  // scalar
  Global<MoeTile> tiles;      // [num_tiles]
  Global<int32_t> pairs;      // [num_pairs], pairs sorted by expert, each expert's by token
  Global<char> h;             // [num_pairs, inner] in x's dtype, sorted
  Global<float> y;            // [num_pairs, hidden], by token

  int32_t num_tokens;
  int32_t experts_per_token;
  int32_t num_pairs;
  int32_t num_experts;
  int32_t hidden;
  int32_t inner;
  int32_t tile_tokens;
  Activation activation;
};

// Whether gemm.cuh serves a call: 16-bit x, and rows of the experts in chunks of 16 bytes.
inline bool UsesMoeTensorCores(const MoeParams& in) {
  if (in.dtype == Dtype::kFloat32) return false;
  return !IsEightBit(in.w_dtype) || (in.hidden % 16 == 0 && in.inner % 16 == 0);
}

inline int64_t MoeTurnTokens(int64_t num_tokens, int64_t experts_per_token) {
  const int64_t most = experts_per_token > 0 ? kMoeTurnPairs / experts_per_token : num_tokens;
  return most < 1 ? 1 : (most < num_tokens ? most : num_tokens);
}

// Most tiles of a turn: those that are full, and for each expert one that is not.
inline int64_t MaxMoeTiles(int64_t num_pairs, int64_t num_experts, int64_t tile_tokens) {
  return (num_pairs < num_experts ? num_pairs : num_experts) + num_pairs / tile_tokens;
}

// Words of 4 bytes; jax_paged/ops/moe.py computes the same.
inline int64_t MoeWorkspaceWords(int64_t num_tokens, int64_t experts_per_token, int64_t num_experts,
                                 int64_t hidden, int64_t inner, int64_t element_bytes) {
  const int64_t pairs = MoeTurnTokens(num_tokens, experts_per_token) * experts_per_token;
  return 4 + 4 * MaxMoeTiles(pairs, num_experts, kMoeSimtTokens) + RoundUp(pairs, 4) +
         pairs * inner * element_bytes / 4 + pairs * hidden;
}

// Returns "" or why the kernels do not take the call.
inline std::string CheckMoeArgs(const MoeParams& in, int64_t workspace_words) {
  const auto refuse = [](const char* argument, const std::string& expected, int64_t got) {
    return Mismatch(kMoeOp, argument, expected, std::to_string(got));
  };
  const auto at_most = [](int64_t limit, const char* what) {
    return "at most " + std::to_string(limit) + " " + what + " on CUDA";
  };
  if (in.num_experts > kMoeMaxExperts) {
    return refuse("down", at_most(kMoeMaxExperts, "experts"), in.num_experts);
  }
  if (in.experts_per_token > kMoeTurnPairs) {
    return refuse("experts", at_most(kMoeTurnPairs, "experts per token"), in.experts_per_token);
  }
  if (in.hidden > kMoeMaxWidth) {
    return refuse("x", at_most(kMoeMaxWidth, "columns"), in.hidden);
  }
  if (in.inner > kMoeMaxWidth) {
    return refuse("down", at_most(kMoeMaxWidth, "columns"), in.inner);
  }
  const int64_t words = MoeWorkspaceWords(in.num_tokens, in.experts_per_token, in.num_experts,
                                          in.hidden, in.inner, ByteWidth(in.dtype));
  if (workspace_words < words) {
    return refuse("workspace", std::to_string(words) + " words", workspace_words);
  }
  return "";
}

// The turn that begins with a token.
inline MoeArgs MakeMoeArgs(const MoeParams& in, int32_t* workspace, int64_t first_token) {
  const int64_t bytes = ByteWidth(in.dtype), k = in.experts_per_token;
  const int64_t left = in.num_tokens - first_token, turn = MoeTurnTokens(in.num_tokens, k);
  MoeArgs args;
  args.x = Global<const char>(in.x) + first_token * in.hidden * bytes;
  args.gate_up = Global<const char>(in.gate_up);
  args.down = Global<const char>(in.down);
  args.experts = Global<const int32_t>(in.experts) + first_token * k;
  args.weights = Global<const float>(in.weights) + first_token * k;
  args.gate_up_scale = Global<const float>(in.gate_up_scale);
  args.down_scale = Global<const float>(in.down_scale);
  args.gate_up_block_scale = Global<const float>(in.gate_up_block_scale);
  args.down_block_scale = Global<const float>(in.down_block_scale);
  args.limit = Global<const float>(in.limit);
  args.gate_up_bias = {Global<const char>(in.gate_up_bias.data),
                       in.gate_up_bias.dtype == Dtype::kFloat32};
  args.down_bias = {Global<const char>(in.down_bias.data), in.down_bias.dtype == Dtype::kFloat32};
  args.activation = in.activation;
  args.out = Global<char>(in.out) + first_token * in.hidden * ByteWidth(in.out_dtype);
  args.num_tokens = static_cast<int32_t>(left < turn ? left : turn);
  args.experts_per_token = static_cast<int32_t>(k);
  args.num_pairs = args.num_tokens * args.experts_per_token;
  args.num_experts = static_cast<int32_t>(in.num_experts);
  args.hidden = static_cast<int32_t>(in.hidden);
  args.inner = static_cast<int32_t>(in.inner);
  args.tile_tokens = UsesMoeTensorCores(in) ? kMoeTokens : kMoeSimtTokens;

  const Global<int32_t> words(workspace);
  const int64_t tiles = MaxMoeTiles(args.num_pairs, in.num_experts, args.tile_tokens);
  args.num_tiles = words;
  args.tiles = (words + 4).As<MoeTile>();
  args.pairs = words + (4 + 4 * tiles);
  const Global<int32_t> h = args.pairs + RoundUp(args.num_pairs, 4);
  args.h = h.As<char>();
  args.y = (h + args.num_pairs * in.inner * bytes / 4).As<float>();
  return args;
}

}  // namespace jax_paged::cuda

#endif  // JAX_PAGED_CUDA_MOE_EXPERTS_ARGS_H_
