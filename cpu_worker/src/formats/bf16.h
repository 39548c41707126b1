// SPDX-License-Identifier: Apache-2.0
//
// BF16: one bfloat16 for each weight, no scales.
#pragma once

#include "format.h"

namespace ft {

struct Bf16Format {
  static constexpr uint32_t kId = FT_FORMAT_BF16;
  static constexpr const char* kName = "bf16";
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
struct Bf16Format::Row {
  const uint16_t* weights;

  FT_INLINE Row(const Matrix& m, uint32_t out)
      : weights(static_cast<const uint16_t*>(m.weights) + size_t(out) * m.ins) {}

  FT_INLINE typename V::Reg load(uint32_t k) const { return V::load_bf16(weights + k); }

  FT_INLINE typename V::Reg load_partial(uint32_t k, uint32_t n) const {
    uint16_t tail[V::kWidth] = {};
    memcpy(tail, weights + k, n * sizeof(uint16_t));
    return V::load_bf16(tail);
  }

  FT_INLINE void prefetch(uint32_t k) const { __builtin_prefetch(weights + k, 0, 2); }
};

}  // namespace ft

#ifdef __AVX512BF16__
#include "bf16_dot.h"
#ifdef __AMX_BF16__
#include "bf16_amx.h"
#endif

namespace ft::FT_TARGET {

template <>
struct NativeKernels<Bf16Format> {
  static KernelChoice choose(uint32_t row_dtype, [[maybe_unused]] uint32_t hidden,
                             [[maybe_unused]] uint32_t intermediate) {
    if (row_dtype != FT_DTYPE_BF16) return {nullptr, nullptr, UINT32_MAX};
#ifdef __AMX_BF16__
    if (tiles_fit(hidden, intermediate)) return {&kBf16DotKernels, &kAmxKernels, kAmxRows};
#endif
    return {&kBf16DotKernels, nullptr, UINT32_MAX};
  }
};

}  // namespace ft::FT_TARGET
#endif  // __AVX512BF16__
#endif  // FT_TARGET
