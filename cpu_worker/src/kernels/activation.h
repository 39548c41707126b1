// SPDX-License-Identifier: Apache-2.0
//
// h = act(gate) * up over contiguous features, float32. Plain loops that the compiler vectorises.
#pragma once

#include "kernels.h"
#include "target.h"

namespace ft::FT_TARGET {

// e^x to about 1 unit in the last place; clamped where float32 over- or underflows.
// n = round(x / ln 2) by the magic-number addition, then a polynomial on [-ln2/2, ln2/2] (minimax, Cephes).
FT_INLINE float exponential(float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  float shifted = x * 1.44269504f + kMagic;
  float n = shifted - kMagic;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t power = (bits_of(shifted) - bits_of(kMagic) + 127u) << 23;
  return p * float_of(power);
}

FT_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
FT_INLINE float at_most(float x, float limit) { return x > limit ? limit : x; }
FT_INLINE float at_least(float x, float limit) { return x < limit ? limit : x; }
FT_INLINE float silu(float x) { return x * sigmoid(x); }
FT_INLINE float gelu(float x) { return 0.5f * x * (1.0f + __builtin_erff(x * 0.707106781f)); }
// 0.5 (1 + tanh z) = sigmoid(2 z)
FT_INLINE float gelu_tanh(float x) { return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); }
FT_INLINE float relu2(float x) { return x > 0.0f ? x * x : x * 0.0f; }

// gate[i] = act(gate[i]) * up[i], or act(gate[i]) when not gated.
template <class Function>
FT_INLINE void apply(const Activation& a, Function act, float* gate, const float* up, uint32_t n) {
  if (a.gated) {
    for (uint32_t i = 0; i < n; i++) gate[i] = act(gate[i]) * up[i];
  } else {
    for (uint32_t i = 0; i < n; i++) gate[i] = act(gate[i]);
  }
}

FT_INLINE void clamp_inputs(const Activation& a, float* gate, float* up, uint32_t n) {
  float limit = a.limit;
  for (uint32_t i = 0; i < n; i++) gate[i] = at_most(gate[i], limit);
  if (!a.gated) return;
  for (uint32_t i = 0; i < n; i++) up[i] = at_least(at_most(up[i], limit), -limit);
}

// In place: gate becomes h. `up` is read only when gated (it is clamped in place).
inline void activate(const Activation& a, float* gate, float* up, uint32_t n) {
  bool clamps = a.kind == FT_ACT_SILU || a.kind == FT_ACT_SWIGLU_OAI;
  if (clamps && a.limit > 0) clamp_inputs(a, gate, up, n);
  switch (a.kind) {
    case FT_ACT_SILU:
      return apply(a, [](float x) { return silu(x); }, gate, up, n);
    case FT_ACT_GELU:
      return apply(a, [](float x) { return gelu(x); }, gate, up, n);
    case FT_ACT_GELU_TANH:
      return apply(a, [](float x) { return gelu_tanh(x); }, gate, up, n);
    case FT_ACT_RELU2:
      return apply(a, [](float x) { return relu2(x); }, gate, up, n);
    case FT_ACT_SWIGLU_OAI: {
      float alpha = a.alpha;
      for (uint32_t i = 0; i < n; i++) gate[i] = gate[i] * sigmoid(alpha * gate[i]) * (up[i] + 1.0f);
      return;
    }
  }
}

// Adds bias[first + i * step].
FT_INLINE void add_bias(float* values, const float* bias, uint32_t first, uint32_t step, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) values[i] += bias[first + i * step];
}

}  // namespace ft::FT_TARGET
