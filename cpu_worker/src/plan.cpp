// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>

namespace ft {
namespace {

// Weight bytes of one tile: below the least a claim is not worth it, above the most too few tiles are left to
// balance. With many rows a tile computes longer than it reads, so wider bands read its rows less often.
constexpr uint64_t kMinTileBytes = 24 << 10, kMaxTileBytes = 256 << 10, kMaxTileBytesOfManyRows = 1 << 20;
constexpr uint32_t kManyRows = 64;
constexpr uint32_t kTilesPerThread = 24;
constexpr uint32_t kMaxTileRows = 128, kPackTileRows = 32;  // multiples of every KernelSet::row_group

uint64_t round_up(uint64_t n, uint64_t step) { return (n + step - 1) / step * step; }

// Features of one tile, in steps of `step`. `total` bytes are spread over threads and tiles per thread.
uint32_t band_features(uint64_t total, uint64_t feature_bytes, uint32_t threads, uint64_t most,
                       uint32_t step) {
  uint64_t target = std::clamp(total / (threads * kTilesPerThread), kMinTileBytes, most);
  uint64_t band = std::max<uint64_t>(target / std::max<uint64_t>(feature_bytes, 1) / step, 1) * step;
  return uint32_t(std::min<uint64_t>(band, kMaxBand));
}

}  // namespace

SlotBytes slot_bytes(const ft_layer& layer, uint32_t element_bytes) {
  return {round_up(layer.hidden, kPackedPadding) * element_bytes,
          round_up(layer.intermediate, kPackedPadding) * element_bytes,
          uint64_t(layer.hidden) * sizeof(float)};
}

uint32_t max_group_slots(const SlotBytes& bytes) {
  return std::max(uint32_t(kGroupBytes / bytes.total() / kMaxTileRows * kMaxTileRows), kMinGroupSlots);
}

bool JobPlan::build(const Layer& layer, const KernelChoice& choice, const int32_t* routes, uint32_t rows,
                    uint32_t topk, const SharedExpert& shared) {
  uint32_t num_experts_of_layer = layer.table.num_experts;
  if (!copy_routes(routes, size_t(rows) * topk, num_experts_of_layer)) return false;
  sort_pairs(num_experts_of_layer);
  uint32_t limit = max_group_slots(slot_bytes(layer.table, choice.few->element_bytes));
  make_runs(choice, limit, shared);
  make_groups(limit);
  assign_slots();
  return true;
}

bool JobPlan::copy_routes(const int32_t* routes, size_t count, uint32_t num_experts_of_layer) {
  routes_.assign(routes, routes + count);
  for (int32_t route : routes_) {
    if (route >= -1 && route < int32_t(num_experts_of_layer)) continue;
    bad_route = route;
    return false;
  }
  return true;
}

// Counting sort by expert.
void JobPlan::sort_pairs(uint32_t num_experts_of_layer) {
  offsets_.assign(num_experts_of_layer + 1, 0);
  for (int32_t route : routes_)
    if (route >= 0) offsets_[route + 1]++;
  num_experts = uint32_t(std::count_if(offsets_.begin(), offsets_.end(), [](uint32_t n) { return n > 0; }));
  for (uint32_t e = 0; e < num_experts_of_layer; e++) offsets_[e + 1] += offsets_[e];
  pairs.resize(offsets_.back());
  slots.assign(offsets_.begin(), offsets_.end() - 1);  // borrowed as write positions
  for (uint32_t pair = 0; pair < routes_.size(); pair++)
    if (routes_[pair] >= 0) pairs[slots[routes_[pair]]++] = pair;
}

void JobPlan::make_runs(const KernelChoice& choice, uint32_t group_limit, const SharedExpert& shared) {
  runs.clear();
  shared_ = {};
  for (uint32_t e = 0; e + 1 < offsets_.size(); e++) {
    uint32_t count = offsets_[e + 1] - offsets_[e];
    const KernelSet* kernels = count >= choice.many_rows ? choice.many : choice.few;
    if (shared.is(e) && count > 0) shared_ = shared;
    uint32_t first_feature = shared.is(e) ? shared.begin : 0;
    for (uint32_t done = 0; done < count; done += group_limit)
      runs.push_back({e, offsets_[e] + done, std::min(group_limit, count - done), 0, first_feature, kernels});
  }
}

void JobPlan::make_groups(uint32_t group_limit) {
  groups.clear();
  max_slots = 0;
  uint32_t slot = 0;
  for (uint32_t i = 0; i < runs.size(); i++) {
    Run& run = runs[i];
    uint32_t need = uint32_t(round_up(run.rows, run.kernels->row_group));
    if (groups.empty() || slot + need + run.kernels->row_group > groups.back().first_slot + group_limit) {
      slot = uint32_t(round_up(slot, kMaxTileRows));
      groups.push_back({i, i, slot, slot});
    }
    Group& group = groups.back();
    run.slot = uint32_t(round_up(slot, run.kernels->row_group));
    slot = run.slot + need;
    group.end_run = i + 1;
    group.end_slot = slot;
    max_slots = std::max(max_slots, slot - group.first_slot);
  }
}

void JobPlan::assign_slots() {
  slots.assign(routes_.size(), kNoSlot);
  for (const Run& run : runs)
    for (uint32_t i = 0; i < run.rows; i++) slots[pairs[run.first_pair + i]] = run.slot + i;
}

uint64_t JobPlan::bytes(const Layer& layer) const {
  if (shared_.expert < 0) return num_experts * layer.expert_bytes();
  return (num_experts - 1) * layer.expert_bytes() + layer.bytes_without_down_bias(shared_.begin);
}

const std::vector<Tile>& JobPlan::pack_tiles(const Group& group) {
  tiles_.clear();
  for (uint32_t i = group.first_run; i < group.end_run; i++)
    for (uint32_t row = 0; row < runs[i].rows; row += kPackTileRows)
      tiles_.push_back({i, row, std::min(kPackTileRows, runs[i].rows - row), 0, 0});
  return tiles_;
}

const std::vector<Tile>& JobPlan::gate_up_tiles(const Layer& layer, const Group& group, uint32_t threads) {
  uint64_t bytes = layer.gate_up_bytes / layer.table.intermediate;
  return cut(group, layer.table.intermediate, bytes, threads,
             [](const Run& run) { return run.first_feature; });
}

const std::vector<Tile>& JobPlan::down_tiles(const Layer& layer, const Group& group, uint32_t threads) {
  uint64_t bytes = layer.down_bytes / layer.table.hidden;
  return cut(group, layer.table.hidden, bytes, threads, [](const Run&) { return 0u; });
}

const std::vector<Tile>& JobPlan::cut(const Group& group, uint32_t features, uint64_t feature_bytes,
                                      uint32_t threads, uint32_t (*first)(const Run&)) {
  tiles_.clear();
  uint64_t total = 0;
  for (uint32_t i = group.first_run; i < group.end_run; i++)
    total += (runs[i].rows + kMaxTileRows - 1) / kMaxTileRows * (features - first(runs[i])) * feature_bytes;
  for (uint32_t i = group.first_run; i < group.end_run; i++) {
    uint64_t most = runs[i].rows >= kManyRows ? kMaxTileBytesOfManyRows : kMaxTileBytes;
    uint32_t step = std::max(kBandStep, runs[i].kernels->row_group);
    uint32_t band = band_features(total, feature_bytes, threads, most, step);
    for (uint32_t row = 0; row < runs[i].rows; row += kMaxTileRows)
      for (uint32_t begin = first(runs[i]); begin < features; begin += band)
        tiles_.push_back(
            {i, row, std::min(kMaxTileRows, runs[i].rows - row), begin, std::min(begin + band, features)});
  }
  return tiles_;
}

}  // namespace ft
