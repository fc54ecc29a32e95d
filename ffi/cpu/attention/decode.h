// SPDX-License-Identifier: Apache-2.0

// Decode: a unit of at most 16 packed rows against its K and V, read straight from the pages (of
// vllm5d pages: each block is first copied to whole rows, which stay in cache; GatherKeys).
//
//   block    up to kKeyBlock tokens, so few that their K stays in L1
//   tile     1, 2, 4 or 8 packed rows (padded with zero queries); the steps below run per tile
//   logits   kWidth accumulators = tile rows x (kWidth / rows) tokens run over head_dim; one
//            transposing sum makes them one vector. Scores lie [token][row], so that all lanes
//            work in softmax too
//   edit     soft cap, ALiBi: on the scores, where the call has them
//   weights  running maximum per row; 2^(s * scale - m), masked ones exactly 0
//   values   rows x 2 or 4 vectors of accumulators run over the tokens, then o = o * alpha + sum;
//            pairs of tokens as words where that is enough (decode_words.h)
//
// While K is used the next block's K is prefetched, and its V while V is used: without that it is
// three times slower (no hardware prefetcher follows a page table). That is into L2; where it
// gains, V goes on into L1 while K is used (docs/performance.md, Prefetch). Behind the last block
// of a split comes the first of what its worker takes next. Bound by reading K, V.
//
// Registers of a tile of 8 with AVX-512: 16 sums, 2 to 4 of K or V, 1 of q. AVX2 has half of them:
// values take two passes of 4 rows there.

#ifndef JAX_PAGED_CPU_ATTENTION_DECODE_H_
#define JAX_PAGED_CPU_ATTENTION_DECODE_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// What a decode unit carries from block to block.
struct DecodeState {
  const float* q;
  float* o;
  float* scores;
  int64_t q_stride;
  int64_t o_stride;
  int32_t head_dim;
  int32_t v_head_dim;
  const LogitScale* scale;
  const float* key_offset;              // ALiBi: per listed token of the block; without: null
  float slope[kDecodeMaxRows];          // ALiBi
  float distance[kDecodeMaxRows];       // ALiBi: of the block's first token from the query
  const uint64_t* seen;                 // of the block in a tree (SetSeen), null: rows see ranges
  float top[kDecodeMaxRows];            // largest logit so far, raw
  float m[kDecodeMaxRows];              // top * scale->scale
  float l[kDecodeMaxRows / 8][kWidth];  // per tile and lane, lanes of one row to be summed
};

// Rows whose values are summed at once, two vectors of each: what registers hold.
constexpr int kValueRows = kWidth == 16 ? 8 : 4;

// The weights of a tile: weights[token * token_stride + row] for tokens [begin, end).
struct Weights {
  const float* weights;
  int64_t token_stride;
  int begin;
  int end;
};

// o[r] = o[r] * alpha[r] + sum over tokens of weight[token][r] * v[token][d ...], for ROWS rows and
// VECS vectors: pairs, or one (HALF: 8 dimensions). If it PREFETCHES, then the same part of
// next[token].
template <typename T, int ROWS, int VECS, bool HALF, bool PREFETCHES>
JAX_PAGED_INLINE void ValueStep(const Weights& w, const T* const* v, const T* const* next,
                                int64_t d, const float* alpha, float* o, int64_t o_stride) {
  static_assert(VECS == 1 || VECS % 2 == 0, "one vector or pairs");
  Vec sum[ROWS * VECS];
  JAX_PAGED_UNROLL
  for (int i = 0; i < ROWS * VECS; ++i) sum[i] = Zero();
  const int64_t token_stride = w.token_stride;
  const float* weight = w.weights + w.begin * token_stride;
  const int end = w.end;
  for (int t = w.begin; t < end; ++t, weight += token_stride) {
    Vec value[VECS];
    if constexpr (VECS == 1) {
      value[0] = LoadPart<HALF>(v[t] + d);
    } else {
      JAX_PAGED_UNROLL
      for (int j = 0; j < VECS; j += 2) {
        const Pair x = LoadPair(v[t] + d + j * kWidth);
        value[j] = x.a;
        value[j + 1] = x.b;
      }
    }
    if constexpr (PREFETCHES) {
      JAX_PAGED_UNROLL
      for (int j = 0; j < VECS * kWidth; j += 64 / int{sizeof(T)}) {
        Prefetch(reinterpret_cast<const char*>(next[t] + d + j));
      }
    }
    JAX_PAGED_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      const Vec x = Set1(weight[r]);
      JAX_PAGED_UNROLL
      for (int j = 0; j < VECS; ++j) sum[r * VECS + j] = Fma(x, value[j], sum[r * VECS + j]);
    }
  }
  JAX_PAGED_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const Vec keep = Set1(alpha[r]);
    JAX_PAGED_UNROLL
    for (int j = 0; j < VECS; ++j) {
      float* p = o + r * o_stride + d + j * kWidth;
      Store(p, Fma(Load(p), keep, sum[r * VECS + j]));
    }
  }
}

