// SPDX-License-Identifier: Apache-2.0

// Decode of bf16 queries against 8-bit K and V with dot products of bf16 words. Included by
// inst/avx512bf16.cc inside its target region (isa.h), after decode.h.
//
//   codes    become bf16 words in registers, exactly, where a step needs them: of K in order, of V
//            in pairs of tokens side by side. A tile of 8 rows uses a word 8 times; what a call
//            with more rows repeats costs as much as storing the words and loading them would
//   logits   as for bf16 pages, times the tokens' scales of K
//   weights  as in decode.h; times the tokens' scales of V, as words in token pairs. What
//            rounding to a word leaves is a second word, unless all weights of the block are small
//            beside the sum of the weights so far: then rounding errors are many and cancel. (With
//            two words an infinity of e5m2, which no write stores, becomes NaN.)
//   values   a dot product of pairs serves two tokens: half the work of floats with one word, the
//            same with two
//
// Codes are prefetched two blocks ahead: a block's V is wanted as soon as its K, so that one block
// ahead would be too late for it.

#ifndef JAX_PAGED_CPU_ATTENTION_DECODE_WORDS_H_
#define JAX_PAGED_CPU_ATTENTION_DECODE_WORDS_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// A block of 8-bit tokens and their scales: 0 for tokens that no row sees.
struct CodeBlock {
  const Int8* const* k;
  const Int8* const* v;
  float k_scale[kKeyBlock + kWidth];
  float v_scale[kKeyBlock + kWidth];
};

// The queries of a tile in the order that ScoreCodes reads them: [vector of dimensions][row].
template <int ROWS>
void PackQueries(const float* q, int64_t q_stride, int64_t head_dim, float* to) {
  for (int64_t d = 0; d < head_dim; d += 64) {
    for (int j = 0; j < 2 * ROWS; ++j, to += kWidth) {
      Store(to, Load(q + j % ROWS * q_stride + d / 2 + j / ROWS * kWidth));
    }
  }
}

// ROWS x (kWidth / ROWS) logits, as ScoreTile. Prefetches the same tokens of `next`.
template <typename Codes, int ROWS>
JAX_PAGED_INLINE Vec ScoreCodes(const Codes& table, const float* q, const Int8* const* k,
                                int64_t head_dim, const Int8* const* next_k,
                                const Int8* const* next_v) {
  constexpr int kTokens = kWidth / ROWS;
  Vec sum[kWidth];
  JAX_PAGED_UNROLL
  for (int i = 0; i < kWidth; ++i) sum[i] = Zero();
  for (int64_t d = 0; d < head_dim; d += 64, q += 2 * ROWS * kWidth) {
    JAX_PAGED_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      Prefetch(reinterpret_cast<const char*>(next_k[t] + d));
      Prefetch(reinterpret_cast<const char*>(next_v[t] + d));
    }
    if constexpr (kTokens <= 2) {
      Pair key[kTokens];
      JAX_PAGED_UNROLL
      for (int t = 0; t < kTokens; ++t) key[t] = WordsOf(table, LoadCodes(k[t] + d, head_dim - d));
      JAX_PAGED_UNROLL
      for (int j = 0; j < 2 * ROWS; ++j) {
        Vec query = Load(q + j * kWidth);
        Pin(query);
        JAX_PAGED_UNROLL
        for (int t = 0; t < kTokens; ++t) {
          Vec& s = sum[t * ROWS + j % ROWS];
          s = MultiplyAdd<BFloat16>(query, j < ROWS ? key[t].a : key[t].b, s);
        }
      }
    } else {
      Vec query[2 * ROWS];
      JAX_PAGED_UNROLL
      for (int j = 0; j < 2 * ROWS; ++j) {
        query[j] = Load(q + j * kWidth);
        Pin(query[j]);
      }
      JAX_PAGED_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const Pair key = WordsOf(table, LoadCodes(k[t] + d, head_dim - d));
        JAX_PAGED_UNROLL
        for (int j = 0; j < 2 * ROWS; ++j) {
          Vec& s = sum[t * ROWS + j % ROWS];
          s = MultiplyAdd<BFloat16>(query[j], j < ROWS ? key.a : key.b, s);
        }
      }
    }
  }
  return SumEach(sum);
}

// Weights of token pairs as words: of pair p and row r at [p * ROWS + r], and what rounding left
// at kRestOfWeights further on.
template <int ROWS>
inline constexpr int kRestOfWeights = kKeyBlock / 2 * ROWS;

