// SPDX-License-Identifier: Apache-2.0
//
// ft_activation of ring.h on one pair of sums, in float32.
#pragma once

#include "sgl_ft_kernel/api.h"
#include "sglang_ft/ring.h"

namespace ft {

__device__ inline float act(uint32_t kind, float x) {
  switch (kind) {
    case FT_ACT_GELU:
      return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case FT_ACT_GELU_TANH:
      return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case FT_ACT_RELU2:
      return x > 0.0f ? x * x : 0.0f;
    default:
      return x / (1.0f + __expf(-x));
  }
}

__device__ inline float activate(const ft_moe_layer& layer, float gate, float up) {
  if (!(layer.flags & FT_LAYER_GATED)) return act(layer.activation, gate);
  if (layer.act_limit > 0.0f) {
    gate = fminf(gate, layer.act_limit);
    up = fminf(fmaxf(up, -layer.act_limit), layer.act_limit);
  }
  if (layer.activation == FT_ACT_SWIGLU_OAI)
    return gate / (1.0f + __expf(-layer.act_alpha * gate)) * (up + 1.0f);
  return act(layer.activation, gate) * up;
}

}  // namespace ft
