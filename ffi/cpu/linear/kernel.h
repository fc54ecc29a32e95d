// SPDX-License-Identifier: Apache-2.0

// out = x w^T, the dense projection of a few rows (many.h has many). Included by inst/<isa>.cc
// inside its target region (isa.h), after dot.h.
//
//   tile     1, 2, 4 or 8 rows of x times kWidth / rows rows of w, summed over a depth chunk in
//            registers (AddScores: the same step as the logits of decode)
//   block    some rows of w, so few that a chunk of them stays in L2; all tiles of x pass over it,
//            so w is read from memory once
//   chunk    of the depth: each lane has a sum of it, and these are added up in a tree. Tiles of 8
//            rows take one chunk after the other
//   part     of a chunk, so much that 8 rows of x stay in L1. Some columns pass over it, whose sums
//            go on with the next one
//   codes    8-bit weights become floats (or bf16 words) in registers, in each tile anew. Where
//            that is slow (kWidensSlowly), it happens once for all tiles, a block and chunk at a
//            time in a panel that L2 holds. The caller multiplies the sums by the scales of
//            outputs; where blocks of the depth have scales, a chunk is a block, and is multiplied
//            when it is added
//
// Bound by reading w up to some eight rows, by multiply-adds beyond: per 16 of them 10 vector
// loads.

#ifndef JAX_PAGED_CPU_LINEAR_KERNEL_H_
#define JAX_PAGED_CPU_LINEAR_KERNEL_H_