// One word is enough for the weights of a block up to this part of their row's sum.
inline constexpr float kOneWordPart = 1.0f / 16;

// o[r] = o[r] * alpha[r] + sum over pairs [begin, end) of weights[pair][r] . v[pair][d ...], with
// the first words of the weights or both; n dimensions exist from d on.
template <typename Codes, int ROWS, int WORDS, int VECS>
JAX_PAGED_INLINE void ValueCodesStep(const Codes& table, const float* weights, int begin, int end,
                                     const Int8* const* v, int64_t d, int64_t n, const float* alpha,
                                     float* o, int64_t o_stride) {
  static_assert(VECS % 2 == 0, "codes of two vectors at a time");
  Vec sum[ROWS * VECS];
  JAX_PAGED_UNROLL
  for (int i = 0; i < ROWS * VECS; ++i) sum[i] = Zero();
  for (int p = begin; p < end; ++p) {
    Vec value[VECS];
    JAX_PAGED_UNROLL
    for (int j = 0; j < VECS; j += 2) {
      const int64_t at = d + j * kWidth;
      const Pair pairs = PairsOf(table, LoadTwo(v[2 * p] + at, v[2 * p + 1] + at, n - j * kWidth));
      value[j] = pairs.a;
      value[j + 1] = pairs.b;
    }
    JAX_PAGED_UNROLL
    for (int i = 0; i < WORDS * ROWS; ++i) {
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
      float* to = o + r * o_stride + d + j * kWidth;
      Store(to, Fma(Load(to), keep, sum[r * VECS + j]));
    }
  }
}

// The same for all dimensions.
template <typename Codes, int ROWS, int WORDS>
void AddValueCodes(const Codes& table, const float* weights, int begin, int end,
                   const Int8* const* v, int64_t v_head_dim, const float* alpha, float* o,
                   int64_t o_stride) {
  constexpr int kVecs = ROWS == 8 ? 2 : 4;
  int64_t d = 0;
  for (; d + kVecs * kWidth <= v_head_dim; d += kVecs * kWidth) {
    ValueCodesStep<Codes, ROWS, WORDS, kVecs>(table, weights, begin, end, v, d, kVecs * kWidth,
                                              alpha, o, o_stride);
  }
  for (; d < v_head_dim; d += 2 * kWidth) {
    ValueCodesStep<Codes, ROWS, WORDS, 2>(table, weights, begin, end, v, d, v_head_dim - d, alpha,
                                          o, o_stride);
  }
}

// Adds pairs [begin, end) of which not all ROWS rows of a tile see both tokens, row by row: a token
// that a row does not see must not be touched, not even with weight 0, so that the other one of its
// pair stands in for it. Out of line: few blocks need it.
template <typename Codes, int ROWS>
__attribute__((noinline)) void AddCodeEdges(const Codes& table, const float* weights, int begin,
                                            int end, const int* hidden, const int* visible,
                                            const Int8* const* v, int64_t v_head_dim, float* o,
                                            int64_t o_stride) {
  constexpr float kOne = 1.0f;
  for (int p = begin; p < end; ++p) {
    for (int r = 0; r < ROWS; ++r) {
      const bool even = hidden[r] <= 2 * p && 2 * p < visible[r];
      const bool odd = hidden[r] <= 2 * p + 1 && 2 * p + 1 < visible[r];
      if (!even && !odd) continue;
      const Int8* const tokens[2] = {v[2 * p + !even], v[2 * p + odd]};
      // The other's weight is 0 times its scale, which may be NaN.
      const uint32_t seen = (even ? 0xffffu : 0u) | (odd ? 0xffff0000u : 0u);
      float words[kRestOfWeights<1> + 1];
      words[0] = FloatFromBits(FloatBits(weights[p * ROWS + r]) & seen);
      words[kRestOfWeights<1>] =
          FloatFromBits(FloatBits(weights[kRestOfWeights<ROWS> + p * ROWS + r]) & seen);
      AddValueCodes<Codes, 1, 2>(table, words, 0, 1, tokens, v_head_dim, &kOne, o + r * o_stride,
                                 o_stride);
    }
  }
}

