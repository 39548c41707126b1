// SPDX-License-Identifier: Apache-2.0
//
// FP32: one float for each weight, no scales.
#pragma once

#include "format.h"

namespace ft {

struct Fp32Format {
  static constexpr uint32_t kId = FT_FORMAT_FP32;
  static constexpr const char* kName = "fp32";
  static constexpr uint64_t kAlignment = 4;

  static constexpr uint64_t role_bytes(uint32_t role, uint64_t outs, uint64_t ins) {
    return role == FT_ROLE_GATE_UP || role == FT_ROLE_DOWN ? outs * ins * 4 : 0;
  }
  static constexpr bool fits(uint64_t, uint64_t) { return true; }

  template <class V>
  struct Row;
};

}  // namespace ft

#ifdef FT_TARGET

#include "../kernels/target.h"

namespace ft {

template <class V>
struct Fp32Format::Row {
  const float* weights;

  FT_INLINE Row(const Matrix& m, uint32_t out)
      : weights(static_cast<const float*>(m.weights) + size_t(out) * m.ins) {}

  FT_INLINE typename V::Reg load(uint32_t k) const { return V::load(weights + k); }

  FT_INLINE typename V::Reg load_partial(uint32_t k, uint32_t n) const {
    float tail[V::kWidth] = {};
    memcpy(tail, weights + k, n * sizeof(float));
    return V::load(tail);
  }

  FT_INLINE void prefetch(uint32_t k) const { __builtin_prefetch(weights + k, 0, 2); }
};

}  // namespace ft
#endif  // FT_TARGET
