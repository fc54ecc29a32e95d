// Decode of bf16 queries against 8-bit K and V with dot products of bf16 words. Included by
// attention_avx512bf16.cc inside its target region (isa.h), after kernel_decode.h.
//
//   stage    a block's codes become bf16 words, exactly: K row by row, V in pairs of tokens side by
//            side. Once for all query heads of the group; what no row sees is staged as zeros
//   logits   as for bf16 pages, times the tokens' scales of K
//   weights  as in kernel_decode.h; times the tokens' scales of V, as the sum of two words, in
//            token pairs: one word would add as much error as a bf16 result has by itself. (So an
//            infinity of e5m2, which no write stores, becomes NaN.)
//   values   a dot product of pairs serves two tokens, so that two words cost what floats would
//
// The stage is 16 KiB, half of it keys, and stays in L1. Codes are prefetched two blocks ahead: a
// block's V is wanted as soon as its K, so that one block ahead would be too late for it.

#ifndef JAX_PAGED_CPU_KERNEL_DECODE_WORDS_H_
#define JAX_PAGED_CPU_KERNEL_DECODE_WORDS_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// A block of 8-bit tokens as words, and their scales: 0 for tokens that no row sees.
struct WordBlock {
  const BFloat16* k[kKeyBlock];  // rows of the stage
  const float* v;                // [kKeyBlock / 2, v_stride] pairs
  int64_t v_stride;
  float k_scale[kKeyBlock + kWidth];
  float v_scale[kKeyBlock + kWidth];
};

// Stages the listed tokens [begin, end) of a block. Of V also the tokens that share a pair with
// them, as zeros.
template <typename Codes>
__attribute__((noinline)) void StageWords(const CodeTable& bytes, const KeyBlock<Int8>& codes,
                                          int begin, int end, int64_t head_dim, int64_t v_head_dim,
                                          const WorkerScratch& scratch, const WordBlock& staged) {
  const Codes table(bytes);
  for (int t = begin; t < end; ++t) {
    char* to = reinterpret_cast<char*>(scratch.k_stage) + 2 * t * RoundUp(head_dim, 64);
    for (int64_t d = 0; d < head_dim; d += 64) {
      StoreWords(table, LoadCodes(codes.k[t] + d, head_dim - d), to + 2 * d);
    }
  }
  for (int t = begin / 2 * 2; t < end; t += 2) {
    const bool has_even = t >= begin, has_odd = t + 1 < end;
    float* to = scratch.v_stage + t / 2 * staged.v_stride;
    for (int64_t d = 0; d < v_head_dim; d += 64) {
      const int64_t left = v_head_dim - d;
      StoreWordPairs(table, LoadCodes(codes.v[t] + d, has_even ? left : 0),
                     LoadCodes(codes.v[t + 1] + d, has_odd ? left : 0), to + d);
    }
  }
}

// Where the second words of a tile's weights begin.
template <int ROWS>
inline constexpr int kRestOfWeights = kKeyBlock / 2 * ROWS;

// o[r] = o[r] * alpha[r] + sum over pairs [begin, end) of weights[pair][r] . v[pair][d ...].
template <int ROWS, int VECS>
JAX_PAGED_INLINE void WordValueStep(const float* weights, int begin, int end, const float* v,
                                    int64_t v_stride, const float* alpha, float* o,
                                    int64_t o_stride) {
  Vec sum[ROWS * VECS];
  JAX_PAGED_UNROLL
  for (int i = 0; i < ROWS * VECS; ++i) sum[i] = Zero();
  for (int p = begin; p < end; ++p) {
    Vec value[VECS];
    JAX_PAGED_UNROLL
    for (int j = 0; j < VECS; ++j) value[j] = Load(v + p * v_stride + j * kWidth);
    JAX_PAGED_UNROLL
    for (int i = 0; i < 2 * ROWS; ++i) {
      const int r = i % ROWS;
      const float weight = weights[(i < ROWS ? 0 : kRestOfWeights<ROWS>)+p * ROWS + r];
      JAX_PAGED_UNROLL
      for (int j = 0; j < VECS; ++j) {
        sum[r * VECS + j] = AddPair(sum[r * VECS + j], weight, value[j]);
      }
    }
  }
  JAX_PAGED_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const Vec keep = Set1(alpha[r]);
    JAX_PAGED_UNROLL
    for (int j = 0; j < VECS; ++j) {
      float* to = o + r * o_stride + j * kWidth;
      Store(to, Fma(Load(to), keep, sum[r * VECS + j]));
    }
  }
}