// The same for all rows of a tile, kValueRows at a time.
template <typename T, int ROWS, int VECS, bool HALF>
JAX_PAGED_INLINE void ValueSteps(Weights w, const T* const* v, const T* const* next, int64_t d,
                                 const float* alpha, float* o, int64_t o_stride) {
  constexpr int kRows = ROWS < kValueRows ? ROWS : kValueRows;
  ValueStep<T, kRows, VECS, HALF, /*PREFETCHES=*/true>(w, v, next, d, alpha, o, o_stride);
  JAX_PAGED_UNROLL
  for (int r = kRows; r < ROWS; r += kRows) {
    w.weights += kRows;
    ValueStep<T, kRows, VECS, HALF, /*PREFETCHES=*/false>(w, v, next, d, alpha + r,
                                                          o + r * o_stride, o_stride);
  }
}

template <typename T, int ROWS>
void AddValues(const Weights& w, const T* const* v, const T* const* next, int64_t v_head_dim,
               const float* alpha, float* o, int64_t o_stride) {
  constexpr int kVecs = ROWS < kValueRows ? 4 : 2;
  int64_t d = 0;
  for (; d + kVecs * kWidth <= v_head_dim; d += kVecs * kWidth) {
    ValueSteps<T, ROWS, kVecs, /*HALF=*/false>(w, v, next, d, alpha, o, o_stride);
  }
  if (kVecs > 2 && d + 2 * kWidth <= v_head_dim) {
    ValueSteps<T, ROWS, 2, /*HALF=*/false>(w, v, next, d, alpha, o, o_stride);
    d += 2 * kWidth;
  }
  if (d + kWidth <= v_head_dim) {
    ValueSteps<T, ROWS, 1, /*HALF=*/false>(w, v, next, d, alpha, o, o_stride);
    d += kWidth;
  }
  if (d < v_head_dim) ValueSteps<T, ROWS, 1, /*HALF=*/true>(w, v, next, d, alpha, o, o_stride);
}

// The same of weights that are rounded to words, where the processor multiplies pairs of those: of
// tokens [begin, end), both even, and whole steps of dimensions (decode_words.h).
template <typename T, int ROWS>
void AddValueWords(const float* weights, int begin, int end, const T* const* v,
                   const T* const* next, int64_t v_head_dim, const float* alpha, float* o,
                   int64_t o_stride);

// Whether rounding a block's weights to words is no matter: none is more than 1/16 of the sum of
// its row's weights so far, so that rounding errors are many and cancel. Of each lane.
template <int ROWS>
bool AreWordsEnough(Vec largest, Vec sum);

// Turns products [begin, end) of a tile into logits.
template <int ROWS>
__attribute__((noinline)) void EditTile(const DecodeState& state, int row0, int begin, int end,
                                        float* scores) {
  constexpr int kTokens = kWidth / ROWS;
  const LogitScale scale = *state.scale;
  if (!state.key_offset) {
    for (float* s = scores + begin * ROWS; s < scores + end * ROWS; s += kWidth) {
      Store(s, CappedLogit(Load(s), scale));
    }
    return;
  }
  float slopes[kWidth], distances[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    slopes[i] = state.slope[row0 + i % ROWS];
    distances[i] = state.distance[row0 + i % ROWS];
  }
  const Vec slope = Load(slopes), first = Load(distances);
  for (int t = begin; t < end; t += kTokens) {
    Vec offset = Set1(state.key_offset[t]);
    if constexpr (ROWS == 1) {
      offset = Load(state.key_offset + t);
    } else {
      JAX_PAGED_UNROLL
      for (int i = 1; i < kTokens; ++i)
        offset = KeepFirst(offset, i * ROWS, state.key_offset[t + i]);
    }
    float* s = scores + t * ROWS;
    Store(s, FmaOnce(slope, Add(first, offset), CappedLogit(Load(s), scale)));
  }
}

