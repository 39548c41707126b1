// SPDX-License-Identifier: Apache-2.0
//
// Names of the instruction set that a file is compiled for. kernels/target.cpp is compiled once for each;
// FT_TARGET is the namespace that keeps the copies apart.
//
// Trap: an inline function of a shared namespace (std::min, say) that is not inlined ends up in the binary
// once, from any one of these files, and would bring AVX-512 code to a CPU without it. Therefore everything
// that is compiled for an instruction set lives in namespace ft::FT_TARGET and uses no templates or inline
// functions from outside; the ctest `no_shared_symbols` checks the objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef FT_TARGET
#error "FT_TARGET must name the instruction set"
#endif

#define FT_INLINE inline __attribute__((always_inline))
#define FT_LAMBDA __attribute__((always_inline))

namespace ft::FT_TARGET {

FT_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
FT_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
FT_INLINE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
FT_INLINE uint32_t round_up(uint32_t n, uint32_t step) { return (n + step - 1) / step * step; }

FT_INLINE float float_from_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
FT_INLINE uint16_t bf16_from_float(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16 | 0x40) : rounded);
}

// Multiplying by 2^112 moves the exponent bias from 15 to 127 and normalises subnormal numbers.
FT_INLINE float float_from_fp16(uint16_t h) {
  uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
  uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  uint32_t special = magnitude | 0x7f800000;
  uint32_t u = magnitude >= 0x0f800000 ? special : finite;
  return float_of(u | uint32_t(h & 0x8000) << 16);
}

}  // namespace ft::FT_TARGET
