// SPDX-License-Identifier: Apache-2.0
//
// Expert compute for few rows: both projections as matrix-vector products that read each weight once. Bound
// by memory; each warp has several 16-byte loads a lane in flight before it uses the first.
#include <algorithm>

#include "activation.cuh"
#include "device_memory.cuh"
#include "formats/dense.cuh"
#include "launch.cuh"

namespace ft {
namespace {

constexpr int kWarps = 8;
constexpr int kRowsAtOnce = 4;
constexpr int kSingleBlocks =
    6;                       // of an SM when all runs have one row: warps in flight hide the memory's latency
constexpr int kChunk = 256;  // elements that a warp loads with one load a lane
constexpr int kGateUpUnroll = 2;  // chunks in flight, of a gate and an up row
constexpr int kDownFeatures = 4;  // output features of a warp
constexpr int kDownUnroll = 1;    // chunks in flight, of each of them

// The run that this block works on; rows 0: none.
__device__ inline ft_run run_of_block(const ft_moe_layer& layer, const ft_step& step, bool fills,
                                      uint32_t index) {
  if (!step.work) {  // all resident: one run a pair
    int32_t e = step.routes[index];
    bool valid =
        uint32_t(e) < layer.num_experts && (!step.num_valid || index / step.topk < uint32_t(*step.num_valid));
    return {layer.first_expert_id + e, index, valid ? 1u : 0u, layer.intermediate, uint32_t(e), {}};
  }
  const ft_work& work = *step.work;
  if (index >= (fills ? work.fills : work.hits)) return {0, 0, 0, 0, 0, {}};
  return work.runs[fills ? work.hits + index : index];
}

__device__ inline uint32_t pair_of(const ft_step& step, const ft_run& run, uint32_t row) {
  return step.work ? step.work->pairs[run.first_pair + row] : run.first_pair;
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
  return value;
}

// One warp: intermediate feature `feature` of one run, for kRows of its rows.
template <class Format, int kRows, bool kGated>
__device__ void gate_up_rows(const ft_moe_layer& layer, const ft_step& step, const ft_run& run,
                             uint32_t feature, uint32_t first_row, uint32_t rows) {
  const uint32_t lane = threadIdx.x % 32, hidden = layer.hidden;
  const bool interleaved = layer.flags & FT_LAYER_INTERLEAVED;
  const uint8_t* weights = layer.role[FT_ROLE_GATE_UP].slots + run.slot * layer.role[FT_ROLE_GATE_UP].stride;
  const uint32_t gate_row = kGated && interleaved ? 2 * feature : feature;
  const uint32_t up_row = interleaved ? 2 * feature + 1 : layer.intermediate + feature;
  const uint8_t* gate = weights + uint64_t(gate_row) * hidden * Format::kBytes;
  const uint8_t* up = weights + uint64_t(up_row) * hidden * Format::kBytes;
  const uint8_t* x[kRows];
  uint32_t pair[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    pair[r] = pair_of(step, run, first_row + (r < rows ? r : 0));
    x[r] = static_cast<const uint8_t*>(step.x) + uint64_t(pair[r] / step.topk) * hidden * Format::kBytes;
  }
  float gate_sum[kRows] = {}, up_sum[kRows] = {};
  for (uint32_t base = lane * 8; base < hidden; base += kChunk * kGateUpUnroll) {
    uint4 gate_bits[kGateUpUnroll], up_bits[kGateUpUnroll];
#pragma unroll
    for (int u = 0; u < kGateUpUnroll; u++) {
      uint32_t at = base + u * kChunk;
      if (at < hidden) {
        gate_bits[u] = load_once(gate + at * Format::kBytes);
        if (kGated) up_bits[u] = load_once(up + at * Format::kBytes);
      }
    }
#pragma unroll
    for (int u = 0; u < kGateUpUnroll; u++) {
      uint32_t at = base + u * kChunk;
      if (at >= hidden) continue;
      float g[8], w[8], value[8];
      unpack<Format>(gate_bits[u], g);
      if (kGated) unpack<Format>(up_bits[u], w);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        unpack<Format>(*reinterpret_cast<const uint4*>(x[r] + at * Format::kBytes), value);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          gate_sum[r] += g[i] * value[i];
          if (kGated) up_sum[r] += w[i] * value[i];
        }
      }
    }
  }
  const float* bias = nullptr;
  if (layer.role[FT_ROLE_GATE_UP_BIAS].stride)
    bias = reinterpret_cast<const float*>(layer.role[FT_ROLE_GATE_UP_BIAS].slots +
                                          run.slot * layer.role[FT_ROLE_GATE_UP_BIAS].stride);
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    float g = warp_sum(gate_sum[r]), u = kGated ? warp_sum(up_sum[r]) : 0.0f;
    if (lane != 0 || r >= rows) continue;
    if (layer.flags & FT_LAYER_WEIGHT_ON_INPUT) {
      g *= step.weights[pair[r]];
      u *= step.weights[pair[r]];
    }
    if (bias) {
      g += bias[gate_row];
      if (kGated) u += bias[up_row];
    }
    step.h[uint64_t(pair[r]) * layer.intermediate + feature] = activate(layer, g, u);
  }
}

