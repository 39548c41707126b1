// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "sgl_ft_kernel/host_block.h"
#include "sgl_ft_kernel/plan.h"

extern "C" {

int ft_plan_on_host(const ft_cache* cache, const ft_moe_layer* layer, const ft_step* step) {
  auto scratch = std::make_unique<ft::PlanScratch>();
  ft::HostBlock block;
  ft::StepPlanner<ft::HostBlock>(block, *scratch, *cache, *layer, *step).run();
  return 0;
}

int ft_abi_sizes(uint64_t* sizes, int capacity) {
  const uint64_t all[] = {sizeof(ft_split), sizeof(ft_cache_control), sizeof(ft_cache_counters),
                          sizeof(ft_cache), sizeof(ft_role_memory),   sizeof(ft_moe_layer),
                          sizeof(ft_run),   sizeof(ft_work),          sizeof(ft_ring_view),
                          sizeof(ft_step),  sizeof(ft_gathering),     sizeof(ft_copy)};
  const int count = sizeof(all) / sizeof(all[0]);
  for (int i = 0; i < count && i < capacity; i++) sizes[i] = all[i];
  return count;
}

}  // extern "C"