// The same for all dimensions: v and o have whole vectors of them.
template <int ROWS>
void AddWordValues(const float* weights, int begin, int end, const WordBlock& block,
                   int64_t v_head_dim, const float* alpha, float* o, int64_t o_stride) {
  constexpr int kVecs = ROWS == 8 ? 2 : 4;
  int64_t d = 0;
  for (; d + kVecs * kWidth <= v_head_dim; d += kVecs * kWidth) {
    WordValueStep<ROWS, kVecs>(weights, begin, end, block.v + d, block.v_stride, alpha, o + d,
                               o_stride);
  }
  for (; d < v_head_dim; d += kWidth) {
    WordValueStep<ROWS, 1>(weights, begin, end, block.v + d, block.v_stride, alpha, o + d,
                           o_stride);
  }
}

// The same where the rows of a tile see different tokens: row by row and token by token, so that a
// masked value is not touched. Out of line: few blocks need it.
template <int ROWS>
__attribute__((noinline)) void AddWordEdges(const float* scores, const int* hidden,
                                            const int* visible, const WordBlock& block,
                                            int64_t v_head_dim, const float* alpha, float* o,
                                            int64_t o_stride) {
  for (int r = 0; r < ROWS; ++r) {
    for (int64_t d = 0; d < v_head_dim; d += kWidth) {
      float* to = o + r * o_stride + d;
      Vec sum = Mul(Load(to), Set1(alpha[r]));
      for (int t = hidden[r]; t < visible[r]; ++t) {
        const Vec value = HalfOfPairs(block.v + t / 2 * block.v_stride + d, t % 2 != 0);
        sum = Fma(Set1(scores[t * ROWS + r] * block.v_scale[t]), value, sum);
      }
      Store(to, sum);
    }
  }
}

// One block for packed rows [row0, row0 + ROWS), of which tokens [begin, end) are staged: as
// DecodeTile. `next` is prefetched where it is not null.
template <int ROWS>
void DecodeWordTile(const WordBlock& block, const KeyBlock<Int8>* next, int begin, int end,
                    const int* hidden, const int* visible, int row0, DecodeState* state) {
  constexpr int kTokens = kWidth / ROWS;
  const float* q = state->q + row0 * state->q_stride;
  float* scores = state->scores + row0 * kKeyBlock;
  const int start = hidden[0] / kTokens * kTokens;
  const int padded = static_cast<int>(RoundUp(visible[ROWS - 1], kTokens));
  for (int t = start; t < padded; t += kTokens) {
    const Vec s = ScoreTile<BFloat16, ROWS>(q, state->q_stride, block.k + t, state->head_dim);
    Store(scores + t * ROWS, Mul(s, PerToken<ROWS>(block.k_scale + t)));
    if (next) {
      JAX_PAGED_UNROLL
      for (int i = 0; i < kTokens; ++i) {
        PrefetchRow(next->k[t + i], state->head_dim);
        PrefetchRow(next->v[t + i], state->v_head_dim);
      }
    }
  }
  if (state->scale->edited) EditTile<ROWS>(*state, row0, start, padded, scores);
  const int all = hidden[ROWS - 1];
  const int all_end = visible[0] > all ? visible[0] : all;
  float alpha[kWidth];
  WeighTile<ROWS>(hidden, visible, all, all_end, start, padded, row0, scores, alpha, state);

  float* o = state->o + row0 * state->o_stride;
  // A pair is used whole: the other token of the first and the last one must be staged as zeros.
  const bool same = hidden[0] == all && visible[ROWS - 1] == all_end;
  const bool whole = (all % 2 == 0 || all == begin) && (all_end % 2 == 0 || all_end == end);
  if (!same || !whole) {
    AddWordEdges<ROWS>(scores, hidden, visible, block, state->v_head_dim, alpha, o,
                       state->o_stride);
    return;
  }
  float weights[2 * kRestOfWeights<ROWS>];
  for (int t = start; t < padded; t += kTokens) {
    StoreWeightPairs<ROWS>(Mul(Load(scores + t * ROWS), PerToken<ROWS>(block.v_scale + t)),
                           weights + t / 2 * ROWS, kRestOfWeights<ROWS>);
  }
  AddWordValues<ROWS>(weights, all / 2, (all_end + 1) / 2, block, state->v_head_dim, alpha, o,
                      state->o_stride);
}