template <class Format, bool kGated, bool kSingle>
__global__ void __launch_bounds__(kWarps * 32, kSingle ? kSingleBlocks : 1)
    gate_up_kernel(ft_moe_layer layer, ft_step step, bool fills) {
  wait_for_previous();
  const Stamper stamper(step.stamps);
  stamper.begin(fills ? FT_STAMP_FILLED_BEGIN : FT_STAMP_HITS_BEGIN);
  const ft_run run = run_of_block(layer, step, fills, blockIdx.y);
  const uint32_t feature = blockIdx.x * kWarps + threadIdx.x / 32;
  if (feature >= run.features || !run.rows) return;
  if constexpr (kSingle) {  // one row, but it may be routed to an expert twice
    for (uint32_t row = 0; row < run.rows; row++)
      gate_up_rows<Format, 1, kGated>(layer, step, run, feature, row, 1);
  } else if (run.rows == 1) {
    gate_up_rows<Format, 1, kGated>(layer, step, run, feature, 0, 1);
  } else {
    for (uint32_t row = 0; row < run.rows; row += kRowsAtOnce)
      gate_up_rows<Format, kRowsAtOnce, kGated>(layer, step, run, feature, row,
                                                min(run.rows - row, kRowsAtOnce));
  }
}

// One warp: kDownFeatures output features of one run, for kRows of its rows.
template <class Format, int kRows>
__device__ void down_rows(const ft_moe_layer& layer, const ft_step& step, const ft_run& run, uint32_t feature,
                          uint32_t first_row, uint32_t rows) {
  const uint32_t lane = threadIdx.x % 32, row_bytes = layer.intermediate * Format::kBytes;
  const uint8_t* weights = layer.role[FT_ROLE_DOWN].slots + run.slot * layer.role[FT_ROLE_DOWN].stride +
                           uint64_t(feature) * row_bytes;
  const float* h[kRows];
  uint32_t pair[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    pair[r] = pair_of(step, run, first_row + (r < rows ? r : 0));
    h[r] = step.h + uint64_t(pair[r]) * layer.intermediate;
  }
  float sum[kDownFeatures][kRows] = {};
  for (uint32_t base = lane * 8; base < run.features; base += kChunk * kDownUnroll) {
    uint4 bits[kDownUnroll][kDownFeatures];
#pragma unroll
    for (int u = 0; u < kDownUnroll; u++) {
      uint32_t at = base + u * kChunk;
#pragma unroll
      for (int f = 0; f < kDownFeatures; f++)
        if (at < run.features && feature + f < layer.hidden)
          bits[u][f] = load_once(weights + uint64_t(f) * row_bytes + at * Format::kBytes);
    }
#pragma unroll
    for (int u = 0; u < kDownUnroll; u++) {
      uint32_t at = base + u * kChunk;
      if (at >= run.features) continue;
      float value[kRows][8];
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        float4 first = *reinterpret_cast<const float4*>(h[r] + at),
               second = *reinterpret_cast<const float4*>(h[r] + at + 4);
        const float all[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int i = 0; i < 8; i++) value[r][i] = all[i];
      }
#pragma unroll
      for (int f = 0; f < kDownFeatures; f++) {
        float w[8];
        unpack<Format>(bits[u][f], w);
#pragma unroll
        for (int r = 0; r < kRows; r++)
#pragma unroll
          for (int i = 0; i < 8; i++) sum[f][r] += w[i] * value[r][i];
      }
    }
  }
  const float* bias = nullptr;
  if (layer.role[FT_ROLE_DOWN_BIAS].stride)
    bias = reinterpret_cast<const float*>(layer.role[FT_ROLE_DOWN_BIAS].slots +
                                          run.slot * layer.role[FT_ROLE_DOWN_BIAS].stride);
