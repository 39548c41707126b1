// SPDX-License-Identifier: Apache-2.0
//
// Vectors for AVX-512 (F, BW, DQ, VL): sixteen floats.
#pragma once

#include <immintrin.h>

#include "target.h"

namespace ft::FT_TARGET {

// The four 128-bit lanes of r added together.
FT_INLINE __m128 add_lanes(__m512 r) {
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(r), _mm512_extractf32x8_ps(r, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// sum_lanes and sum_lanes4 add in the same order: element 0 + 2 and 1 + 3 of each lane, these two, the lanes.
FT_INLINE float sum_lanes(__m512 r) {
  r = _mm512_add_ps(r, _mm512_shuffle_ps(r, r, 0x4e));
  r = _mm512_add_ps(r, _mm512_shuffle_ps(r, r, 0xb1));
  return _mm_cvtss_f32(add_lanes(r));
}

FT_INLINE void sum_lanes4(const __m512* r, float* to) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
  __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xee);
  _mm_storeu_ps(to, add_lanes(_mm512_add_ps(low, high)));
}

struct Avx512Vector {
  static constexpr uint32_t kWidth = 16;
  static constexpr uint32_t kRows = 6, kWideRows = 2;
  static constexpr int kOuts = 4, kWideOuts = 8;

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
  static FT_INLINE float sum(Reg r) { return sum_lanes(r); }
  static FT_INLINE void sum4(const Reg* r, float* to) { sum_lanes4(r, to); }
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
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, a);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
}

}  // namespace ft::FT_TARGET
