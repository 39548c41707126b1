// SPDX-License-Identifier: Apache-2.0
//
// The plan of one job: which expert runs over which rows, where its packed rows lie, and how the work is cut.
// A pure function of the routes, the layer's shape and the number of threads; runs nothing. Only the cutting
// into pieces depends on the number of threads, and kernels give the same bits however they are cut.
//
//   pair   one (row, k) whose route is not -1
//   run    one expert over some of its pairs, in ascending pair order; `slot` is the first of its packed rows
//   group  consecutive runs whose packed rows fit the scratch together; groups run one after another
#pragma once

#include <cstdint>
#include <vector>

#include "layers.h"

namespace ft {

// Most packed bytes of one group: rows, h and partial sums.
constexpr uint64_t kGroupBytes = uint64_t(64) << 20;
constexpr uint32_t kMinGroupSlots = 128;

// The expert of which only intermediate features [begin, I) are computed, without the down bias; -1: none.
struct SharedExpert {
  int32_t expert = -1;
  uint32_t begin = 0;

  bool is(uint32_t e) const { return expert >= 0 && uint32_t(expert) == e; }
};

struct Run {
  uint32_t expert;
  uint32_t first_pair;  // into JobPlan::pairs
  uint32_t rows;
  uint32_t slot;           // counted from the first slot of the job
  uint32_t first_feature;  // of the intermediate; 0 but for the shared expert
  const KernelSet* kernels;
};

struct Group {
  uint32_t first_run, end_run;
  uint32_t first_slot, end_slot;
};

// A block of rows of one run and a band of output features.
struct Tile {
  uint32_t run;
  uint32_t first_row, rows;  // within the run
  uint32_t begin, end;       // features; both 0 when packing

  // Whether it has the next features for the same rows.
  bool follows(const Tile& other) const {
    return run == other.run && first_row == other.first_row && begin == other.end;
  }
};

// Bytes of one slot in each scratch buffer.
struct SlotBytes {
  uint64_t packed, h, partial;
  uint64_t total() const { return packed + h + partial; }
};

SlotBytes slot_bytes(const ft_layer& layer, uint32_t element_bytes);
uint32_t max_group_slots(const SlotBytes& bytes);

class JobPlan {
 public:
  static constexpr uint32_t kNoSlot = UINT32_MAX;

  // Copies and checks routes [rows, topk]. False: a route is out of range; `bad_route` is its value.
  bool build(const Layer& layer, const KernelChoice& choice, const int32_t* routes, uint32_t rows,
             uint32_t topk, const SharedExpert& shared);

  // Expert bytes that the job reads.
  uint64_t bytes(const Layer& layer) const;

  // Tiles of a group for packing and for either projection. The result is valid until the next call.
  const std::vector<Tile>& pack_tiles(const Group& group);
  const std::vector<Tile>& gate_up_tiles(const Layer& layer, const Group& group, uint32_t threads);
  const std::vector<Tile>& down_tiles(const Layer& layer, const Group& group, uint32_t threads);

  std::vector<Run> runs;
  std::vector<Group> groups;
  std::vector<uint32_t> pairs;  // row * topk + k, by expert, ascending within an expert
  std::vector<uint32_t> slots;  // of each pair [rows * topk]; kNoSlot: not routed
  uint32_t num_experts = 0;     // distinct
  uint32_t max_slots = 0;       // of any group
  int32_t bad_route = 0;

 private:
  bool copy_routes(const int32_t* routes, size_t count, uint32_t num_experts);
  void sort_pairs(uint32_t num_experts);
  void make_runs(const KernelChoice& choice, uint32_t group_limit, const SharedExpert& shared);
  void make_groups(uint32_t group_limit);
  void assign_slots();
  // Cuts features [first(run), features) of every run.
  const std::vector<Tile>& cut(const Group& group, uint32_t features, uint64_t feature_bytes,
                               uint32_t threads, uint32_t (*first)(const Run&));

  SharedExpert shared_;  // only if a row is routed to it
  std::vector<int32_t> routes_;
  std::vector<uint32_t> offsets_;  // [E + 1] first pair of each expert
  std::vector<Tile> tiles_;
};

}  // namespace ft
