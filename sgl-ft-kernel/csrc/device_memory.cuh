// SPDX-License-Identifier: Apache-2.0
//
// Loads and stores with the cache and ordering behaviour that the kernels need.
#pragma once

#include <cstdint>

#include "sgl_ft_kernel/api.h"

namespace ft {

__device__ inline void store_release_system(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ inline uint64_t load_acquire_system(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline uint32_t load_volatile(const uint32_t* from) {
  return *reinterpret_cast<const volatile uint32_t*>(from);
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Data that is read once and never changes while the kernel runs.
__device__ inline uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// Notes times of a kernel in ft_step.stamps while the host wants them.
class Stamper {
 public:
  __device__ explicit Stamper(uint64_t* stamps) : to_(stamps && stamps[FT_STAMP_ON] ? stamps : nullptr) {}

  // Of the first block.
  __device__ void begin(int which) const {
    if (to_ && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) to_[which] = nanoseconds();
  }

  // Of the last block; all threads of every block come here.
  __device__ void end(int which) const {
    if (!to_) return;
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned long long*>(to_ + which), nanoseconds());
  }

 private:
  uint64_t* to_;
};

}  // namespace ft