namespace jax_paged::cpu::JAX_PAGED_ISA {

// The chunks of a depth: 5 KiB of a row of x at most.
template <typename T>
int64_t ChunkDepth(int64_t depth) {
  return LinearChunkDepth(depth, kUsesDot<T> ? kLinearDepth : kLinearDepth / 2);
}

// The parts of a chunk, for a tile of so many rows: 20 KiB of x at most.
template <typename T, int ROWS>
int64_t PartDepth(int64_t chunk) {
  return LinearChunkDepth(chunk, (kUsesDot<T> ? 2 * kWordsPart : kLinearPart) * 8 / ROWS);
}

// Rows of x as the tiles want them: [PadLinearRows(num_rows), x_stride] floats (or bf16 words).
template <typename T>
void LoadLinearRows(const void* x, int64_t begin, int64_t end, int64_t num_rows, int64_t depth,
                    float* rows, int64_t x_stride) {
  for (int64_t r = begin; r < end; ++r) {
    const T* from = r < num_rows ? static_cast<const T*>(x) + r * depth : nullptr;
    LoadQuery(from, depth, 1.0f, rows + r * x_stride, x_stride);
  }
}

// The same for 8-bit w: [PadLinearRows(num_rows), x_stride] floats in the order of x.
template <typename T>
void LoadPlainRows(const void* x, int64_t begin, int64_t end, int64_t num_rows, int64_t depth,
                   float* rows, int64_t x_stride) {
  for (int64_t r = begin; r < end; ++r) {
    const T* from = static_cast<const T*>(x) + r * depth;
    float* to = rows + r * x_stride;
    int64_t d = 0;
    for (; r < num_rows && d < depth; d += kWidth) Store(to + d, LoadTail(from + d, depth - d));
    for (; d < x_stride; d += kWidth) Store(to + d, Zero());
  }
}

// A panel of `depth` (a multiple of kHalf) of `count` rows of w, whose rows end with zeros.
template <typename T>
void StagePanel(const T* w, int64_t w_stride, int64_t depth, int64_t count, float* panel,
                int64_t panel_stride) {
  for (int64_t n = 0; n < count; ++n) {
    const T* from = w + n * w_stride;
    float* to = panel + n * panel_stride;
    for (int64_t d = 0; d < depth; d += kWidth) Store(to + d, LoadTail(from + d, depth - d));
  }
}

// Stores or, where d > 0, adds the sums of a tile over the chunk that begins at d, of rows n of w.
JAX_PAGED_INLINE void AddLinearChunk(Vec sum, int64_t d, const LinearBlocks& blocks, int64_t n,
                                     float* to) {
  if (blocks.scale) {
    const Vec scale = Set1(blocks.At(n, d));
    Store(to, d > 0 ? Fma(sum, scale, Load(to)) : Mul(sum, scale));
  } else {
    Store(to, d > 0 ? Add(Load(to), sum) : sum);
  }
}

// sums[n * ROWS + r] (+)= x[r] . w[n] over the depth [begin, end), a chunk at a time, for n <
// count, rounded up to a tile. Adds where begin > 0. w starts at depth `begin`. What STREAMS is in
// no cache: several rows of x take so long that w comes in row by row, from 16 rows ahead.
template <typename T, int ROWS, bool STREAMS>
void LinearTiles(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t begin,
                 int64_t end, int64_t chunk, int64_t count, const LinearBlocks& blocks,
                 float* sums) {
  constexpr int kColumns = kWidth / ROWS;
  constexpr Fetches kFetches = STREAMS ? Fetches::kOfEach : Fetches::kNothing;
  const int64_t part = PartDepth<T, ROWS>(chunk), ahead = 16 * w_stride * int64_t{sizeof(T)};
  for (int64_t first = 0; first < count; first += kLinearColumns) {
    const int64_t last = Clamp(count, 0, first + kLinearColumns);
    for (int64_t d = begin; d < end; d += chunk) {
      const int64_t until = Clamp(end, 0, d + chunk);
      Vec sum_of[kLinearColumns / kColumns][kWidth];
      for (int64_t p = d; p < until; p += part) {
        const bool is_last = until - p <= part;
        for (int64_t n = first; n < last; n += kColumns) {
          const T* rows[kColumns];
          JAX_PAGED_UNROLL
          for (int t = 0; t < kColumns; ++t) {
            rows[t] = w + (n + t < count ? n + t : count - 1) * w_stride + (p - begin);
          }
          Vec* const kept = sum_of[(n - first) / kColumns];
          Vec sum[kWidth];
          JAX_PAGED_UNROLL
          for (int i = 0; i < kWidth; ++i) sum[i] = p > d ? kept[i] : Zero();
          AddScores<T, ROWS, kColumns, kFetches>(x + (kUsesDot<T> ? p / 2 : p), x_stride, rows,
                                                 is_last ? until - p : part, ahead, sum);
          if (is_last) {
            AddLinearChunk(SumEach(sum), d, blocks, n, sums + n * ROWS);
          } else {
            JAX_PAGED_UNROLL
            for (int i = 0; i < kWidth; ++i) kept[i] = sum[i];
          }
        }
      }
    }
  }
}

// How many bytes ahead w is fetched for one row of x: of one row of f32 at a time 16 KiB measures
// best, else 8 KiB, and for bf16 words it depends on the processor (docs/performance.md,
// Projections and experts).
template <typename T, int ROWS>
int64_t StreamAhead() {
  if constexpr (kUsesDot<T> && sizeof(T) == 2) return WordsAhead();
  return sizeof(T) == 4 && ROWS == 1 ? 16 << 10 : 8 << 10;
}

// The same bits for one row of x, of w that is in no cache: ROWS rows of w at a time, each over the
// whole depth.
template <typename T, int ROWS, Fetches FETCHES>
void LinearStream(const float* x, const T* w, int64_t w_stride, int64_t begin, int64_t end,
                  int64_t chunk, int64_t count, const LinearBlocks& blocks, float* sums) {
  constexpr int kChunks = 8;  // at a time, so that their sums stay in L1
  const int64_t ahead = StreamAhead<T, ROWS>();
  for (int64_t n = 0; n < count; n += kWidth) {
    for (int64_t from = begin; from < end; from += kChunks * chunk) {
      const int64_t limit = end - from < kChunks * chunk ? end : from + kChunks * chunk;
      Vec sum[kChunks][kWidth];
      for (int t = 0; t < kWidth; t += ROWS) {
        Vec* to = &sum[0][t];
        for (int64_t d = from; d < limit; d += chunk, to += kWidth) {
          const T* rows[ROWS];
          for (int i = 0; i < ROWS; ++i) {
            const int64_t row = n + t + i < count ? n + t + i : count - 1;
            rows[i] = w + row * w_stride + (d - begin);
          }
          // A single stream is as far as the chunks before this one have read.
          const int64_t read = FETCHES == Fetches::kOneStream ? (ROWS - 1) * (d - begin) : 0;
          ScoreSums<T, 1, ROWS, FETCHES>(x + (kUsesDot<T> ? d / 2 : d), /*q_stride=*/0, rows,
                                         limit - d < chunk ? limit - d : chunk,
                                         ahead + read * int64_t{sizeof(T)}, to);
        }
      }
      const Vec* of_chunk = sum[0];
      for (int64_t d = from; d < limit; d += chunk, of_chunk += kWidth) {
        AddLinearChunk(SumEach(of_chunk), d, blocks, n, sums + n);
      }
    }
  }
}

// Rows of w that are read at a time as one stream. Each addition of a row waits for the one before,
// which takes longer than reading where a vector of sums is of few bytes.
template <typename T>
constexpr int kStreamRows = sizeof(T) == 1 ? 4 : (sizeof(T) == 2 && !kUsesDot<T> ? 2 : 1);

// The same as this processor reads memory best.
template <typename T>
void LinearStream(const float* x, const T* w, int64_t w_stride, int64_t begin, int64_t end,
                  int64_t chunk, int64_t count, const LinearBlocks& blocks, float* sums) {
  (ReadsManyStreams() ? LinearStream<T, 4, Fetches::kOfEach>
                      : LinearStream<T, kStreamRows<T>, Fetches::kOneStream>)(x, w, w_stride, begin,
                                                                              end, chunk, count,
                                                                              blocks, sums);
}

// The products of the rows of a tile of x with a chunk of rows of w.
template <typename T, bool STREAMS>
void LinearTile(int tile, const float* x, int64_t x_stride, const T* w, int64_t w_stride,
                int64_t begin, int64_t end, int64_t chunk, int64_t count,
                const LinearBlocks& blocks, float* sums) {
  if (tile == 8) {
    LinearTiles<T, 8, STREAMS>(x, x_stride, w, w_stride, begin, end, chunk, count, blocks, sums);
  } else if (tile == 4) {
    LinearTiles<T, 4, STREAMS>(x, x_stride, w, w_stride, begin, end, chunk, count, blocks, sums);
  } else if (tile == 2) {
    LinearTiles<T, 2, STREAMS>(x, x_stride, w, w_stride, begin, end, chunk, count, blocks, sums);
  } else if constexpr (STREAMS) {
    LinearStream<T>(x, w, w_stride, begin, end, chunk, count, blocks, sums);
  } else {
    LinearTiles<T, 1, false>(x, x_stride, w, w_stride, begin, end, chunk, count, blocks, sums);
  }
}

// The products of all rows of x with a chunk of rows of w. Where w is COLD the first tile of x
// brings it in.
template <typename T, bool COLD>
void LinearChunk(const float* x, int64_t x_stride, int64_t num_rows, const T* w, int64_t w_stride,
                 int64_t begin, int64_t end, int64_t chunk, int64_t count,
                 const LinearBlocks& blocks, float* sums) {
  const int64_t padded = RoundUp(count, kLinearColumns);
  for (int64_t r = 0; r < num_rows;) {
    const int tile = LinearTileRows(num_rows, r);
    const float* const from = x + r * x_stride;
    float* const to = sums + r * padded;
    if (r == 0) {
      LinearTile<T, COLD>(tile, from, x_stride, w, w_stride, begin, end, chunk, count, blocks, to);
    } else {
      LinearTile<T, false>(tile, from, x_stride, w, w_stride, begin, end, chunk, count, blocks, to);
    }
    r += tile;
  }
}

// The products of all rows of x with rows of w, into sums: for each tile of x that begins at row r,
// [count rounded up to kLinearColumns, rows of the tile] at r * that count. The order of additions
// is the same for any number of rows. `panel` (LinearPanelFloats) is for w of 8 bits where that
// becomes floats once for all rows.
template <typename T>
void LinearSums(const float* x, int64_t x_stride, int64_t num_rows, const void* weights,
                int64_t depth, int64_t count, const LinearBlocks& blocks, float* panel,
                float* sums) {
  const T* w = static_cast<const T*>(weights);
  constexpr bool kStages = kWidensSlowly && sizeof(T) == 1;
  const bool stages = kStages && num_rows > kUnstagedRows;
  // Of the depth: what is added at once, and what is staged at once.
  const int64_t span = ChunkDepth<T>(depth);
  const int64_t chunk = blocks.scale ? kScaleBlock : span;
  const int64_t step = num_rows <= 4 ? depth : blocks.scale ? RoundUp(span, chunk) : span;
  for (int64_t begin = 0; begin < depth; begin += step) {
    const int64_t end = depth - begin < step ? depth : begin + step;
    if (!stages) {
      LinearChunk<T, true>(x, x_stride, num_rows, w + begin, depth, begin, end, chunk, count,
                           blocks, sums);
    } else if constexpr (kStages) {
      const int64_t panel_stride = Clamp(step, 0, RoundUp(depth, kPadFloats));
      StagePanel<T>(w + begin, depth, end - begin, count, panel, panel_stride);
      LinearChunk<float, false>(x, x_stride, num_rows, panel, panel_stride, begin, end, chunk,
                                count, blocks, sums);
    }
  }
}

// x / (1 + 2^-z): x sigmoid(z), where z is in units of log2(e).
JAX_PAGED_INLINE Vec TimesSigmoid(Vec x, Vec z) {
  // Where 2^126 and more would stand, x over it is 0 as good as.
  const Vec exponent = MaxSkipNan(Set1(-126.0f), z);
  return Div(x, Add(Set1(1.0f), Exp2(Mul(exponent, Set1(-1.0f)))));
}

// x Phi(x) = max(x, 0) - a Phi(-a), a = |x|.
JAX_PAGED_INLINE Vec Gelu(Vec x) {
  const Vec a = MinKeepNan(Set1(kGeluLast), MaxSkipNan(x, Mul(x, Set1(-1.0f))));
  const Vec s = Div(Set1(1.0f), Fma(a, Set1(kGeluShift), Set1(1.0f)));
  Vec p = Set1(GeluPower(kGeluPowers - 1));
  JAX_PAGED_UNROLL
  for (int k = kGeluPowers - 2; k >= 0; --k) p = Fma(p, s, Set1(GeluPower(k)));
  const Vec tail = Mul(Exp2(Mul(Mul(a, Set1(kGeluSquare)), a)), p);
  return Fma(Mul(a, Set1(-1.0f)), tail, MaxSkipNan(Zero(), x));
}

template <Activation ACTIVATION>
void GateSumsBy(float limit, const float* up, int64_t count, float* gate) {
  for (int64_t i = 0; i < count; i += kWidth) {
    Vec x = Load(gate + i), y = Load(up + i);
    if constexpr (ACTIVATION == Activation::kSilu) {
      x = TimesSigmoid(x, Mul(x, Set1(kLog2E)));
    } else if constexpr (ACTIVATION == Activation::kGelu) {
      x = Gelu(x);
    } else if constexpr (ACTIVATION == Activation::kGeluTanh) {
      const Vec slope = Fma(Mul(x, Set1(kGeluTanh[1])), x, Set1(kGeluTanh[0]));
      x = TimesSigmoid(x, Mul(x, slope));
    } else {
      x = MinKeepNan(Set1(limit), x);
      x = TimesSigmoid(x, Mul(x, Set1(kSwigluOaiAlpha)));
      y = MinKeepNan(Set1(limit), y);
      y = Add(MaxKeepNan(Set1(-limit), y), Set1(1.0f));
    }
    Store(gate + i, Mul(x, y));
  }
}

// gate = activation(gate) * up, for `count` sums (a multiple of kWidth);
// jax_paged/ops/activations.py has the formulas.
inline void GateSums(Activation activation, float limit, const float* up, int64_t count,
                     float* gate) {
  switch (activation) {
    case Activation::kSilu:
      return GateSumsBy<Activation::kSilu>(limit, up, count, gate);
    case Activation::kGelu:
      return GateSumsBy<Activation::kGelu>(limit, up, count, gate);
    case Activation::kGeluTanh:
      return GateSumsBy<Activation::kGeluTanh>(limit, up, count, gate);
    case Activation::kSwigluOai:
      return GateSumsBy<Activation::kSwigluOai>(limit, up, count, gate);
  }
}

// kWidth columns of the sums of tiles of 8 rows, a vector for each of kWidth rows. Where that is 16
// these are two tiles, `more` floats apart.
template <typename F>
JAX_PAGED_INLINE void TransposeTiles(const F* sums, int64_t more, Vec* rows) {
  JAX_PAGED_UNROLL
  for (int n = 0; n < kWidth; ++n) {
    if constexpr (kWidth == 8) {
      rows[n] = Load(sums + n * 8);
    } else {
      rows[n] = LoadHalves(sums + n * 8, sums + n * 8 + more);
    }
  }
  Transpose(rows);
}

// Rows of `sums` (LinearSums, or with most = 1 PackedSums) to out[num_rows, out_stride], rounded
// once.
template <typename T>
void StoreRows(const float* sums, int64_t num_rows, int64_t most, int64_t count, int64_t out_stride,
               T* out) {
  const int64_t padded = RoundUp(count, kLinearColumns);
  for (int64_t begin = 0; begin < num_rows;) {
    const int tile = LinearTileRows(num_rows, begin, most);
    const float* const from = sums + begin * padded;
    T* const to = out + begin * out_stride;
    const bool two = kWidth == 16 && tile == 8 && num_rows - begin > 8 &&
                     LinearTileRows(num_rows, begin + 8) == 8;
    const int64_t rows = Clamp(two ? 16 : tile, 0, num_rows - begin);
    int64_t n = 0;
    if (tile == 8) {
      for (; n + kWidth <= count; n += kWidth) {
        Vec of_rows[kWidth];
        TransposeTiles(from + n * 8, two ? 8 * padded : 0, of_rows);
        for (int64_t r = 0; r < rows; ++r) Store(to + r * out_stride + n, of_rows[r]);
      }
    } else if (tile == 1) {
      for (; n + kWidth <= count; n += kWidth) Store(to + n, Load(from + n));
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float* const of_tile = r < 8 ? from + r : from + 8 * padded + r - 8;
      for (int64_t i = n; i < count; ++i) FromFloat(of_tile[i * tile], to + r * out_stride + i);
    }
    begin += two ? 16 : tile;
  }
}

inline void StoreLinearSums(const float* sums, int64_t num_rows, int64_t most, int64_t count,
                            int64_t out_stride, Dtype dtype, void* out) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return StoreRows(sums, num_rows, most, count, out_stride, static_cast<BFloat16*>(out));
    case Dtype::kFloat16:
      return StoreRows(sums, num_rows, most, count, out_stride, static_cast<Float16*>(out));
    case Dtype::kFloat32:
      return StoreRows(sums, num_rows, most, count, out_stride, static_cast<float*>(out));
    default:  // 8-bit: not a dtype of outputs
      return;
  }
}

}  // namespace jax_paged::cpu::JAX_PAGED_ISA

#endif  // JAX_PAGED_CPU_LINEAR_KERNEL_H_
