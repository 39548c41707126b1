// SPDX-License-Identifier: Apache-2.0
//
// Random layers and jobs, and the plain double-precision result that kernels are compared with. Shares no
// arithmetic with the worker: conversions, activations and sums are written again here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "test_ring.h"

namespace testing {

using Random = std::mt19937_64;

struct LayerCase {
  uint32_t format, activation, flags;
  bool biases;
  uint32_t experts, hidden, intermediate;
  float limit, alpha, output_scale;
};

struct JobCase {
  uint32_t rows, topk, row_dtype;
  int32_t shared_expert = -1;
  uint32_t shared_begin = 0;
};

inline double round_to(double x, int mantissa_bits, int min_exponent) {
  if (x == 0 || !std::isfinite(x)) return x;
  int e = std::max(std::ilogb(x), min_exponent);
  double unit = std::ldexp(1.0, e - mantissa_bits);
  return std::nearbyint(x / unit) * unit;
}

inline double round_bf16(double x) { return round_to(x, 7, -126); }
inline double round_fp16(double x) { return round_to(x, 10, -14); }

// Encodes values that are exactly representable.
inline uint16_t encode_bf16(double x) {
  float f = float(x);
  uint32_t u;
  memcpy(&u, &f, 4);
  return uint16_t(u >> 16);
}

inline uint16_t encode_fp16(double x) {
  uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (x == 0) return sign;
  int e = std::ilogb(x);
  if (e < -14) return uint16_t(sign | uint16_t(std::ldexp(x, 24)));
  return uint16_t(sign | (e + 15) << 10 | (uint32_t(std::ldexp(x, 10 - e)) & 0x3ff));
}

// Writes n random values of the dtype (ft_dtype and ft_format agree on 1, 2, 3); returns them as doubles.
inline std::vector<double> random_values(Random& random, void* to, uint32_t dtype, size_t n, double scale) {
  std::normal_distribution<double> normal(0, scale);
  std::vector<double> values(n);
  for (size_t i = 0; i < n; i++) {
    double x = normal(random);
    if (dtype == FT_DTYPE_BF16) {
      values[i] = round_bf16(x);
      static_cast<uint16_t*>(to)[i] = encode_bf16(values[i]);
    } else if (dtype == FT_DTYPE_FP16) {
      values[i] = round_fp16(x);
      static_cast<uint16_t*>(to)[i] = encode_fp16(values[i]);
    } else {
      values[i] = float(x);
      static_cast<float*>(to)[i] = float(x);
    }
  }
  return values;
}

// The values of one layer, by expert.
struct ReferenceLayer {
  LayerCase shape;
  std::vector<std::vector<double>> gate_up, down, gate_up_bias, down_bias;

