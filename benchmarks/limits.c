// SPDX-License-Identifier: Apache-2.0

// The limits of this machine, measured by one thread; limits.py runs several at once.
// Built with -O3 -march=native, so that the widest vectors of the machine are used.
#include <stddef.h>
#include <stdint.h>

// Reads `bytes` bytes (a multiple of 512) `rounds` times; returns a value that depends on all of
// it. Prefetched by hand: there are virtual machines where that nearly doubles the rate.
uint64_t read_all(const uint64_t* data, size_t bytes, int rounds) {
  uint64_t lanes[64] = {0};
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < bytes / 8; i += 64) {
      for (int line = 0; line < 512; line += 64) {
        __builtin_prefetch((const char*)(data + i) + 4096 + line, 0, 0);
      }
      for (int lane = 0; lane < 64; ++lane) lanes[lane] ^= data[i + lane];
    }
    __asm__ volatile("" ::: "memory");
  }
  uint64_t all = 0;
  for (int lane = 0; lane < 64; ++lane) all ^= lanes[lane];
  return all;
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
