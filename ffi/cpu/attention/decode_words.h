// SPDX-License-Identifier: Apache-2.0

// Decode of bf16 queries with dot products of bf16 words: the values of bf16 pages, and all of
// 8-bit K and V. Included by inst/avx512bf16.cc and inst/amx.cc inside their target regions
// (isa.h), after decode.h.
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

// One word is enough for the weights of a block up to this part of their row's sum.
inline constexpr float kOneWordPart = 1.0f / 16;

template <int ROWS>
bool AreWordsEnough(Vec largest, Vec sum) {
  constexpr int kTokens = kWidth / ROWS;  // lanes of a row, each with its share of the sum
  return !AnyAbove(largest, Mul(sum, Set1(kOneWordPart * kTokens)));
}

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

// Sources of V for the steps below: words of tokens 2 p and 2 p + 1 side by side, of dimensions [d,
// d
// + 32), of which n exist.
template <typename Codes>
struct CodePairs {
  const Codes& table;
  const Int8* const* v;
  JAX_PAGED_INLINE Pair At(int p, int64_t d, int64_t n) const {
    return PairsOf(table, LoadTwo(v[2 * p] + d, v[2 * p + 1] + d, n));
  }
};
template <typename T>
struct WordPairs {  // all 32 exist; prefetches the same part of next
  const T* const* v;
  const T* const* next;
  JAX_PAGED_INLINE Pair At(int p, int64_t d, int64_t /*n*/) const {
    Prefetch(reinterpret_cast<const char*>(next[2 * p] + d));
    Prefetch(reinterpret_cast<const char*>(next[2 * p + 1] + d));
    return LoadTokenPair(v[2 * p] + d, v[2 * p + 1] + d);
  }
};

