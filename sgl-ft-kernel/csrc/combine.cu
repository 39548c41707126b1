// SPDX-License-Identifier: Apache-2.0
//
// The end of a step: waits for the job of this step and sums what the GPU and the worker computed, in float32
// and in a fixed order.
#include "device_memory.cuh"
#include "formats/dense.cuh"
#include "launch.cuh"
#include "sgl_ft_kernel/api.h"
#include "sglang_ft/ring.h"

namespace ft {
namespace {

constexpr int kThreads = 256;
constexpr int kFeatures = 4;  // of a thread

// Returns true when the job is done, by whichever worker; false when the owner aborts all waits.
__device__ bool wait_for_job(const ft_ring_view& ring, const ft_block& block, uint64_t sequence) {
  while (load_acquire_system(&block.done) < sequence) {
    if (load_volatile(ring.abort)) return false;
    __nanosleep(64);
  }
  return true;
}

template <class Format>
__global__ void __launch_bounds__(kThreads) combine_kernel(ft_cache cache, ft_moe_layer layer, ft_step step) {
  wait_for_previous();
  const Stamper stamper(step.stamps);
  stamper.begin(FT_STAMP_COMBINE_BEGIN);
  const uint32_t row = blockIdx.y, first = (blockIdx.x * kThreads + threadIdx.x) * kFeatures;
  const bool on_input = layer.flags & FT_LAYER_WEIGHT_ON_INPUT;
  const uint64_t sequence = step.work ? step.work->sequence : 0;
  float4 sum = {0, 0, 0, 0};
  bool in_job = false;
  for (uint32_t k = 0; k < step.topk; k++) {
    const uint32_t pair = row * step.topk + k;
    bool on_gpu;
    if (step.work) {
      on_gpu = step.work->slots[pair] >= 0;
      in_job |= step.work->job_routes[pair] >= 0;
    } else {
      on_gpu = uint32_t(step.routes[pair]) < layer.num_experts &&
               (!step.num_valid || row < uint32_t(*step.num_valid));
    }
    if (!on_gpu || first >= layer.hidden) continue;
    const float weight = layer.output_scale * (on_input ? 1.0f : step.weights[pair]);
    const float4 value =
        *reinterpret_cast<const float4*>(step.partial + uint64_t(pair) * layer.hidden + first);
    sum.x += weight * value.x;
    sum.y += weight * value.y;
    sum.z += weight * value.z;
    sum.w += weight * value.w;
  }
  if (sequence && in_job) {  // the same for the whole block
    const ft_ring_view& ring = step.ring;
    const uint8_t* block = ring.blocks + (sequence - 1) % ring.num_blocks * ring.block_stride;
    const ft_block& job = *reinterpret_cast<const ft_block*>(block);
    const uint64_t start = nanoseconds();
    const bool done = threadIdx.x != 0 || wait_for_job(ring, job, sequence);
    const uint64_t waited = nanoseconds() - start;
    __syncthreads();
    stamper.begin(FT_STAMP_JOB_DONE);
    float4 value = {0, 0, 0, 0};
    if (first < layer.hidden) {
      const float* results = reinterpret_cast<const float*>(block + ring.results_offset);
      value = __ldcv(reinterpret_cast<const float4*>(results + uint64_t(row) * layer.hidden + first));
    }
    if (threadIdx.x == 0) {  // the status takes the link at the same time as the results
      const uint32_t failed = done ? load_volatile(&job.status) : FT_FAILED_ABORTED;
      if (failed) *cache.failure = failed;
      if (blockIdx.x == 0 && row == step.work->first_job_row) {
        cache.counters->wait_ns += waited;
        cache.counters->failed_jobs += failed != 0;
      }
    }
    sum.x += value.x;
    sum.y += value.y;
    sum.z += value.z;
    sum.w += value.w;
  }
  if (first < layer.hidden) {
    typename Format::Element out[kFeatures] = {Format::from_float(sum.x), Format::from_float(sum.y),
                                               Format::from_float(sum.z), Format::from_float(sum.w)};
    auto* to = static_cast<typename Format::Element*>(step.out) + uint64_t(row) * layer.hidden + first;
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(out);
  }
  stamper.end(FT_STAMP_COMBINE_END);
}

}  // namespace
}  // namespace ft

extern "C" {

int ft_combine(const ft_cache* cache, const ft_moe_layer* layer, const ft_step* step, int early,
               void* stream) {
  using namespace ft;
  dim3 grid((layer->hidden + kThreads * kFeatures - 1) / (kThreads * kFeatures), step->rows);
  if (step->row_dtype != FT_DTYPE_BF16 && step->row_dtype != FT_DTYPE_FP16) return cudaErrorInvalidValue;
  auto kernel = step->row_dtype == FT_DTYPE_BF16 ? combine_kernel<Bf16> : combine_kernel<Fp16>;
  return launch(kernel, grid, kThreads, early != 0, stream, *cache, *layer, *step);
}

}  // extern "C"
