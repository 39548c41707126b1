// SPDX-License-Identifier: Apache-2.0
//
// Vectors for AVX2 with FMA and F16C: eight floats.
#pragma once

#include <immintrin.h>

#include "target.h"

namespace ft::FT_TARGET {

struct Avx2Vector {
  static constexpr uint32_t kWidth = 8;
  static constexpr int kSingleOuts = 8;  // weight rows streamed together for one token row
  static constexpr int kOuts = 3, kRows = 4;

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

  static FT_INLINE float sum(Reg r) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(r), _mm256_extractf128_ps(r, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
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
