// SPDX-License-Identifier: Apache-2.0
//
// What the executor asks of an expert kernel, and how one is found.
//
// A kernel set runs one expert over some rows in three steps, each cut into pieces by the executor:
//
//   pack      token rows of the ring -> packed rows in the element type that the kernel multiplies
//   gate_up   packed rows, features [begin, end) of the intermediate -> packed h = act(gate) * up
//   down      packed h, features [begin, end) of the output -> f32 partial sums, not yet weighted
//
// Contract of every kernel: products are accumulated in float32, and one output element is summed in an
// order that depends on the matrix alone, never on how rows and features were cut into pieces. So results
// do not depend on the number of threads or on timing.
//
// This header is included by files compiled for different instruction sets: no inline functions here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sglang_ft/ring.h"

namespace ft {

// Packed rows are padded with zeros to a multiple of this many elements.
constexpr uint32_t kPackedPadding = 32;
// Floats of per-thread scratch that gate_up may use.
constexpr uint32_t kScratchFloats = 16384;
// Most features of one gate_up piece.
constexpr uint32_t kMaxBand = 128;
// Pieces begin at multiples of this many features, or of the kernel set's row_group if that is more.
constexpr uint32_t kBandStep = 8;

// Weights of one role of one expert: [outs, ins], row-major, and what the format keeps beside them.
struct Matrix {
  const void* weights;
  const void* scale;   // null when the format has none
  const void* scale2;  // null when the format has none
  const float* bias;   // f32 [outs] or null
  uint32_t outs;
  uint32_t ins;
  uint32_t first_in = 0;  // the sum over ins begins here, a multiple of FT_SHARED_STEP
};

struct Activation {
  uint32_t kind;  // ft_activation
  bool gated;
  bool interleaved;
  float alpha;
  float limit;  // 0: no clamp
};

struct PackArgs {
  const void* rows;           // [*, hidden] of row_dtype
  const uint32_t* row_index;  // [count] rows to take
  const float* factor;        // [count] multiplies the rows; null: no factor
  void* packed;               // row 0 of the result, at a multiple of row_group rows
  uint32_t row_dtype;         // ft_dtype
  uint32_t hidden;
  uint32_t count;
};

struct GateUpArgs {
  Matrix weights;
  Activation activation;
  const void* packed;  // rows of this piece
  void* h;             // packed rows of this piece, [rows, intermediate]
  float* scratch;      // f32 [kScratchFloats], 64-byte aligned
  uint32_t rows;
  uint32_t intermediate;
  uint32_t begin, end;  // features, at most kMaxBand
  bool goes_on;         // the caller does the features from `end` on next
};

struct DownArgs {
  Matrix weights;
  const void* h;   // packed rows of this piece
  float* partial;  // f32 [rows, outs]
  float* scratch;  // f32 [kScratchFloats], 64-byte aligned
  uint32_t rows;
  uint32_t begin, end;  // features
  bool goes_on;         // as in gate_up
};

struct KernelSet {
  const char* name;
  uint32_t row_group;      // rows of one expert start at a multiple of it in the packed buffers
  uint32_t element_bytes;  // of packed rows and packed h
  void (*pack)(const PackArgs&);
  void (*gate_up)(const GateUpArgs&);
  void (*down)(const DownArgs&);
};

// The sets that serve one (format, row dtype, shape): `many` from many_rows rows of one expert on.
struct KernelChoice {
  const KernelSet* few = nullptr;
  const KernelSet* many = nullptr;
  uint32_t many_rows = UINT32_MAX;
};

// `few` is null when there is no kernel for it.
KernelChoice choose_kernels(ft_isa isa, uint32_t format, uint32_t row_dtype, uint32_t hidden,
                            uint32_t intermediate);

// Sums `bytes` (a multiple of 64) at `data` (64-byte aligned) with the widest loads of `isa`.
uint64_t streaming_sum(ft_isa isa, const void* data, size_t bytes);

}  // namespace ft
