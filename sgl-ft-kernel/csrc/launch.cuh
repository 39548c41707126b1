// SPDX-License-Identifier: Apache-2.0
//
// Launches in which the next kernel of the stream may start while the last blocks of this one still run.
//
// Every kernel here calls wait_for_previous() before it reads anything that an earlier one wrote, in all of
// its threads: so a kernel has only ended when all before it have. `early` asks the device to start the
// kernel before the previous one has ended; only where the previous kernel of the stream is its one
// dependency, and from Hopper on.
#pragma once

#include <cuda_runtime.h>

namespace ft {

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

inline bool early_starts() {
  static const bool supported = [] {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           major >= 9;
  }();
  return supported;
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int threads, bool early, void* stream,
           Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early && early_starts() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace ft