// One block for packed rows [row0, row0 + ROWS): as DecodeTile.
template <typename Codes, int ROWS>
void DecodeCodesTile(const CodeTable& bytes, const CodeBlock& block, const KeyBlock<Int8>& next,
                     const int* hidden, const int* visible, int row0, DecodeState* state) {
  constexpr int kTokens = kWidth / ROWS;
  const Codes table(bytes);
  const float* q = state->q + row0 * state->q_stride;
  float* scores = state->scores + row0 * kKeyBlock;
  const int start = hidden[0] / kTokens * kTokens;
  const int padded = static_cast<int>(RoundUp(visible[ROWS - 1], kTokens));
  for (int t = start; t < padded; t += kTokens) {
    const Vec s =
        ScoreCodes<Codes, ROWS>(table, q, block.k + t, state->head_dim, next.k + t, next.v + t);
    Store(scores + t * ROWS, Mul(s, PerToken<ROWS>(block.k_scale + t)));
    for (int64_t d = RoundUp(state->head_dim, 64); d < state->v_head_dim; d += 64) {
      for (int i = 0; i < kTokens; ++i) Prefetch(reinterpret_cast<const char*>(next.v[t + i] + d));
    }
  }
  if (state->scale->edited) EditTile<ROWS>(*state, row0, start, padded, scores);
  // All rows of the tile see tokens [all, all_end), and so pairs [pair, pair_end).
  const int all = hidden[ROWS - 1];
  const int all_end = visible[0] > all ? visible[0] : all;
  const int pair = (all + 1) / 2;
  const int pair_end = all_end / 2 > pair ? all_end / 2 : pair;
  float alpha[kWidth];
  const Vec largest =
      WeighTile<ROWS>(hidden, visible, all, all_end, start, padded, row0, scores, alpha, state);
  float weights[2 * kRestOfWeights<ROWS>];
  for (int t = start; t < padded; t += kTokens) {
    StoreWeightPairs<ROWS>(Mul(Load(scores + t * ROWS), PerToken<ROWS>(block.v_scale + t)),
                           weights + t / 2 * ROWS, kRestOfWeights<ROWS>);
  }

  float* o = state->o + row0 * state->o_stride;
  // Each of a row's kTokens lanes has its share of the sum.
  const Vec sum = Load(state->l[row0 / 8]);
  const auto add = AnyAbove(largest, Mul(sum, Set1(kOneWordPart * kTokens)))
                       ? AddValueCodes<Codes, ROWS, 2>
                       : AddValueCodes<Codes, ROWS, 1>;
  add(table, weights, pair, pair_end, block.v, state->v_head_dim, alpha, o, state->o_stride);
  if (hidden[0] < 2 * pair) {
    AddCodeEdges<Codes, ROWS>(table, weights, hidden[0] / 2, pair, hidden, visible, block.v,
                              state->v_head_dim, o, state->o_stride);
  }
  if (2 * pair_end < visible[ROWS - 1]) {
    AddCodeEdges<Codes, ROWS>(table, weights, pair_end, (visible[ROWS - 1] + 1) / 2, hidden,
                              visible, block.v, state->v_head_dim, o, state->o_stride);
  }
}

