// SPDX-License-Identifier: Apache-2.0
//
// Vectors for AVX-512 (F, BW, DQ, VL): sixteen floats.
#pragma once

#include <immintrin.h>

#include "target.h"

namespace ft::FT_TARGET {

struct Avx512Vector {
  static constexpr uint32_t kWidth = 16;
  static constexpr int kSingleOuts = 8;  // weight rows streamed together for one token row
  static constexpr int kOuts = 4, kRows = 6;

  using Reg = __m512;

  static FT_INLINE Reg zero() { return _mm512_setzero_ps(); }
  static FT_INLINE Reg load(const float* p) { return _mm512_loadu_ps(p); }

  static FT_INLINE Reg load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }

  static FT_INLINE Reg load_fp16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  static FT_INLINE Reg multiply_add(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static FT_INLINE float sum(Reg r) { return _mm512_reduce_add_ps(r); }
};

using Vector = Avx512Vector;

FT_INLINE uint64_t sum_words(const void* data, size_t bytes) {
  const __m512i* p = static_cast<const __m512i*>(data);
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  size_t i = 0;
  for (; i + 4 <= bytes / 64; i += 4) {
    a = _mm512_add_epi64(a, _mm512_load_si512(p + i));
    b = _mm512_add_epi64(b, _mm512_load_si512(p + i + 1));
    c = _mm512_add_epi64(c, _mm512_load_si512(p + i + 2));
    d = _mm512_add_epi64(d, _mm512_load_si512(p + i + 3));
  }
  for (; i < bytes / 64; i++) a = _mm512_add_epi64(a, _mm512_load_si512(p + i));
  a = _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d));
  return uint64_t(_mm512_reduce_add_epi64(a));
}

}  // namespace ft::FT_TARGET
