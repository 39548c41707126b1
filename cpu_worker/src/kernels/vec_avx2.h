// SPDX-License-Identifier: Apache-2.0
//
// Vectors for AVX2 with FMA and F16C: eight floats.
#pragma once

#include <immintrin.h>

#include "target.h"

namespace ft::FT_TARGET {

struct Avx2Vector {
  static constexpr uint32_t kWidth = 8;
  static constexpr uint32_t kRows = 3, kWideRows = 1;
  static constexpr int kOuts = 4, kWideOuts = 8;

  using Reg = __m256;

  static FT_INLINE Reg zero() { return _mm256_setzero_ps(); }
  static FT_INLINE Reg load(const float* p) { return _mm256_loadu_ps(p); }

  static FT_INLINE Reg load_bf16(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }

  static FT_INLINE Reg load_fp16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  static FT_INLINE Reg multiply_add(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }

  // sum and sum4 add in the same order: element 0 + 2 and 1 + 3 of each lane, these two, the lanes.
  static FT_INLINE float sum(Reg r) {
    r = _mm256_add_ps(r, _mm256_shuffle_ps(r, r, 0x4e));
    r = _mm256_add_ps(r, _mm256_shuffle_ps(r, r, 0xb1));
    return _mm_cvtss_f32(add_lanes(r));
  }

  static FT_INLINE void sum4(const Reg* r, float* to) {
    Reg ab = _mm256_add_ps(_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
    Reg cd = _mm256_add_ps(_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
    Reg low = _mm256_shuffle_ps(ab, cd, 0x44), high = _mm256_shuffle_ps(ab, cd, 0xee);
    _mm_storeu_ps(to, add_lanes(_mm256_add_ps(low, high)));
  }

 private:
  static FT_INLINE __m128 add_lanes(Reg r) {
    return _mm_add_ps(_mm256_castps256_ps128(r), _mm256_extractf128_ps(r, 1));
  }
};

using Vector = Avx2Vector;

FT_INLINE uint64_t sum_words(const void* data, size_t bytes) {
  const __m256i* p = static_cast<const __m256i*>(data);
  __m256i a = _mm256_setzero_si256(), b = a;
  for (size_t i = 0; i < bytes / 32; i += 2) {
    a = _mm256_add_epi64(a, _mm256_load_si256(p + i));
    b = _mm256_add_epi64(b, _mm256_load_si256(p + i + 1));
  }
  a = _mm256_add_epi64(a, b);
  return uint64_t(_mm256_extract_epi64(a, 0)) + uint64_t(_mm256_extract_epi64(a, 1)) +
         uint64_t(_mm256_extract_epi64(a, 2)) + uint64_t(_mm256_extract_epi64(a, 3));
}

}  // namespace ft::FT_TARGET
