// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#define FT_DECLARE_TARGET(target)                                                                           \
  namespace target {                                                                                        \
  KernelChoice choose_kernels(uint32_t format, uint32_t row_dtype, uint32_t hidden, uint32_t intermediate); \
  uint64_t streaming_sum(const void* data, size_t bytes);                                                   \
  }

namespace ft {

FT_DECLARE_TARGET(scalar)
#if defined(__x86_64__)
FT_DECLARE_TARGET(avx2)
FT_DECLARE_TARGET(avx512)
FT_DECLARE_TARGET(avx512_bf16)
FT_DECLARE_TARGET(amx)
#endif

KernelChoice choose_kernels(ft_isa isa, uint32_t format, uint32_t row_dtype, uint32_t hidden,
                            uint32_t intermediate) {
  switch (isa) {
#if defined(__x86_64__)
    case FT_ISA_AVX2:
      return avx2::choose_kernels(format, row_dtype, hidden, intermediate);
    case FT_ISA_AVX512:
      return avx512::choose_kernels(format, row_dtype, hidden, intermediate);
    case FT_ISA_AVX512_BF16:
      return avx512_bf16::choose_kernels(format, row_dtype, hidden, intermediate);
    case FT_ISA_AMX:
      return amx::choose_kernels(format, row_dtype, hidden, intermediate);
#endif
    default:
      return scalar::choose_kernels(format, row_dtype, hidden, intermediate);
  }
}

uint64_t streaming_sum(ft_isa isa, const void* data, size_t bytes) {
  switch (isa) {
#if defined(__x86_64__)
    case FT_ISA_AVX2:
      return avx2::streaming_sum(data, bytes);
    case FT_ISA_AVX512:
    case FT_ISA_AVX512_BF16:
    case FT_ISA_AMX:
      return avx512::streaming_sum(data, bytes);
#endif
    default:
      return scalar::streaming_sum(data, bytes);
  }
}

}  // namespace ft
