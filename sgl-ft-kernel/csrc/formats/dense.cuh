// SPDX-License-Identifier: Apache-2.0
//
// Plain 16-bit weights and rows: BF16 and FP16. A format gives the kernels eight weights at a time as float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ft {

struct Bf16 {
  using Element = __nv_bfloat16;
  static constexpr uint32_t kBytes = 2;
  __device__ static float2 pair(uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
  __device__ static Element from_float(float value) { return __float2bfloat16(value); }
};

struct Fp16 {
  using Element = __half;
  static constexpr uint32_t kBytes = 2;
  __device__ static float2 pair(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
  __device__ static Element from_float(float value) { return __float2half(value); }
};

template <class Format>
__device__ inline void unpack(const uint4& bits, float (&value)[8]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 two = Format::pair(words[i]);
    value[2 * i] = two.x;
    value[2 * i + 1] = two.y;
  }
}

}  // namespace ft
