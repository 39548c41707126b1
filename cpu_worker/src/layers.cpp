// SPDX-License-Identifier: Apache-2.0
#include "layers.h"

#include "formats/format.h"

namespace ft {
namespace {

constexpr uint32_t kMaxDimension = 1u << 24;
constexpr uint32_t kMaxExperts = 1u << 16;
constexpr uint32_t kKnownFlags = FT_LAYER_GATED | FT_LAYER_INTERLEAVED | FT_LAYER_WEIGHT_ON_INPUT;

uint64_t gate_up_outs(const ft_layer& t) {
  return uint64_t(t.intermediate) * (t.flags & FT_LAYER_GATED ? 2 : 1);
}

bool shape_allowed(const ft_layer& t, uint32_t max_hidden) {
  return t.hidden >= 1 && t.hidden <= max_hidden && t.hidden <= kMaxDimension && t.intermediate >= 1 &&
         t.intermediate <= kMaxDimension && t.num_experts >= 1 && t.num_experts <= kMaxExperts;
}

bool activation_allowed(const ft_layer& t) {
  bool gated = t.flags & FT_LAYER_GATED;
  if (t.activation > FT_ACT_SWIGLU_OAI || t.flags & ~kKnownFlags) return false;
  if (t.activation == FT_ACT_SWIGLU_OAI && !gated) return false;
  return gated || !(t.flags & FT_LAYER_INTERLEAVED);
}

bool is_down(uint32_t role) {
  return role == FT_ROLE_DOWN || role == FT_ROLE_DOWN_BIAS || role == FT_ROLE_DOWN_SCALE ||
         role == FT_ROLE_DOWN_SCALE2;
}

bool is_bias(uint32_t role) { return role == FT_ROLE_GATE_UP_BIAS || role == FT_ROLE_DOWN_BIAS; }

// Bytes of one expert's role; 0 when this layer has no such role.
uint64_t role_bytes(const ft_layer& t, const FormatInfo& format, uint32_t role) {
  bool has = t.role[role].stride != 0;
  if (role == FT_ROLE_GATE_UP_BIAS) return has ? gate_up_outs(t) * sizeof(float) : 0;
  if (role == FT_ROLE_DOWN_BIAS) return has ? uint64_t(t.hidden) * sizeof(float) : 0;
  return is_down(role) ? format.role_bytes(role, t.hidden, t.intermediate)
                       : format.role_bytes(role, gate_up_outs(t), t.hidden);
}

// All experts of the role lie in the pool. Kernels load unaligned, so only elements must be aligned.
bool inside_pool(const ft_role_view& view, uint64_t bytes, uint64_t alignment, uint64_t experts,
                 uint64_t pool_bytes) {
  if (view.offset % alignment || view.stride % alignment || view.stride < bytes) return false;
  if (bytes > pool_bytes || view.offset > pool_bytes - bytes) return false;
  return experts == 1 || view.stride <= (pool_bytes - bytes - view.offset) / (experts - 1);
}

ft_status check_roles(Layer& layer, const FormatInfo& format, uint64_t pool_bytes) {
  for (uint32_t role = 0; role < FT_MAX_ROLES; role++) {
    uint64_t bytes = role_bytes(layer.table, format, role);
    ft_role_view& view = layer.table.role[role];
    if (bytes == 0) {
      view = {};  // a role without meaning here: nothing may follow it into the pool
      continue;
    }
    if (view.stride == 0) return FT_ERR_FORMAT;
    uint64_t alignment = is_bias(role) ? alignof(float) : format.alignment;
    if (!inside_pool(view, bytes, alignment, layer.table.num_experts, pool_bytes)) return FT_ERR_BOUNDS;
    (is_down(role) ? layer.down_bytes : layer.gate_up_bytes) += bytes;
  }
  return FT_OK;
}

ft_status check_layer(Layer& layer, const Memory& memory) {
  const ft_layer& t = layer.table;
  if (!shape_allowed(t, memory.header().max_hidden)) return FT_ERR_SHAPE;
  const FormatInfo* format = find_format(t.format);
  if (!format || !format->fits(t.hidden, t.intermediate) || !activation_allowed(t)) return FT_ERR_FORMAT;
  return check_roles(layer, *format, memory.pool_bytes);
}

}  // namespace

Activation Layer::activation() const {
  return {table.activation, gated(), bool(table.flags & FT_LAYER_INTERLEAVED), table.act_alpha,
          table.act_limit};
}

uint64_t Layer::bytes_without_down_bias(uint32_t begin) const {
  uint64_t bias = table.role[FT_ROLE_DOWN_BIAS].stride ? table.hidden * sizeof(float) : 0;
  return (expert_bytes() - bias) / table.intermediate * (table.intermediate - begin);
}

const void* Layer::at(ft_role role, uint32_t expert) const {
  const ft_role_view& view = table.role[role];
  return view.stride ? pool + view.offset + expert * view.stride : nullptr;
}

Matrix Layer::gate_up(uint32_t expert) const {
  return {at(FT_ROLE_GATE_UP, expert),        at(FT_ROLE_GATE_UP_SCALE, expert),
          at(FT_ROLE_GATE_UP_SCALE2, expert), static_cast<const float*>(at(FT_ROLE_GATE_UP_BIAS, expert)),
          uint32_t(gate_up_outs(table)),      table.hidden};
}

Matrix Layer::down(uint32_t expert) const {
  return {at(FT_ROLE_DOWN, expert),
          at(FT_ROLE_DOWN_SCALE, expert),
          at(FT_ROLE_DOWN_SCALE2, expert),
          static_cast<const float*>(at(FT_ROLE_DOWN_BIAS, expert)),
          table.hidden,
          table.intermediate};
}

Layer attach_layer(const Memory& memory, uint32_t index, ft_isa isa) {
  Layer layer;
  layer.table = memory.layer(index);
  layer.pool = memory.pool;
  layer.status = check_layer(layer, memory);
  if (layer.status != FT_OK) return layer;
  const ft_layer& t = layer.table;
  for (uint32_t dtype = FT_DTYPE_BF16; dtype <= FT_DTYPE_FP32; dtype++) {
    layer.kernels[dtype] = choose_kernels(isa, t.format, dtype, t.hidden, t.intermediate);
    if (!layer.kernels[dtype].few) layer.status = FT_ERR_FORMAT;
  }
  return layer;
}

}  // namespace ft
