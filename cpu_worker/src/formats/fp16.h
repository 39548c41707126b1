// SPDX-License-Identifier: Apache-2.0
//
// FP16: one IEEE half for each weight, no scales.
#pragma once

#include "format.h"

namespace ft {

struct Fp16Format {
  static constexpr uint32_t kId = FT_FORMAT_FP16;
  static constexpr const char* kName = "fp16";
  static constexpr uint64_t kAlignment = 2;

  static constexpr uint64_t role_bytes(uint32_t role, uint64_t outs, uint64_t ins) {
    return role == FT_ROLE_GATE_UP || role == FT_ROLE_DOWN ? outs * ins * 2 : 0;
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
struct Fp16Format::Row {
  const uint16_t* weights;

  FT_INLINE Row(const Matrix& m, uint32_t out)
      : weights(static_cast<const uint16_t*>(m.weights) + size_t(out) * m.ins) {}

  FT_INLINE typename V::Reg load(uint32_t k) const { return V::load_fp16(weights + k); }

  FT_INLINE typename V::Reg load_partial(uint32_t k, uint32_t n) const {
    uint16_t tail[V::kWidth] = {};
    memcpy(tail, weights + k, n * sizeof(uint16_t));
    return V::load_fp16(tail);
  }

  FT_INLINE void prefetch(uint32_t k) const { __builtin_prefetch(weights + k, 0, 2); }
};

}  // namespace ft
#endif  // FT_TARGET