// o[r] = o[r] * alpha[r] + sum over pairs [begin, end) of weights[pair][r] . v[pair][d ...], with
// the first words of the weights or both; n dimensions exist from d on.
template <int ROWS, int WORDS, int VECS, typename Source>
JAX_PAGED_INLINE void ValuePairsStep(const Source& source, const float* weights, int begin, int end,
                                     int64_t d, int64_t n, const float* alpha, float* o,
                                     int64_t o_stride) {
  static_assert(VECS % 2 == 0, "words of two vectors at a time");
  Vec sum[ROWS * VECS];
  JAX_PAGED_UNROLL
  for (int i = 0; i < ROWS * VECS; ++i) sum[i] = Zero();
  for (int p = begin; p < end; ++p) {
    Vec value[VECS];
    JAX_PAGED_UNROLL
    for (int j = 0; j < VECS; j += 2) {
      const Pair pair = source.At(p, d + j * kWidth, n - j * kWidth);
      value[j] = pair.a;
      value[j + 1] = pair.b;
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
template <int ROWS, int WORDS, typename Source>
void AddPairs(const Source& source, const float* weights, int begin, int end, int64_t v_head_dim,
              const float* alpha, float* o, int64_t o_stride) {
  constexpr int kVecs = ROWS == 8 ? 2 : 4;
  int64_t d = 0;
  for (; d + kVecs * kWidth <= v_head_dim; d += kVecs * kWidth) {
    ValuePairsStep<ROWS, WORDS, kVecs>(source, weights, begin, end, d, kVecs * kWidth, alpha, o,
                                       o_stride);
  }
  for (; d < v_head_dim; d += 2 * kWidth) {
    ValuePairsStep<ROWS, WORDS, 2>(source, weights, begin, end, d, v_head_dim - d, alpha, o,
                                   o_stride);
  }
}

template <typename T, int ROWS>
void AddValueWords(const float* weights, int begin, int end, const T* const* v,
                   const T* const* next, int64_t v_head_dim, const float* alpha, float* o,
                   int64_t o_stride) {
  constexpr int kTokens = kWidth / ROWS;
  float words[kKeyBlock / 2 * ROWS];
  for (int t = begin / kTokens * kTokens; t < end; t += kTokens) {
    StoreWeightPairs<ROWS>(Load(weights + t * ROWS), words + t / 2 * ROWS);
  }
  AddPairs<ROWS, /*WORDS=*/1>(WordPairs<T>{v, next}, words, begin / 2, end / 2, v_head_dim, alpha,
                              o, o_stride);
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
      AddPairs<1, 2>(CodePairs<Codes>{table, tokens}, words, 0, 1, v_head_dim, &kOne,
                     o + r * o_stride, o_stride);
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
  const auto add = AreWordsEnough<ROWS>(largest, Load(state->l[row0 / 8]))
                       ? AddPairs<ROWS, 1, CodePairs<Codes>>
                       : AddPairs<ROWS, 2, CodePairs<Codes>>;
  const CodePairs<Codes> values = {table, block.v};
  add(values, weights, pair, pair_end, state->v_head_dim, alpha, o, state->o_stride);
  if (hidden[0] < 2 * pair) {
    AddCodeEdges<Codes, ROWS>(table, weights, hidden[0] / 2, pair, hidden, visible, block.v,
                              state->v_head_dim, o, state->o_stride);
  }
  if (2 * pair_end < visible[ROWS - 1]) {
    AddCodeEdges<Codes, ROWS>(table, weights, pair_end, (visible[ROWS - 1] + 1) / 2, hidden,
                              visible, block.v, state->v_head_dim, o, state->o_stride);
  }
}

inline const CodeTable& TableOf(Dtype dtype) {
  if (dtype == Dtype::kInt8) return kInt8Table;
  return dtype == Dtype::kFloat8E4M3 ? kE4M3Table : kE5M2Table;
}

// Decode of a split of one KV head, block by block: as DecodeSplit.
template <typename Codes>
class DecodeCodesSplit {
 public:
  void Start(const AttentionParams& params, const Row& row, const WorkItem& item,
             const LogitScale& scale, const KeySpan& span, const Upcoming& upcoming,
             const WorkerScratch& scratch, const Partial& part) {
    table_ = &TableOf(params.kv_dtype);
    head_.Start(params, row, item, scale, span, upcoming, scratch, part,
                /*bytes=*/sizeof(BFloat16));
    head_.EachTile([&](auto tile, int r) {  // in the order that ScoreCodes reads
      const int64_t at = r * scratch.q_stride;
      PackQueries<decltype(tile)::kRows>(scratch.q + at, scratch.q_stride, params.head_dim,
                                         scratch.k_stage + at);
    });
    head_.state.q = scratch.k_stage;
    for (int i = kKeyBlock; i < kKeyBlock + kWidth; ++i) codes_.k_scale[i] = codes_.v_scale[i] = 0;
    // Of V. One for all tokens is O's: multiplied with weights that are then rounded to bf16, it
    // would be as wrong as its own rounding wherever the weights are alike.
    v_scale_ = params.v_scale;
    of_head_ = 1.0f;
    if (!v_scale_.per_token && v_scale_.data) {
      of_head_ = v_scale_.data[item.kv_head];
      v_scale_.data = nullptr;
    }
  }

  int64_t block_tokens() const { return head_.block_tokens; }

  void Step(int64_t token) {
    const AttentionParams& params = *head_.params;
    const WorkItem& item = *head_.item;
    const KeyBlock<Int8>* next;
    const KeyBlock<Int8>& block = head_.TakeBlock(token, &next);
    const int64_t ahead = head_.BeginAhead(token);
    for (const KvScale* scale : {&params.k_scale, &params.v_scale}) {
      PrefetchScales(*scale, params, item.row, item.kv_head, ahead, head_.EndOf(ahead));
    }
    head_.CountSeen(block);
    const int seen_begin = head_.hidden[0], seen_end = head_.visible[head_.padded - 1];
    if (seen_end <= seen_begin) return;
    codes_.k = block.k;
    codes_.v = block.v;
    const int64_t end = head_.EndOf(token);
    ListScales(params.k_scale, params, item.row, item.kv_head, token, end, codes_.k_scale);
    ListScales(v_scale_, params, item.row, item.kv_head, token, end, codes_.v_scale);
    for (int t = 0; t < kKeyBlock; ++t) {
      if (t < seen_begin || t >= seen_end) codes_.k_scale[t] = codes_.v_scale[t] = 0.0f;
    }
    head_.SetAlibi(block, token);
    head_.EachTile([&](auto tile, int r) {
      constexpr int kRows = decltype(tile)::kRows;
      if (head_.Sees(r, kRows)) {
        DecodeCodesTile<Codes, kRows>(*table_, codes_, *next, head_.hidden + r, head_.visible + r,
                                      r, &head_.state);
      }
      next = &block;  // the first tile brings it in
    });
  }

  void Finish() const {
    if (of_head_ != 1.0f) {
      const DecodeState& state = head_.state;
      for (int64_t i = 0; i < head_.padded * state.o_stride; ++i) state.o[i] *= of_head_;
    }
    head_.Finish();
  }

 private:
  HeadSplit<Int8, 3> head_;
  const CodeTable* table_;
  CodeBlock codes_;
  KvScale v_scale_;
  float of_head_;  // what the head's values are to be multiplied by at last
};

inline void DecodeWordHeads(const AttentionParams& params, const Row& row, const WorkItem* items,
                            int num_heads, const LogitScale& scale, const KeySpan& span,
                            const Upcoming& upcoming, const WorkerScratch* scratch,
                            const Partial* parts) {
  const auto decode = params.kv_dtype == Dtype::kInt8 ? DecodeHeads<DecodeCodesSplit<IntCodes>>
                                                      : DecodeHeads<DecodeCodesSplit<SignedCodes>>;
  decode(params, row, items, num_heads, scale, span, upcoming, scratch, parts);
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_DECODE_WORDS_H_
