// The limits of this machine, measured by one thread; limits.py runs several at once.
// Built with -O3 -march=native, so that the widest vectors of the machine are used.
#include <stddef.h>
#include <stdint.h>

// Reads `bytes` bytes (a multiple of 512) `rounds` times; returns a value that depends on all of
// it.
uint64_t read_all(const uint64_t* data, size_t bytes, int rounds) {
  uint64_t lanes[64] = {0};
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < bytes / 8; i += 64) {
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

// 2 * 12 * WIDTH * count floating-point operations in 12 independent chains of fused multiply-adds.
float multiply_add(int64_t count, float a, float b) {
  vec x = {0}, acc[12];
  x += a;
  for (int i = 0; i < 12; ++i) acc[i] = x + (float)i;
  for (int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) acc[i] = acc[i] * x + b;
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) __asm__ volatile("" : "+x"(acc[i]));
  }
  float all = 0;
  for (int i = 0; i < 12; ++i) {
    for (int lane = 0; lane < WIDTH; ++lane) all += acc[i][lane];
  }
  return all;
}

int vector_width(void) { return WIDTH; }
