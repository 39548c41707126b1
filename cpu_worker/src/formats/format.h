// SPDX-License-Identifier: Apache-2.0
//
// What a weight format is. A format is one file here; formats/all.h lists them. It has two parts:
//
// 1. struct XFormat, plain C++, for validation and byte counts:
//      static constexpr uint32_t kId;                                         ft_format
//      static constexpr uint64_t kAlignment;                                  bytes, of each expert's role
//      static constexpr uint64_t role_bytes(role, outs, ins);                 bytes of one expert's role, 0:
//      not used static constexpr bool fits(hidden, intermediate);                      shapes that the format
//      can hold
//    Roles of biases are float32 in every format and are none of its business.
//
// 2. XFormat::Row<V>, one weight row [ins] of a matrix, decoded by the vectors V of an instruction set:
//      Row(const Matrix&, uint32_t out);
//      V::Reg load(uint32_t k) const;                       weights [k, k + V::kWidth) in float32
//      V::Reg load_partial(uint32_t k, uint32_t n) const;   weights [k, k + n), n < V::kWidth, then zeros
//      void prefetch(uint32_t k) const;                     asks for the cache line of weight k
//    k is a multiple of V::kWidth. Block scales are applied by load, so that the kernels need not know them.
//
// A format may add kernels of its own for instruction sets that multiply it directly (bf16.h does).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../kernels/kernels.h"
#include "sglang_ft/ring.h"

namespace ft {

// One entry of the list in formats/registry.cpp.
struct FormatInfo {
  uint32_t id;
  const char* name;
  uint64_t alignment;
  uint64_t (*role_bytes)(uint32_t role, uint64_t outs, uint64_t ins);
  bool (*fits)(uint64_t hidden, uint64_t intermediate);
};

// Null when there is no such format.
const FormatInfo* find_format(uint32_t id);

}  // namespace ft