// The KV tokens of a split, into part: as DecodeSplit.
template <typename Codes>
void DecodeCodesSplit(const CodeTable& bytes, const AttentionParams& params, const Row& row,
                      const WorkItem& item, const LogitScale& scale, const KeySpan& span,
                      const WorkerScratch& scratch, const Partial& part) {
  const int64_t begin = span.begin, end = span.end;
  const int num_rows = static_cast<int>(item.packed_end - item.packed_begin);
  const int padded = static_cast<int>(DecodePaddedRows(num_rows));
  DecodeState state;
  StartDecode(params, scale, padded, scratch, part, &state);
  int64_t first[kDecodeMaxRows], limit[kDecodeMaxRows];
  AlibiRow alibi[kDecodeMaxRows];
  SetRows(params, row, item, span, num_rows, padded, first, limit, scale.alibi ? alibi : nullptr);
  float key_offset[kKeyBlock];
  int hidden[kDecodeMaxRows] = {}, visible[kDecodeMaxRows];
  const int64_t k_dim = params.head_dim, v_dim = params.v_head_dim;
  const int block_tokens = DecodeBlockTokens(k_dim * int64_t{sizeof(BFloat16)});

  for (int r = 0; r < num_rows;) {
    const int tile = TileRows(num_rows, r);
    const auto pack = tile == 8   ? PackQueries<8>
                      : tile == 4 ? PackQueries<4>
                      : tile == 2 ? PackQueries<2>
                                  : PackQueries<1>;
    const int64_t at = r * scratch.q_stride;
    pack(scratch.q + at, scratch.q_stride, k_dim, scratch.k_stage + at);
    r += tile;
  }
  state.q = scratch.k_stage;
  CodeBlock codes;
  for (int i = kKeyBlock; i < kKeyBlock + kWidth; ++i) codes.k_scale[i] = codes.v_scale[i] = 0.0f;
  KeyBlock<Int8> blocks[3];  // this one and the two after it
  for (int i = 0; i < 2; ++i) {
    const int64_t from = Clamp(begin + i * block_tokens, begin, end);
    GatherKeys(params, item.row, item.kv_head, from, Clamp(from + block_tokens, begin, end),
               scratch, /*part=*/i, &blocks[i]);
    for (int t = 0; t < blocks[i].count; ++t) {
      PrefetchRow(blocks[i].k[t], k_dim);
      PrefetchRow(blocks[i].v[t], v_dim);
    }
  }
  // Of V. One for all tokens is O's: multiplied with weights that are then rounded to bf16, it
  // would be as wrong as its own rounding wherever the weights are alike.
  KvScale v_scale = params.v_scale;
  float of_head = 1.0f;
  if (!v_scale.per_token && v_scale.data) {
    of_head = v_scale.data[item.kv_head];
    v_scale.data = nullptr;
  }
  int current = 0;
  for (int64_t token = begin; token < end; token += block_tokens, current = (current + 1) % 3) {
    const KeyBlock<Int8>& block = blocks[current];
    const KeyBlock<Int8>* next = &block;  // what to prefetch
    if (token + 2 * block_tokens < end) {
      const int unused = (current + 2) % 3;
      KeyBlock<Int8>* const following = &blocks[unused];
      GatherKeys(params, item.row, item.kv_head, token + 2 * block_tokens,
                 Clamp(token + 3 * block_tokens, begin, end), scratch, /*part=*/unused, following);
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
    codes.k = block.k;
    codes.v = block.v;
    const int64_t block_end = Clamp(token + block_tokens, begin, end);
    ListScales(params.k_scale, params, item.row, item.kv_head, token, block_end, codes.k_scale);
    ListScales(v_scale, params, item.row, item.kv_head, token, block_end, codes.v_scale);
    for (int t = 0; t < kKeyBlock; ++t) {
      if (t < seen_begin || t >= seen_end) codes.k_scale[t] = codes.v_scale[t] = 0.0f;
    }
    if (scale.alibi) {
      ListOffsets(params, row, item.row, block, key_offset);
      SetDistances(alibi, padded, token, key_offset, &state);
    }
    for (int r = 0; r < num_rows; next = &block) {
      const int tile = TileRows(num_rows, r);
      const int* from = hidden + r;
      const int* to = visible + r;
      if (to[tile - 1] <= from[0]) {  // nothing to see
      } else if (tile == 8) {
        DecodeCodesTile<Codes, 8>(bytes, codes, *next, from, to, r, &state);
      } else if (tile == 4) {
        DecodeCodesTile<Codes, 4>(bytes, codes, *next, from, to, r, &state);
      } else if (tile == 2) {
        DecodeCodesTile<Codes, 2>(bytes, codes, *next, from, to, r, &state);
      } else {
        DecodeCodesTile<Codes, 1>(bytes, codes, *next, from, to, r, &state);
      }
      r += tile;
    }
  }
  if (of_head != 1.0f) {
    for (int64_t i = 0; i < padded * state.o_stride; ++i) state.o[i] *= of_head;
  }
  FinishDecode(state, num_rows, part);
}

inline void DecodeWordSplit(const AttentionParams& params, const Row& row, const WorkItem& item,
                            const LogitScale& scale, const KeySpan& span,
                            const WorkerScratch& scratch, const Partial& part) {
  if (params.kv_dtype == Dtype::kInt8) {
    DecodeCodesSplit<IntCodes>(kInt8Table, params, row, item, scale, span, scratch, part);
  } else {
    const bool e4m3 = params.kv_dtype == Dtype::kFloat8E4M3;
    DecodeCodesSplit<SignedCodes>(e4m3 ? kE4M3Table : kE5M2Table, params, row, item, scale, span,
                                  scratch, part);
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_DECODE_WORDS_H_
