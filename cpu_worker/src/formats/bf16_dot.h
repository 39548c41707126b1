// SPDX-License-Identifier: Apache-2.0
//
// BF16 weights times BF16 rows on AVX-512 BF16: two products for each float32 lane and instruction.
// Used only where rows are BF16, as stock BF16 kernels do; h is rounded to BF16 between the projections.
#pragma once

#include <immintrin.h>

#include "../kernels/row_kernels.h"
#include "../kernels/vec_avx512.h"
#include "bf16.h"

namespace ft::FT_TARGET {

struct Bf16Dot {
  using Element = uint16_t;
  using Weights = __m512bh;
  using Acc = __m512;
  static constexpr uint32_t kStep = 32;
  static constexpr uint32_t kRows = 6, kWideRows = 2;
  static constexpr int kOuts = 4, kWideOuts = 8;

  struct Row {
    const uint16_t* weights;

    FT_INLINE Row(const Matrix& m, uint32_t out)
        : weights(static_cast<const uint16_t*>(m.weights) + size_t(out) * m.ins) {}
    FT_INLINE Weights load(uint32_t k) const { return load_rows(weights + k); }
    FT_INLINE Weights load_partial(uint32_t k, uint32_t n) const {
      return (__m512bh)_mm512_maskz_loadu_epi16((1u << n) - 1, weights + k);
    }
    FT_INLINE void prefetch(uint32_t k) const { __builtin_prefetch(weights + k, 0, 2); }
  };

  static FT_INLINE Acc zero() { return _mm512_setzero_ps(); }
  static FT_INLINE __m512bh load_rows(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static FT_INLINE Acc multiply_add(Weights w, __m512bh x, Acc acc) { return _mm512_dpbf16_ps(acc, w, x); }
  static FT_INLINE float sum(Acc acc) { return sum_lanes(acc); }
  static FT_INLINE void sum4(const Acc* acc, float* to) { sum_lanes4(acc, to); }
};

inline constexpr KernelSet kBf16DotKernels = RowKernels<Bf16Dot>::set("bf16_dot");

}  // namespace ft::FT_TARGET
