// SPDX-License-Identifier: Apache-2.0
//
// Vectors for any CPU: eight floats that the compiler maps to what the baseline has (SSE2, NEON).
#pragma once

#include "target.h"

namespace ft::FT_TARGET {

struct PortableVector {
  static constexpr uint32_t kWidth = 8;
  static constexpr uint32_t kRows = 2, kWideRows = 1;
  static constexpr int kOuts = 2, kWideOuts = 2;

  struct Reg {
    float lane[kWidth];
  };

  static FT_INLINE Reg zero() { return Reg{}; }

  static FT_INLINE Reg load(const float* p) {
    Reg r;
    for (uint32_t i = 0; i < kWidth; i++) r.lane[i] = p[i];
    return r;
  }

  static FT_INLINE Reg load_bf16(const uint16_t* p) {
    Reg r;
    for (uint32_t i = 0; i < kWidth; i++) r.lane[i] = float_from_bf16(p[i]);
    return r;
  }

  static FT_INLINE Reg load_fp16(const uint16_t* p) {
    Reg r;
    for (uint32_t i = 0; i < kWidth; i++) r.lane[i] = float_from_fp16(p[i]);
    return r;
  }

  static FT_INLINE Reg multiply_add(Reg a, Reg b, Reg c) {
    for (uint32_t i = 0; i < kWidth; i++) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
  }

  static FT_INLINE float sum(Reg r) {
    float a = (r.lane[0] + r.lane[4]) + (r.lane[2] + r.lane[6]);
    float b = (r.lane[1] + r.lane[5]) + (r.lane[3] + r.lane[7]);
    return a + b;
  }

  static FT_INLINE void sum4(const Reg* r, float* to) {
    for (int i = 0; i < 4; i++) to[i] = sum(r[i]);
  }
};

using Vector = PortableVector;

FT_INLINE uint64_t sum_words(const void* data, size_t bytes) {
  const uint64_t* p = static_cast<const uint64_t*>(data);
  uint64_t sum[8] = {};
  for (size_t i = 0; i < bytes / 8; i += 8)
    for (int j = 0; j < 8; j++) sum[j] += p[i + j];
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

}  // namespace ft::FT_TARGET