#pragma unroll
  for (int f = 0; f < kDownFeatures; f++)
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float total = warp_sum(sum[f][r]);
      if (lane != 0 || r >= rows || feature + f >= layer.hidden) continue;
      if (bias) total += bias[feature + f];
      step.partial[uint64_t(pair[r]) * layer.hidden + feature + f] = total;
    }
}

template <class Format>
__global__ void __launch_bounds__(kWarps * 32) down_kernel(ft_moe_layer layer, ft_step step, bool fills) {
  wait_for_previous();
  const Stamper stamper(step.stamps);
  const ft_run run = run_of_block(layer, step, fills, blockIdx.y);
  const uint32_t feature = (blockIdx.x * kWarps + threadIdx.x / 32) * kDownFeatures;
  if (run.rows == 1 && feature < layer.hidden) {
    down_rows<Format, 1>(layer, step, run, feature, 0, 1);
  } else if (feature < layer.hidden) {
    for (uint32_t row = 0; row < run.rows; row += kRowsAtOnce)
      down_rows<Format, kRowsAtOnce>(layer, step, run, feature, row, min(run.rows - row, kRowsAtOnce));
  }
  stamper.end(fills ? FT_STAMP_FILLED_END : FT_STAMP_HITS_END);
}

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Every run has a row of its own at least, and each local expert is one run at most.
uint32_t most_runs(const ft_moe_layer& layer, const ft_step& step) {
  uint32_t pairs = step.rows * step.topk;
  return step.work ? std::min(pairs, layer.num_experts) : pairs;
}

// No run has more than one row.
bool single_rows(const ft_step& step) { return step.rows == 1 || !step.work; }

template <class Format>
int launch_gate_up(const ft_moe_layer& layer, const ft_step& step, bool fills, void* stream) {
  dim3 grid(ceil_div(layer.intermediate, kWarps), most_runs(layer, step));
  bool gated = layer.flags & FT_LAYER_GATED, single = single_rows(step);
  auto kernel = gated ? (single ? gate_up_kernel<Format, true, true> : gate_up_kernel<Format, true, false>)
                      : (single ? gate_up_kernel<Format, false, true> : gate_up_kernel<Format, false, false>);
  bool early = !fills && step.work;  // the plan comes right before; fills also wait for their copies
  return launch(kernel, grid, kWarps * 32, early, stream, layer, step, fills);
}

template <class Format>
int launch_down(const ft_moe_layer& layer, const ft_step& step, bool fills, void* stream) {
  dim3 grid(ceil_div(layer.hidden, kWarps * kDownFeatures), most_runs(layer, step));
  return launch(down_kernel<Format>, grid, kWarps * 32, true, stream, layer, step, fills);
}

bool supported(const ft_moe_layer& layer, const ft_step& step) {
  bool bf16 = layer.format == FT_FORMAT_BF16 && step.row_dtype == FT_DTYPE_BF16;
  bool fp16 = layer.format == FT_FORMAT_FP16 && step.row_dtype == FT_DTYPE_FP16;
  return (bf16 || fp16) && layer.hidden % 8 == 0 && layer.intermediate % 8 == 0;
}

}  // namespace
}  // namespace ft

extern "C" {

int ft_gate_up(const ft_moe_layer* layer, const ft_step* step, int fills, void* stream) {
  if (!ft::supported(*layer, *step)) return cudaErrorInvalidValue;
  return layer->format == FT_FORMAT_BF16 ? ft::launch_gate_up<ft::Bf16>(*layer, *step, fills, stream)
                                         : ft::launch_gate_up<ft::Fp16>(*layer, *step, fills, stream);
}

int ft_down(const ft_moe_layer* layer, const ft_step* step, int fills, void* stream) {
  if (!ft::supported(*layer, *step)) return cudaErrorInvalidValue;
  return layer->format == FT_FORMAT_BF16 ? ft::launch_down<ft::Bf16>(*layer, *step, fills, stream)
                                         : ft::launch_down<ft::Fp16>(*layer, *step, fills, stream);
}

}  // extern "C"
