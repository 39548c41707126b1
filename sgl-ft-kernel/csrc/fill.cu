// SPDX-License-Identifier: Apache-2.0
//
// Copies experts from the mapped pool into their slots: 16-byte loads over the link, several in flight, all
// blocks together on each expert.
#include "device_memory.cuh"
#include "launch.cuh"
#include "sgl_ft_kernel/api.h"
#include "sglang_ft/ring.h"

namespace ft {
namespace {

// 16 KiB in flight a block. What the link needs is its rate times its latency, 128 KiB on PCIe 5; all beyond
// that only waits in a queue, and every other read over the link behind it.
constexpr int kThreads = 256;
constexpr int kInFlight = 4;

// `rows` rows of `row_bytes`, `pitch` bytes apart on both sides. Everything in multiples of 16 bytes.
__device__ void copy_rows(uint8_t* to, const uint8_t* from, uint64_t rows, uint64_t row_bytes,
                          uint64_t pitch) {
  const uint32_t pieces_a_row = uint32_t(row_bytes / 16);
  const uint64_t pieces = rows * pieces_a_row, stride = uint64_t(gridDim.x) * kThreads;
  for (uint64_t base = uint64_t(blockIdx.x) * kThreads + threadIdx.x; base < pieces;
       base += stride * kInFlight) {
    uint4 piece[kInFlight];
    uint64_t at[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const uint64_t p = base + i * stride;
      at[i] = rows == 1 ? p * 16 : p / pieces_a_row * pitch + p % pieces_a_row * 16;
      if (p < pieces) piece[i] = load_once(from + at[i]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; i++)
      if (base + i * stride < pieces) *reinterpret_cast<uint4*>(to + at[i]) = piece[i];
  }
}

// Features [begin, end) of the first projection and of the second; all of it when they are all.
__device__ void copy_features(const ft_moe_layer& layer, uint32_t expert, uint32_t slot, uint32_t begin,
                              uint32_t end) {
  const ft_role_memory &gate_up = layer.role[FT_ROLE_GATE_UP], &down = layer.role[FT_ROLE_DOWN];
  uint8_t* to = gate_up.slots + slot * gate_up.stride;
  const uint8_t* from = gate_up.pool + expert * gate_up.stride;
  const uint64_t features = layer.intermediate, count = end - begin;
  const uint64_t up_rows = layer.flags & FT_LAYER_GATED ? 2 * features : features;
  const uint64_t row = gate_up.stride / up_rows, column = down.stride / layer.hidden / features;
  if (count == features) {
    copy_rows(to, from, 1, gate_up.stride, 0);
    copy_rows(down.slots + slot * down.stride, down.pool + expert * down.stride, 1, down.stride, 0);
    return;
  }
  if (!(layer.flags & FT_LAYER_GATED)) {
    copy_rows(to + begin * row, from + begin * row, 1, count * row, 0);
  } else if (layer.flags & FT_LAYER_INTERLEAVED) {
    copy_rows(to + 2 * begin * row, from + 2 * begin * row, 1, 2 * count * row, 0);
  } else {
    copy_rows(to + begin * row, from + begin * row, 1, count * row, 0);
    copy_rows(to + (features + begin) * row, from + (features + begin) * row, 1, count * row, 0);
  }
  copy_rows(down.slots + slot * down.stride + begin * column,
            down.pool + expert * down.stride + begin * column, layer.hidden, count * column,
            features * column);
}

__device__ void copy_biases(const ft_moe_layer& layer, uint32_t expert, uint32_t slot) {
  for (int r = FT_ROLE_GATE_UP_BIAS; r <= FT_ROLE_DOWN_BIAS; r++) {
    const ft_role_memory& role = layer.role[r];
    if (role.stride)
      copy_rows(role.slots + slot * role.stride, role.pool + expert * role.stride, 1, role.stride, 0);
  }
}

__global__ void __launch_bounds__(kThreads) fill_kernel(ft_moe_layer layer, ft_step step, bool tail) {
  wait_for_previous();
  const ft_work& work = *step.work;
  const Stamper stamper(step.stamps);
  stamper.begin(tail ? FT_STAMP_TAIL_BEGIN : FT_STAMP_FILL_BEGIN);
  if (!tail) {
    for (uint32_t i = 0; i < work.fills; i++) {
      const ft_run run = work.runs[work.hits + i];
      copy_features(layer, run.expert, run.slot, 0, run.features);
      copy_biases(layer, run.expert, run.slot);
    }
  } else if (work.features) {
    const ft_run run = work.runs[work.hits + work.fills - 1];
    copy_features(layer, run.expert, run.slot, run.features, layer.intermediate);
  }
  stamper.end(tail ? FT_STAMP_TAIL_END : FT_STAMP_FILL_END);
}

// blockIdx.y: which expert; the blocks of x copy it together.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(ft_cache cache, ft_moe_layer layer, ft_gathering gathering) {
  wait_for_previous();
  const uint32_t expert = gathering.experts[blockIdx.y];
  if (expert >= layer.num_experts) return;
  const uint32_t slot = cache.slot_of[layer.first_expert_id + expert];
  for (int r = 0; r < FT_CACHE_ROLES; r++) {
    const ft_role_memory& role = layer.role[r];
    if (!role.stride || !gathering.to[r]) continue;
    const uint8_t* from =
        slot != FT_NONE ? role.slots + slot * role.stride : role.pool + expert * role.stride;
    copy_rows(gathering.to[r] + (expert - gathering.first) * role.stride, from, 1, role.stride, 0);
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  copy_rows(to, from, 1, bytes, 0);
}

}  // namespace
}  // namespace ft

extern "C" {

int ft_fill(const ft_moe_layer* layer, const ft_step* step, int tail, uint32_t blocks, void* stream) {
  return ft::launch(ft::fill_kernel, blocks, ft::kThreads, false, stream, *layer, *step, tail != 0);
}

int ft_gather(const ft_cache* cache, const ft_moe_layer* layer, const ft_gathering* gathering,
              uint32_t blocks, void* stream) {
  if (gathering->count == 0) return cudaSuccess;
  return ft::launch(ft::gather_kernel, dim3(blocks, gathering->count), ft::kThreads, false, stream, *cache,
                    *layer, *gathering);
}

int ft_copy_runs(const ft_copy* copies, uint32_t count, void* stream) {
  for (uint32_t i = 0; i < count; i++) {
    cudaError_t result = cudaMemcpyAsync(copies[i].to, copies[i].from, copies[i].bytes, cudaMemcpyDefault,
                                         static_cast<cudaStream_t>(stream));
    if (result != cudaSuccess) return result;
  }
  return cudaSuccess;
}

int ft_copy_from_host(void* to, const void* from, uint64_t bytes, uint32_t blocks, void* stream) {
  return ft::launch(ft::copy_kernel, blocks, ft::kThreads, false, stream, static_cast<uint8_t*>(to),
                    static_cast<const uint8_t*>(from), bytes);
}

}  // extern "C"
