// SPDX-License-Identifier: Apache-2.0
//
// A block of threads on the device, as the plan sees it.
#pragma once

#include <cstdint>

#include "device_memory.cuh"

namespace ft {

template <int kThreads>
struct DeviceBlock {
  static constexpr int kWarps = kThreads / 32;

  struct Shared {
    uint32_t of_warp[kWarps];
  };

  Shared& shared;

  __device__ uint32_t tid() const { return threadIdx.x; }
  __device__ uint32_t size() const { return kThreads; }
  __device__ void sync() { __syncthreads(); }
  __device__ uint64_t now() const { return nanoseconds(); }
  __device__ uint32_t add(uint32_t* value, uint32_t n) { return atomicAdd(value, n); }
  // Adds to a sum in memory without waiting for it.
  __device__ void count(uint64_t* sum, uint64_t n) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(n));
  }
  __device__ void set_bit(uint32_t* bits, uint32_t i) { atomicOr(&bits[i / 32], 1u << (i % 32)); }
  // Whoever sees this, on the host too, also sees what the block wrote before the last sync().
  __device__ void ring(uint64_t* doorbell, uint64_t sequence) { store_release_system(doorbell, sequence); }

  __device__ uint32_t maximum(uint32_t value) {
    value = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < kWarps ? shared.of_warp[threadIdx.x % 32] : 0;
    value = __reduce_max_sync(0xffffffffu, value);
    __syncthreads();
    return value;
  }

  // Exclusive sums in place; returns the total. Threads take consecutive values.
  __device__ uint32_t scan(uint32_t* values, uint32_t count) {
    __syncthreads();
    uint32_t each = (count + kThreads - 1) / kThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t begin = min(threadIdx.x * each, count), end = min(begin + each, count), sum = 0;
    for (uint32_t i = begin; i < end; i++) sum += values[i];
    uint32_t upto = sum;  // inclusive, within the warp
    for (uint32_t d = 1; d < 32; d *= 2) {
      uint32_t other = __shfl_up_sync(0xffffffffu, upto, d);
      if (lane >= d) upto += other;
    }
    if (lane == 31) shared.of_warp[warp] = upto;
    __syncthreads();
    uint32_t before = 0, total = 0;
    for (uint32_t w = 0; w < kWarps; w++) {
      if (w < warp) before += shared.of_warp[w];
      total += shared.of_warp[w];
    }
    uint32_t at = before + upto - sum;
    for (uint32_t i = begin; i < end; i++) {
      uint32_t value = values[i];
      values[i] = at;
      at += value;
    }
    __syncthreads();
    return total;
  }
};

}  // namespace ft
