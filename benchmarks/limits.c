// SPDX-License-Identifier: Apache-2.0

// The limits of this machine, measured by one thread; limits.py runs several at once.
// Built with -O3 -march=native, so that the widest vectors of the machine are used.
#include <stddef.h>
#include <stdint.h>

#define BLOCK 512  // bytes read at a time

// Brings in the block at p: 0 not at all, 1 past the caches, 2 into L2.
static inline void fetch(const char* p, int way) {
  for (int line = 0; line < BLOCK; line += 64) {
    if (way == 1) __builtin_prefetch(p + line, 0, 0);
    if (way == 2) __builtin_prefetch(p + line, 0, 2);
  }
}

static inline __attribute__((always_inline)) uint64_t read_by(const char* data, size_t bytes,
                                                              int streams, int way) {
  uint64_t lanes[BLOCK / 8] = {0};
  const size_t part = bytes / streams;
  for (size_t i = 0; i < part; i += BLOCK) {
    for (int s = 0; s < streams; ++s) {
      const char* const from = data + s * part + i;
      fetch(from + 4096, way);
      for (int lane = 0; lane < BLOCK / 8; ++lane) lanes[lane] ^= ((const uint64_t*)from)[lane];
    }
  }
  uint64_t all = 0;
  for (int lane = 0; lane < BLOCK / 8; ++lane) all ^= lanes[lane];
  return all;
}

// Reads `bytes` bytes (a multiple of 4 blocks); returns a value that depends on all of it. Which
// way is the fastest depends on the processor by a factor of three.
uint64_t read_all(const char* data, size_t bytes, int way) {
  switch (way) {
    case 0:
      return read_by(data, bytes, 1, 0);
    case 1:
      return read_by(data, bytes, 1, 1);
    case 2:
      return read_by(data, bytes, 1, 2);
    case 3:
      return read_by(data, bytes, 4, 0);
    case 4:
      return read_by(data, bytes, 4, 1);
    default:
      return read_by(data, bytes, 4, 2);
  }
}

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float vec __attribute__((vector_size(4 * WIDTH)));

// 2 * 12 * WIDTH * count floating-point operations in 12 independent chains of fused multiply-adds,
// which fill two units of latency up to 6. Named variables: an array would go to the stack.
float multiply_add(int64_t count, float a, float b) {
  vec x = {0}, y = {0};
  x += a;
  y += b;
  vec c0 = y, c1 = y + 1, c2 = y + 2, c3 = y + 3, c4 = y + 4, c5 = y + 5;
  vec c6 = y + 6, c7 = y + 7, c8 = y + 8, c9 = y + 9, c10 = y + 10, c11 = y + 11;
  for (int64_t n = 0; n < count; ++n) {
    c0 = c0 * x + y, c1 = c1 * x + y, c2 = c2 * x + y, c3 = c3 * x + y;
    c4 = c4 * x + y, c5 = c5 * x + y, c6 = c6 * x + y, c7 = c7 * x + y;
    c8 = c8 * x + y, c9 = c9 * x + y, c10 = c10 * x + y, c11 = c11 * x + y;
  }
  const vec sum = c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7 + c8 + c9 + c10 + c11;
  float all = 0;
  for (int lane = 0; lane < WIDTH; ++lane) all += sum[lane];
  return all;
}

int vector_width(void) { return WIDTH; }
