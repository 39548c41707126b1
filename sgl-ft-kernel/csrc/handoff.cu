// SPDX-License-Identifier: Apache-2.0
//
// Round trips of jobs whose blocks are already filled, through each transport of doorbells: to choose and to
// measure.
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <memory>

#include "device_memory.cuh"
#include "sgl_ft_kernel/api.h"
#include "sglang_ft/ring.h"

namespace ft {
namespace {

enum Transport { kKernels = 0, kMemoryOperations = 1, kHostFunctions = 2 };

ft_block* block_of(const ft_ring_view& ring, uint64_t sequence) {
  return reinterpret_cast<ft_block*>(ring.blocks + (sequence - 1) % ring.num_blocks * ring.block_stride);
}

__global__ void ring_kernel(uint64_t* doorbell, uint64_t sequence) {
  store_release_system(doorbell, sequence);
}

__global__ void wait_kernel(const uint64_t* done, const uint32_t* abort, uint64_t sequence) {
  while (load_acquire_system(done) < sequence && !load_volatile(abort)) __nanosleep(64);
}

struct HostJob {
  ft_block* block;
  const uint32_t* abort;
  uint64_t sequence;
};

void ring_on_host(void* job) {
  auto* j = static_cast<HostJob*>(job);
  reinterpret_cast<std::atomic<uint64_t>*>(&j->block->doorbell)
      ->store(j->sequence, std::memory_order_release);
}

void wait_on_host(void* job) {
  std::unique_ptr<HostJob> j(static_cast<HostJob*>(job));
  auto* done = reinterpret_cast<std::atomic<uint64_t>*>(&j->block->done);
  auto* abort = reinterpret_cast<const std::atomic<uint32_t>*>(j->abort);
  while (done->load(std::memory_order_acquire) < j->sequence && !abort->load(std::memory_order_relaxed)) {
  }
}

int round_trip(const ft_ring_view& ring, uint64_t sequence, int transport, cudaStream_t stream) {
  ft_block* block = block_of(ring, sequence);
  switch (transport) {
    case kKernels:
      ring_kernel<<<1, 1, 0, stream>>>(&block->doorbell, sequence);
      wait_kernel<<<1, 1, 0, stream>>>(&block->done, ring.abort, sequence);
      return cudaGetLastError();
    case kMemoryOperations: {
      void *write = nullptr, *wait = nullptr;
      cudaDriverEntryPointQueryResult found;
      cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &write, 12000, cudaEnableDefault, &found);
      cudaGetDriverEntryPointByVersion("cuStreamWaitValue64", &wait, 12000, cudaEnableDefault, &found);
      if (!write || !wait) return cudaErrorNotSupported;
      auto at = [](void* p) { return reinterpret_cast<CUdeviceptr>(p); };
      CUresult result = reinterpret_cast<decltype(&cuStreamWriteValue64)>(write)(
          stream, at(&block->doorbell), sequence, CU_STREAM_WRITE_VALUE_DEFAULT);
      if (result == CUDA_SUCCESS)
        result = reinterpret_cast<decltype(&cuStreamWaitValue64)>(wait)(stream, at(&block->done), sequence,
                                                                        CU_STREAM_WAIT_VALUE_GEQ);
      return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
    }
    case kHostFunctions: {
      auto* job = new HostJob{block, ring.abort, sequence};
      cudaError_t result = cudaLaunchHostFunc(stream, ring_on_host, job);
      return result == cudaSuccess ? cudaLaunchHostFunc(stream, wait_on_host, job) : result;
    }
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace ft

extern "C" {

int ft_handoff_probe(const ft_ring_view* ring, uint64_t first_sequence, uint32_t count, int transport,
                     void* stream) {
  int result = cudaSuccess;
  for (uint32_t i = 0; i < count && result == cudaSuccess; i++)
    result = ft::round_trip(*ring, first_sequence + i, transport, static_cast<cudaStream_t>(stream));
  return result;
}

}  // extern "C"
