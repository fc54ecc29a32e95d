// SPDX-License-Identifier: Apache-2.0

// The bf16 words that 8-bit codes stand for, as tables of their bytes. Every value of the three
// 8-bit dtypes is a bf16 exactly.

#ifndef JAX_PAGED_CPU_ISA_CODE_TABLES_H_
#define JAX_PAGED_CPU_ISA_CODE_TABLES_H_

#include <cstdint>

namespace jax_paged::cpu {

// low[c] and high[c] are the bytes of the word of code c.
struct CodeTable {
  alignas(64) uint8_t low[256];
  alignas(64) uint8_t high[256];
};

// count * 2^exponent, count < 256, as bf16 bits.
constexpr uint32_t CountedWord(uint32_t count, int exponent) {
  if (count == 0) return 0;
  int top = 0;
  while (count >> (top + 1)) ++top;
  const uint32_t fraction = (count << (7 - top)) & 0x7fu;
  return static_cast<uint32_t>(127 + exponent + top) << 7 | fraction;
}

// Of a float with `fraction_bits` after the exponent, whose exponent 1 means 2^first_exponent;
// magnitudes from `special` on have the words 0x7f80 | fraction, or NaN where there is no infinity.
constexpr CodeTable FloatCodeTable(int fraction_bits, int first_exponent, uint32_t special,
                                   bool has_infinity) {
  CodeTable table = {};
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t magnitude = code & 0x7fu;
    const uint32_t fraction = magnitude & ((1u << fraction_bits) - 1u);
    const int exponent = static_cast<int>(magnitude >> fraction_bits);
    uint32_t word = 0x7fc0u;
    if (magnitude >= special && has_infinity) {
      word = 0x7f80u | fraction << (7 - fraction_bits);
    } else if (magnitude < special) {
      const uint32_t count = exponent ? fraction | 1u << fraction_bits : fraction;
      const int above_first = exponent ? exponent - 1 : 0;
      word = CountedWord(count, first_exponent + above_first - fraction_bits);
    }
    word |= (code & 0x80u) << 8;
    table.low[code] = static_cast<uint8_t>(word);
    table.high[code] = static_cast<uint8_t>(word >> 8);
  }
  return table;
}

constexpr CodeTable IntCodeTable() {
  CodeTable table = {};
  for (int code = 0; code < 256; ++code) {
    const int value = code < 128 ? code : code - 256;
    const uint32_t word = value < 0 ? 0x8000u | CountedWord(static_cast<uint32_t>(-value), 0)
                                    : CountedWord(static_cast<uint32_t>(value), 0);
    table.low[code] = static_cast<uint8_t>(word);
    table.high[code] = static_cast<uint8_t>(word >> 8);
  }
  return table;
}

inline constexpr CodeTable kE4M3Table =
    FloatCodeTable(/*fraction_bits=*/3, /*first_exponent=*/-6, /*special=*/0x7f, false);
inline constexpr CodeTable kE5M2Table =
    FloatCodeTable(/*fraction_bits=*/2, /*first_exponent=*/-14, /*special=*/0x7c, true);
inline constexpr CodeTable kInt8Table = IntCodeTable();

}  // namespace jax_paged::cpu

#endif  // JAX_PAGED_CPU_ISA_CODE_TABLES_H_