// Adds the values that not all ROWS rows of a tile see, row by row: a masked one must not be
// touched, not even with weight 0. All rows have seen tokens [all, end). Out of line: few blocks
// need it.
template <typename T, int ROWS>
__attribute__((noinline)) void AddEdges(const float* scores, const int* hidden, const int* visible,
                                        const uint64_t* seen, int all, int end, const T* const* v,
                                        const T* const* next, int64_t v_head_dim, float* o,
                                        int64_t o_stride) {
  constexpr float kOne = 1.0f;
  for (int r = 0; r < ROWS; ++r) {
    uint64_t bits = BitRange(hidden[r], visible[r]) & ~BitRange(all, end);
    if (seen) bits &= seen[r];
    while (bits) {
      int begin, limit;
      TakeRun(&bits, &begin, &limit);
      AddValues<T, 1>({scores + r, ROWS, begin, limit}, v, next, v_head_dim, &kOne,
                      o + r * o_stride, o_stride);
    }
  }
}

// Turns the logits of listed tokens [start, padded) of a tile into weights: 0 for those that a row
// does not see. Rows all see tokens [all, end). Returns the largest weight of each lane, and in
// alpha what the rows' o is to be scaled by.
template <int ROWS>
JAX_PAGED_INLINE Vec WeighTile(const int* hidden, const int* visible, int all, int end, int start,
                               int padded, int row0, float* scores, float* alpha,
                               DecodeState* state) {
  constexpr int kTokens = kWidth / ROWS;
  for (int t = start; t < all; ++t) {
    for (int r = 0; r < ROWS; ++r) {
      if (t < hidden[r] || t >= visible[r]) scores[t * ROWS + r] = -kInfinity;
    }
  }
  for (int t = end; t < padded; ++t) {
    for (int r = 0; r < ROWS; ++r) {
      if (t < hidden[r] || t >= visible[r]) scores[t * ROWS + r] = -kInfinity;
    }
  }
  Vec top = Set1(-kInfinity);
  for (int t = start; t < padded; t += kTokens) top = MaxSkipNan(top, Load(scores + t * ROWS));

  float lanes[kWidth], shift[kWidth];
  Store(lanes, top);
  for (int r = 0; r < ROWS; ++r) {
    float& row_top = state->top[row0 + r];
    float& m = state->m[row0 + r];
    for (int i = r; i < kWidth; i += ROWS) row_top = lanes[i] > row_top ? lanes[i] : row_top;
    const float new_m = row_top == -kInfinity ? -kInfinity : row_top * state->scale->scale;
    shift[r] = new_m == -kInfinity ? 0.0f : -new_m;
    alpha[r] = m == -kInfinity ? -kInfinity : m - new_m;
    m = new_m;
    for (int i = r + ROWS; i < kWidth; i += ROWS) {
      shift[i] = shift[r];
      alpha[i] = alpha[r];
    }
  }
  const Vec keep = Exp2(Load(alpha));
  Store(alpha, keep);

  const Vec scale = Set1(state->scale->scale);
  const Vec minus_m = Load(shift);
  Vec sum = Zero();
  for (int t = start; t < padded; t += kTokens) {
    const Vec weight = Exp2(FmaOnce(Load(scores + t * ROWS), scale, minus_m));
    Store(scores + t * ROWS, weight);
    sum = Add(sum, weight);
  }
  float* l = state->l[row0 / 8];
  Store(l, Fma(Load(l), keep, sum));
  return Exp2(FmaOnce(top, scale, minus_m));
}

