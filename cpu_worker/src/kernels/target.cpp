// SPDX-License-Identifier: Apache-2.0
//
// The kernels of one instruction set. Compiled once for each, with its compiler flags and FT_TARGET.
#include "target.h"

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

#include "../formats/all.h"
#include "row_kernels.h"

namespace ft::FT_TARGET {
namespace {

#define FT_TEXT_OF(x) #x
#define FT_TEXT(x) FT_TEXT_OF(x)

template <class Format>
constexpr KernelSet kFloatKernels = RowKernels<FloatDot<Vector, Format>>::set(FT_TEXT(FT_TARGET) "_float");

template <class Format>
KernelChoice choose(uint32_t row_dtype, uint32_t hidden, uint32_t intermediate) {
  KernelChoice native = NativeKernels<Format>::choose(row_dtype, hidden, intermediate);
  if (native.few) return native;
  return {&kFloatKernels<Format>, nullptr, UINT32_MAX};
}

}  // namespace

KernelChoice choose_kernels(uint32_t format, uint32_t row_dtype, uint32_t hidden, uint32_t intermediate) {
#define FT_CHOOSE(Format) \
  if (format == Format::kId) return choose<Format>(row_dtype, hidden, intermediate);
  FT_FOR_EACH_FORMAT(FT_CHOOSE)
#undef FT_CHOOSE
  return {nullptr, nullptr, UINT32_MAX};
}

uint64_t streaming_sum(const void* data, size_t bytes) { return sum_words(data, bytes); }

}  // namespace ft::FT_TARGET
