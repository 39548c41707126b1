// SPDX-License-Identifier: Apache-2.0
//
// The layer table after it was checked: what the ring says, turned into pointers into the pool.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "sglang_ft/ring.h"

namespace ft {

// Where the worker sees the ring and the pool.
struct Memory {
  std::byte* ring = nullptr;
  const std::byte* pool = nullptr;
  uint64_t pool_bytes = 0;

  ft_ring_header& header() const { return *reinterpret_cast<ft_ring_header*>(ring); }
  const ft_layer& layer(uint32_t index) const {
    return reinterpret_cast<const ft_layer*>(ring + header().layers_offset)[index];
  }
  ft_block& block(uint64_t seq) const {
    ft_ring_header& h = header();
    return *reinterpret_cast<ft_block*>(ring + h.blocks_offset + (seq - 1) % h.num_blocks * h.block_stride);
  }
};

// One MoE layer. `status` is FT_OK or the reason why its jobs are refused.
struct Layer {
  ft_status status = FT_OK;
  ft_layer table;  // a copy: the ring may not change under a running job
  const std::byte* pool = nullptr;
  std::array<KernelChoice, 4> kernels;  // by ft_dtype of the rows
  uint64_t gate_up_bytes = 0;           // of one expert's weights, scales and biases
  uint64_t down_bytes = 0;

  uint64_t expert_bytes() const { return gate_up_bytes + down_bytes; }
  // Of intermediate features [begin, I), in every role but the down bias.
  uint64_t bytes_without_down_bias(uint32_t begin) const;
  bool gated() const { return table.flags & FT_LAYER_GATED; }
  Activation activation() const;
  Matrix gate_up(uint32_t expert) const;
  Matrix down(uint32_t expert) const;

 private:
  const void* at(ft_role role, uint32_t expert) const;
};

// Checks layer `index` of the table. Never fails: the outcome is in Layer::status.
Layer attach_layer(const Memory& memory, uint32_t index, ft_isa isa);

}  // namespace ft