  bool gated() const { return shape.flags & FT_LAYER_GATED; }
  uint32_t outs() const { return shape.intermediate * (gated() ? 2 : 1); }
};

inline std::vector<std::vector<double>> random_bank(Random& random, TestRing& ring, ft_layer& table,
                                                    uint32_t role, uint32_t dtype, size_t count,
                                                    uint32_t experts, double scale) {
  std::byte* bank = ring.add_bank(table, role, count * (dtype == FT_DTYPE_FP32 ? 4 : 2), experts);
  std::vector<std::vector<double>> values;
  for (uint32_t e = 0; e < experts; e++)
    values.push_back(random_values(random, bank + e * table.role[role].stride, dtype, count, scale));
  return values;
}

// Fills layer `index` of the ring and its banks.
inline ReferenceLayer make_layer(Random& random, TestRing& ring, uint32_t index, const LayerCase& c) {
  ReferenceLayer layer{c, {}, {}, {}, {}};
  ft_layer& t = ring.layer(index);
  t = {};
  t.format = c.format;
  t.activation = c.activation;
  t.flags = c.flags;
  t.num_experts = c.experts;
  t.hidden = c.hidden;
  t.intermediate = c.intermediate;
  t.output_scale = c.output_scale;
  t.act_alpha = c.alpha;
  t.act_limit = c.limit;
  size_t outs = layer.outs();
  double gate_scale = 2 / std::sqrt(double(c.hidden)), down_scale = 1 / std::sqrt(double(c.intermediate));
  layer.gate_up =
      random_bank(random, ring, t, FT_ROLE_GATE_UP, c.format, outs * c.hidden, c.experts, gate_scale);
  layer.down = random_bank(random, ring, t, FT_ROLE_DOWN, c.format, size_t(c.hidden) * c.intermediate,
                           c.experts, down_scale);
  if (!c.biases) return layer;
  layer.gate_up_bias = random_bank(random, ring, t, FT_ROLE_GATE_UP_BIAS, FT_DTYPE_FP32, outs, c.experts, 1);
  layer.down_bias = random_bank(random, ring, t, FT_ROLE_DOWN_BIAS, FT_DTYPE_FP32, c.hidden, c.experts, 1);
  return layer;
}

inline double reference_activation(const LayerCase& c, double gate, double up) {
  bool gated = c.flags & FT_LAYER_GATED;
  if ((c.activation == FT_ACT_SILU || c.activation == FT_ACT_SWIGLU_OAI) && c.limit > 0) {
    gate = std::min(gate, double(c.limit));
    up = std::max(-double(c.limit), std::min(up, double(c.limit)));
  }
  auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  double a = 0;
  switch (c.activation) {
    case FT_ACT_SILU:
      a = gate * sigmoid(gate);
      break;
    case FT_ACT_GELU:
      a = gate * 0.5 * (1 + std::erf(gate / std::sqrt(2.0)));
      break;
    case FT_ACT_GELU_TANH:
      a = gate * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
      break;
    case FT_ACT_RELU2:
      a = gate > 0 ? gate * gate : 0;
      break;
    case FT_ACT_SWIGLU_OAI:
      return gate * sigmoid(c.alpha * gate) * (up + 1);
  }
  return gated ? a * up : a;
}

struct ReferenceJob {
  JobCase shape;
  std::vector<double> rows, weights;
  std::vector<int32_t> routes;
};

// Routes are random with duplicates and about one -1 in six; row 0 of a job with several rows has none.
inline ReferenceJob make_job(Random& random, TestRing& ring, uint64_t seq, uint32_t layer, const LayerCase& l,
                             const JobCase& c) {
  ReferenceJob job{c, {}, {}, {}};
  ft_block& block = ring.block(seq);
  block.layer = layer;
  block.rows = c.rows;
  block.topk = c.topk;
  block.row_dtype = c.row_dtype;
  block.shared_expert = c.shared_expert;
  block.shared_begin = c.shared_begin;
  size_t pairs = size_t(c.rows) * c.topk;
  job.rows = random_values(random, ring.rows(seq), c.row_dtype, size_t(c.rows) * l.hidden, 1);
  job.weights = random_values(random, ring.weights(seq), FT_DTYPE_FP32, pairs, 0.5);
  for (size_t i = 0; i < pairs; i++) {
    bool skipped = random() % 6 == 0 || (c.rows > 1 && i < c.topk);
    job.routes.push_back(skipped ? -1 : int32_t(random() % l.experts));
    ring.routes(seq)[i] = job.routes[i];
  }
  return job;
}

// One expert on one row; of a shared expert the worker's part. `bf16_inside`: the row and h are rounded to
// bf16, as BF16 dot products do.
inline std::vector<double> reference_expert(const ReferenceLayer& layer, const JobCase& job, uint32_t e,
                                            const std::vector<double>& row, bool bf16_inside) {
  bool shared = int32_t(e) == job.shared_expert;
  const LayerCase& c = layer.shape;
  auto dot = [](const double* a, const double* b, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
  };
  auto project = [&](uint32_t out) {
    double bias = c.biases ? layer.gate_up_bias[e][out] : 0;
    return dot(&layer.gate_up[e][size_t(out) * c.hidden], row.data(), c.hidden) + bias;
  };
  std::vector<double> h(c.intermediate), result(c.hidden);
  for (uint32_t i = 0; i < c.intermediate; i++) {
    bool interleaved = c.flags & FT_LAYER_INTERLEAVED;
    double gate = project(interleaved ? 2 * i : i);
    double up = layer.gated() ? project(interleaved ? 2 * i + 1 : c.intermediate + i) : 0;
    h[i] = reference_activation(c, gate, up);
    if (bf16_inside) h[i] = round_bf16(h[i]);
    if (shared && i < job.shared_begin) h[i] = 0;
  }
  for (uint32_t o = 0; o < c.hidden; o++) {
    double bias = c.biases && !shared ? layer.down_bias[e][o] : 0;
    result[o] = dot(&layer.down[e][size_t(o) * c.intermediate], h.data(), c.intermediate) + bias;
  }
  return result;
}

// Results [rows, hidden] and the largest sum of magnitudes behind any of them: what experts cancel between
// them cannot be more exact than they are.
struct ReferenceResults {
  std::vector<double> values;
  double magnitude = 1e-30;
};

// The whole job.
inline ReferenceResults reference_results(const ReferenceLayer& layer, const ReferenceJob& job,
                                          bool bf16_inside) {
  uint32_t hidden = layer.shape.hidden, topk = job.shape.topk;
  bool on_input = layer.shape.flags & FT_LAYER_WEIGHT_ON_INPUT;
  std::vector<double> values(size_t(job.shape.rows) * hidden), magnitudes(values.size());
  for (size_t pair = 0; pair < job.routes.size(); pair++) {
    if (job.routes[pair] < 0) continue;
    size_t r = pair / topk;
    std::vector<double> row(&job.rows[r * hidden], &job.rows[r * hidden] + hidden);
    if (on_input)
      for (double& x : row) x = bf16_inside ? round_bf16(x * job.weights[pair]) : x * job.weights[pair];
    std::vector<double> y = reference_expert(layer, job.shape, uint32_t(job.routes[pair]), row, bf16_inside);
    double factor = layer.shape.output_scale * (on_input ? 1 : job.weights[pair]);
    for (uint32_t i = 0; i < hidden; i++) {
      values[r * hidden + i] += factor * y[i];
      magnitudes[r * hidden + i] += std::fabs(factor * y[i]);
    }
  }
  double magnitude = std::max(1e-30, *std::max_element(magnitudes.begin(), magnitudes.end()));
  return {std::move(values), magnitude};
}

// Largest error over the magnitude; infinity when anything is not a number.
inline double relative_error(const float* got, const ReferenceResults& expected) {
  double error = 0;
  for (size_t i = 0; i < expected.values.size(); i++) {
    if (!std::isfinite(got[i])) return INFINITY;
    error = std::max(error, std::fabs(got[i] - expected.values[i]));
  }
  return error / expected.magnitude;
}

}  // namespace testing
