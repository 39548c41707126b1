// SPDX-License-Identifier: Apache-2.0
#include "sgl_ft_kernel/plan.h"

#include "device_block.cuh"
#include "launch.cuh"
#include "sgl_ft_kernel/host_block.h"

namespace ft {
namespace {

constexpr int kPlanThreads = 256;

__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(ft_cache cache, ft_moe_layer layer, ft_step step) {
  __shared__ PlanScratch scratch;
  __shared__ DeviceBlock<kPlanThreads>::Shared shared;
  DeviceBlock<kPlanThreads> block{shared};
  wait_for_previous();
  const Stamper stamper(step.stamps);
  stamper.begin(FT_STAMP_PLAN_BEGIN);
  StepPlanner<DeviceBlock<kPlanThreads>>(block, scratch, cache, layer, step).run();
  stamper.end(FT_STAMP_PLAN_END);
}

bool too_large(const ft_moe_layer& layer, const ft_step& step) {
  return layer.num_experts > FT_CACHE_MAX_EXPERTS || uint64_t(step.rows) * step.topk > FT_CACHE_MAX_PAIRS ||
         layer.hidden % 8 != 0 || layer.intermediate % 8 != 0;
}

}  // namespace
}  // namespace ft

extern "C" {

int ft_plan(const ft_cache* cache, const ft_moe_layer* layer, const ft_step* step, void* stream) {
  if (ft::too_large(*layer, *step)) return cudaErrorInvalidValue;
  return ft::launch(ft::plan_kernel, 1, ft::kPlanThreads, false, stream, *cache, *layer, *step);
}

}  // extern "C"