// One block for packed rows [row0, row0 + ROWS). Row r sees the block's listed tokens [hidden[r],
// visible[r]), both ascending in r; in a tree perhaps fewer.
template <typename T, int ROWS>
void DecodeTile(const KeyBlock<T>& block, const KeyBlock<T>& next, const int* hidden,
                const int* visible, int row0, DecodeState* state) {
  constexpr int kTokens = kWidth / ROWS;
  const float* q = state->q + row0 * state->q_stride;
  float* scores = state->scores + row0 * kKeyBlock;
  const int start = hidden[0] / kTokens * kTokens;
  const int count = visible[ROWS - 1];
  const int padded = static_cast<int>(RoundUp(count, kTokens));
  const int64_t k_bytes = state->head_dim * int64_t{sizeof(T)};
  [[maybe_unused]] const int64_t v_bytes = state->v_head_dim * int64_t{sizeof(T)};

  for (int t = start; t < padded; t += kTokens) {
    const Vec s = ScoreTile<T, ROWS>(q, state->q_stride, block.k + t, state->head_dim);
    Store(scores + t * ROWS, s);
    JAX_PAGED_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      PrefetchRow(next.k[t + i], k_bytes);
      if constexpr (kWidth == 16 && ROWS == 8) PrefetchRowIntoL1(block.v[t + i], v_bytes);
    }
  }
  if (state->scale->edited) EditTile<ROWS>(*state, row0, start, padded, scores);
  // Tokens [all, end) are seen by all rows of the tile.
  int all = hidden[ROWS - 1];
  int end = visible[0] > all ? visible[0] : all;
  const uint64_t* seen = state->seen ? state->seen + row0 : nullptr;
  if (seen) {
    for (int r = 0; r < ROWS; ++r) HideScores(seen[r], start, padded, ROWS, scores + r);
    end = CommonRun(seen, ROWS, all, end);
  }
  float alpha[kWidth];
  [[maybe_unused]] const Vec largest =
      WeighTile<ROWS>(hidden, visible, all, end, start, padded, row0, scores, alpha, state);

  float* o = state->o + row0 * state->o_stride;
  bool as_words = false;
  if constexpr (kUsesDot<T>) {
    as_words = state->v_head_dim % (2 * kWidth) == 0 &&
               AreWordsEnough<ROWS>(largest, Load(state->l[row0 / 8]));
    if (as_words) {
      all += all % 2;
      end = end - end % 2 > all ? end - end % 2 : all;
      AddValueWords<T, ROWS>(scores, all, end, block.v, next.v, state->v_head_dim, alpha, o,
                             state->o_stride);
    }
  }
  if (!as_words) {
    AddValues<T, ROWS>({scores, ROWS, all, end}, block.v, next.v, state->v_head_dim, alpha, o,
                       state->o_stride);
  }
  if (hidden[0] < all || end < count) {
    AddEdges<T, ROWS>(scores, hidden, visible, seen, all, end, block.v, next.v, state->v_head_dim,
                      o, state->o_stride);
  }
}

// Rows of the tile that starts at row0 of num_rows.
inline int TileRows(int64_t num_rows, int64_t row0) {
  const int64_t rest = num_rows - row0;
  return rest > 4 ? 8 : (rest > 2 ? 4 : static_cast<int>(rest));
}

// Rows with the padding of the last tile.
inline int64_t DecodePaddedRows(int64_t num_rows) {
  int64_t rows = 0;
  while (rows < num_rows) rows += TileRows(num_rows, rows);
  return rows;
}

// Tokens in a block: K of a block is at most 8 KiB, so that two blocks of K and V fit L1.
inline int DecodeBlockTokens(int64_t token_bytes) {
  return static_cast<int>(Clamp(8192 / token_bytes / 16 * 16, 16, kKeyBlock));
}

inline void StartDecode(const AttentionParams& params, const LogitScale& scale, int padded,
                        const WorkerScratch& scratch, const Partial& part, DecodeState* state) {
  state->q = scratch.q;
  state->o = part.o;
  state->scores = scratch.scores;
  state->q_stride = scratch.q_stride;
  state->o_stride = part.stride;
  state->head_dim = params.head_dim;
  state->v_head_dim = params.v_head_dim;
  state->scale = &scale;
  for (int r = 0; r < padded; ++r) state->top[r] = state->m[r] = -kInfinity;
  for (auto& lanes : state->l) Store(lanes, Zero());
  state->seen = nullptr;
  state->key_offset = nullptr;
}

// ALiBi of a block that begins at `token`.
inline void SetDistances(const AlibiRow* alibi, int padded, int64_t token, const float* key_offset,
                         DecodeState* state) {
  state->key_offset = key_offset;
  for (int r = 0; r < padded; ++r) {
    state->slope[r] = alibi[r].slope;
    state->distance[r] = static_cast<float>(token - alibi[r].position);
  }
}

inline void FinishDecode(const DecodeState& state, int num_rows, const Partial& part) {
  for (int r = 0; r < num_rows;) {
    const int tile = TileRows(num_rows, r);
    for (int i = 0; i < tile && r + i < num_rows; ++i) {
      part.m[r + i] = state.m[r + i];
      part.l[r + i] = 0.0f;
      for (int lane = i; lane < kWidth; lane += tile) part.l[r + i] += state.l[r / 8][lane];
    }
    r += tile;
  }
}

