// SPDX-License-Identifier: Apache-2.0
//
// Vectors for any CPU: eight floats in the compiler's vector type, which it maps to what the baseline has
// (SSE2, NEON).
#pragma once

#include "target.h"

namespace ft::FT_TARGET {

struct PortableVector {
  static constexpr uint32_t kWidth = 8;
  static constexpr uint32_t kRows = 2, kWideRows = 1;
  static constexpr int kOuts = 2, kWideOuts = 4;

  typedef float Reg __attribute__((vector_size(32)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  typedef uint16_t Halves __attribute__((vector_size(16)));

  static FT_INLINE Reg zero() { return Reg{}; }

  static FT_INLINE Reg load(const float* p) {
    Reg r;
    memcpy(&r, p, sizeof(r));
    return r;
  }

  static FT_INLINE Reg load_bf16(const uint16_t* p) { return (Reg)(load_words(p) << 16); }

  // As float_from_fp16.
  static FT_INLINE Reg load_fp16(const uint16_t* p) {
    Words half = load_words(p);
    Words magnitude = (half & 0x7fff) << 13;
    Words finite = (Words)((Reg)magnitude * 0x1p112f);
    Words is_special = (Words)(magnitude >= 0x0f800000);
    Words value = (is_special & (magnitude | 0x7f800000)) | (~is_special & finite);
    return (Reg)(value | (half & 0x8000) << 16);
  }

  static FT_INLINE Reg multiply_add(Reg a, Reg b, Reg c) { return c + a * b; }

  static FT_INLINE float sum(Reg r) {
    return ((r[0] + r[4]) + (r[2] + r[6])) + ((r[1] + r[5]) + (r[3] + r[7]));
  }

  static FT_INLINE void sum4(const Reg* r, float* to) {
    for (int i = 0; i < 4; i++) to[i] = sum(r[i]);
  }

 private:
  static FT_INLINE Words load_words(const uint16_t* p) {
    Halves h;
    memcpy(&h, p, sizeof(h));
    return __builtin_convertvector(h, Words);
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