// The KV tokens of a split, into part: as DecodeSplit.
inline void DecodeWordSplit(const AttentionParams& params, const Row& row, const WorkItem& item,
                            const LogitScale& scale, const KeySpan& span,
                            const WorkerScratch& scratch, const Partial& part) {
  const int64_t begin = span.begin, end = span.end;
  const int num_rows = static_cast<int>(item.packed_end - item.packed_begin);
  const int padded = static_cast<int>(DecodePaddedRows(num_rows));
  DecodeState state;
  StartDecode(params, scale, padded, scratch, part, &state);
  int64_t first[kDecodeMaxRows], limit[kDecodeMaxRows];
  EditedRow edited[kDecodeMaxRows];
  SetRows(params, row, item, span, num_rows, padded, first, limit, scale.edited ? edited : nullptr);
  float key_offset[kKeyBlock];
  int hidden[kDecodeMaxRows] = {}, visible[kDecodeMaxRows];
  const int64_t k_dim = params.head_dim, v_dim = params.v_head_dim;
  const int block_tokens = DecodeBlockTokens(k_dim * int64_t{sizeof(BFloat16)});

  WordBlock staged;
  const int64_t k_stride = RoundUp(k_dim, 64);
  for (int t = 0; t < kKeyBlock; ++t) {
    staged.k[t] = reinterpret_cast<const BFloat16*>(scratch.k_stage) + t * k_stride;
  }
  staged.v = scratch.v_stage;
  staged.v_stride = RoundUp(v_dim, 64);
  for (int i = kKeyBlock; i < kKeyBlock + kWidth; ++i) staged.k_scale[i] = staged.v_scale[i] = 0.0f;

  KeyBlock<Int8> blocks[3];  // this one and the two after it
  for (int i = 0; i < 2; ++i) {
    const int64_t from = Clamp(begin + i * block_tokens, begin, end);
    GatherKeys(params, item.row, item.kv_head, from, Clamp(from + block_tokens, begin, end),
               scratch, /*half=*/0, &blocks[i]);
    for (int t = 0; t < blocks[i].count; ++t) {
      PrefetchRow(blocks[i].k[t], k_dim);
      PrefetchRow(blocks[i].v[t], v_dim);
    }
  }
  int current = 0;
  for (int64_t token = begin; token < end; token += block_tokens, current = (current + 1) % 3) {
    const KeyBlock<Int8>& block = blocks[current];
    const KeyBlock<Int8>* next = nullptr;  // what to prefetch
    if (token + 2 * block_tokens < end) {
      KeyBlock<Int8>* const following = &blocks[(current + 2) % 3];
      GatherKeys(params, item.row, item.kv_head, token + 2 * block_tokens,
                 Clamp(token + 3 * block_tokens, begin, end), scratch, /*half=*/0, following);
      if (following->count > 0) next = following;
      const int64_t next_end = Clamp(token + 3 * block_tokens, begin, end);
      PrefetchScales(params.k_scale, params, item.row, item.kv_head, token + 2 * block_tokens,
                     next_end);
      PrefetchScales(params.v_scale, params, item.row, item.kv_head, token + 2 * block_tokens,
                     next_end);
    }
    CountBefore(block.count_before, block.begin, limit, padded, visible);
    if (row.window > 0) {
      CountBefore(block.count_before, block.begin, first, padded, hidden);
    }
    const int seen_begin = hidden[0], seen_end = visible[padded - 1];
    if (seen_end <= seen_begin) continue;
    const int64_t block_end = Clamp(token + block_tokens, begin, end);
    ListScales(params.k_scale, params, item.row, item.kv_head, token, block_end, staged.k_scale);
    ListScales(params.v_scale, params, item.row, item.kv_head, token, block_end, staged.v_scale);
    for (int t = 0; t < kKeyBlock; ++t) {
      if (t < seen_begin || t >= seen_end) staged.k_scale[t] = staged.v_scale[t] = 0.0f;
    }
    if (params.kv_dtype == Dtype::kFloat8E4M3) {
      StageWords<SignedCodes>(kE4M3Table, block, seen_begin, seen_end, k_dim, v_dim, scratch,
                              staged);
    } else if (params.kv_dtype == Dtype::kFloat8E5M2) {
      StageWords<SignedCodes>(kE5M2Table, block, seen_begin, seen_end, k_dim, v_dim, scratch,
                              staged);
    } else {
      StageWords<WholeCodes>(kInt8Table, block, seen_begin, seen_end, k_dim, v_dim, scratch,
                             staged);
    }
    if (scale.edited) {
      ListOffsets(params, row, item.row, block, key_offset);
      state.key_offset = key_offset;
      for (int r = 0; r < padded; ++r) {
        state.slope[r] = edited[r].slope;
        state.distance[r] = static_cast<float>(token - edited[r].position);
      }
    }
    for (int r = 0; r < num_rows; next = nullptr) {
      const int tile = TileRows(num_rows, r);
      const int* from = hidden + r;
      const int* to = visible + r;
      if (to[tile - 1] <= from[0]) {  // nothing to see
      } else if (tile == 8) {
        DecodeWordTile<8>(staged, next, seen_begin, seen_end, from, to, r, &state);
      } else if (tile == 4) {
        DecodeWordTile<4>(staged, next, seen_begin, seen_end, from, to, r, &state);
      } else if (tile == 2) {
        DecodeWordTile<2>(staged, next, seen_begin, seen_end, from, to, r, &state);
      } else {
        DecodeWordTile<1>(staged, next, seen_begin, seen_end, from, to, r, &state);
      }
      r += tile;
    }
  }
  FinishDecode(state, num_rows, part);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_KERNEL_DECODE_WORDS_H_