// The split that a worker takes after one, whose first blocks are fetched in time: of each of its
// heads, whose items lie one behind the other. A null item: it is not known.
struct Upcoming {
  const WorkItem* item;
  KeySpan span;
  Upcoming OfHead(int head) const { return {item ? item + head : nullptr, span}; }
};

// A tile of so many rows, as a type.
template <int ROWS>
struct TileOf {
  static constexpr int kRows = ROWS;
};

// What a split of one KV head is, whatever its pages hold: blocks of T, of which the next BLOCKS -
// 1 are listed while one is used.
template <typename T, int BLOCKS>
struct HeadSplit {
  const AttentionParams* params;
  const Row* row;
  const WorkItem* item;
  const LogitScale* scale;
  const KeySpan* span;
  const WorkerScratch* scratch;
  const Partial* part;
  Upcoming upcoming;
  int64_t block_tokens;
  int num_rows;
  int padded;  // with the padding of the last tile
  int current;
  DecodeState state;
  // Tokens [first, limit) are seen, by packed row; padding rows see what the last one sees.
  int64_t first[kDecodeMaxRows], limit[kDecodeMaxRows];
  AlibiRow alibi[kDecodeMaxRows];
  float key_offset[kKeyBlock];  // of the block
  // Of the block: what packed row r sees is [hidden[r], visible[r]) of its listed tokens.
  int hidden[kDecodeMaxRows], visible[kDecodeMaxRows];
  KeyBlock<T> blocks[BLOCKS];

  // All that is given must live as long. Blocks have as many tokens as fit with words of `bytes`.
  void Start(const AttentionParams& call, const Row& of_row, const WorkItem& of_item,
             const LogitScale& logit_scale, const KeySpan& tokens, const Upcoming& then,
             const WorkerScratch& memory, const Partial& result, int64_t bytes) {
    params = &call;
    row = &of_row;
    item = &of_item;
    scale = &logit_scale;
    span = &tokens;
    scratch = &memory;
    part = &result;
    upcoming = then;
    block_tokens = DecodeBlockTokens(call.head_dim * bytes);
    num_rows = static_cast<int>(of_item.packed_end - of_item.packed_begin);
    padded = static_cast<int>(DecodePaddedRows(num_rows));
    current = 0;
    StartDecode(call, logit_scale, padded, memory, result, &state);
    SetRows(call, of_row, of_item, tokens, num_rows, padded, first, limit,
            logit_scale.alibi ? alibi : nullptr);
    for (int r = 0; r < padded; ++r) hidden[r] = 0;
    const int64_t element_bytes = ByteWidth(call.kv_dtype);
    for (int i = 0; i + 1 < BLOCKS; ++i) {
      if (!Gather(tokens.begin + i * block_tokens, i)) continue;
      for (int t = 0; t < blocks[i].count; ++t) {
        PrefetchRow(blocks[i].k[t], call.head_dim * element_bytes);
        PrefetchRow(blocks[i].v[t], call.v_head_dim * element_bytes);
      }
    }
  }

  // The end of a block that begins at `token`.
  int64_t EndOf(int64_t token) const { return Clamp(token + block_tokens, token, span->end); }

  // Where the block begins that is to be prefetched while that from `token` on is used.
  int64_t BeginAhead(int64_t token) const { return token + (BLOCKS - 1) * block_tokens; }

  // Lists the block that begins at `token`, which is a whole number of blocks from the begin of the
  // split: past its end, one of what comes next. Returns whether it has tokens.
  bool Gather(int64_t token, int to) {
    const WorkItem* of = item;
    KeySpan tokens = *span;
    if (token >= tokens.end) {
      const int64_t past = token - tokens.begin - RoundUp(tokens.end - tokens.begin, block_tokens);
      of = upcoming.item;
      tokens = upcoming.span;
      token = tokens.begin + past;
    }
    if (!of || token >= tokens.end) return false;
    GatherKeys(*params, of->row, of->kv_head, token, Clamp(token + block_tokens, token, tokens.end),
               *scratch, to, &blocks[to]);
    return blocks[to].count > 0;
  }

  // The block from `token` on, after those before it. `ahead` is to be prefetched, or it again.
  const KeyBlock<T>& TakeBlock(int64_t token, const KeyBlock<T>** ahead) {
    const KeyBlock<T>& block = blocks[current];
    const int unused = (current + BLOCKS - 1) % BLOCKS;
    current = (current + 1) % BLOCKS;
    *ahead = Gather(BeginAhead(token), unused) ? &blocks[unused] : &block;
    return block;
  }

  void CountSeen(const KeyBlock<T>& block) {
    CountBefore(block.count_before, block.begin, limit, padded, visible);
    if (row->window > 0) CountBefore(block.count_before, block.begin, first, padded, hidden);
  }

  void SetAlibi(const KeyBlock<T>& block, int64_t token) {
    if (!scale->alibi) return;
    ListOffsets(*params, *row, item->row, block, key_offset);
    SetDistances(alibi, padded, token, key_offset, &state);
  }

  // run(TileOf<rows>, first row) for each tile.
  template <typename Run>
  void EachTile(const Run& run) const {
    for (int r = 0; r < num_rows;) {
      const int tile = TileRows(num_rows, r);
      if (tile == 8) {
        run(TileOf<8>(), r);
      } else if (tile == 4) {
        run(TileOf<4>(), r);
      } else if (tile == 2) {
        run(TileOf<2>(), r);
      } else {
        run(TileOf<1>(), r);
      }
      r += tile;
    }
  }

  // Whether a row of a tile sees any token of the block.
  bool Sees(int row0, int rows) const { return visible[row0 + rows - 1] > hidden[row0]; }

  void Finish() const { FinishDecode(state, num_rows, *part); }
};

// Decode of a split of one KV head, block by block.
template <typename T>
class DecodeSplit {
 public:
  // All that is given must live until Finish, which brings the result into `part`.
  void Start(const AttentionParams& params, const Row& row, const WorkItem& item,
             const LogitScale& scale, const KeySpan& span, const Upcoming& upcoming,
             const WorkerScratch& scratch, const Partial& part) {
    staged_ = IsStaged(params);
    head_.Start(params, row, item, scale, span, upcoming, scratch, part, /*bytes=*/sizeof(T));
  }

  int64_t block_tokens() const { return head_.block_tokens; }

  // The block that begins at `token`, after those before it.
  void Step(int64_t token) {
    const KeyBlock<T>* next;
    const KeyBlock<T>* source = &head_.TakeBlock(token, &next);
    [[maybe_unused]] KeyBlock<T> floats;
    if constexpr (kSameType<T, float>) {
      if (staged_) {
        StageKeys(*head_.params, *head_.row, *head_.item, *head_.span, *source, *next,
                  head_.EndOf(token), *head_.scratch, &floats);
        source = next = &floats;
      }
    }
    const KeyBlock<T>& block = *source;
    head_.CountSeen(block);
    head_.state.seen = nullptr;
    if (HidesKeys(*head_.row, *head_.span, token + head_.block_tokens)) {
      SetSeen(*head_.params, *head_.row, *head_.item, *head_.span, head_.num_rows, head_.padded,
              block.count_before, block.begin, seen_);
      head_.state.seen = seen_;
    }
    head_.SetAlibi(block, token);
    head_.EachTile([&](auto tile, int r) {
      constexpr int kRows = decltype(tile)::kRows;
      if (!head_.Sees(r, kRows)) return;
      DecodeTile<T, kRows>(block, *next, head_.hidden + r, head_.visible + r, r, &head_.state);
    });
  }

  void Finish() const { head_.Finish(); }

 private:
  HeadSplit<T, 2> head_;
  bool staged_;
  uint64_t seen_[kDecodeMaxRows];  // of the block, in a tree
};

// A split of num_heads KV heads, each with an item, scratch and part of its own, block by block in
// turns.
template <typename Split>
void DecodeHeads(const AttentionParams& params, const Row& row, const WorkItem* items,
                 int num_heads, const LogitScale& scale, const KeySpan& span,
                 const Upcoming& upcoming, const WorkerScratch* scratch, const Partial* parts) {
  Split splits[kHeadsTogether];
  for (int i = 0; i < num_heads; ++i) {
    splits[i].Start(params, row, items[i], scale, span, upcoming.OfHead(i), scratch[i], parts[i]);
  }
  for (int64_t token = span.begin; token < span.end; token += splits[0].block_tokens()) {
    for (int i = 0; i < num_heads; ++i) splits[i].Step(token);
  }
  for (int i = 0; i < num_heads; ++i) splits[i].Finish();
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_ATTENTION_DECODE_H_
