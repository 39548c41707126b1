// SPDX-License-Identifier: Apache-2.0
//
// The plan of a job as a pure function: every pair in exactly one slot, every (slot, feature) in exactly one
// tile, groups within their limit.
#include "plan.h"

#include <cstring>
#include <map>

#include "testing.h"

using namespace testing;

namespace {

void no_pack(const ft::PackArgs&) {}
void no_gate_up(const ft::GateUpArgs&) {}
void no_down(const ft::DownArgs&) {}
constexpr ft::KernelSet kFew{"few", 1, 4, no_pack, no_gate_up, no_down};
constexpr ft::KernelSet kMany{"many", 16, 4, no_pack, no_gate_up, no_down};

ft::Layer make_layer(uint32_t experts, uint32_t hidden, uint32_t intermediate) {
  ft::Layer layer;
  memset(&layer.table, 0, sizeof(layer.table));
  layer.table.num_experts = experts;
  layer.table.hidden = hidden;
  layer.table.intermediate = intermediate;
  layer.gate_up_bytes = uint64_t(4) * hidden * intermediate;
  layer.down_bytes = uint64_t(2) * hidden * intermediate;
  return layer;
}

// Every pair with a route has one slot, in a run of its expert; no two pairs share a slot.
void check_slots(const ft::JobPlan& plan, const std::vector<int32_t>& routes) {
  std::map<uint32_t, uint32_t> pair_at;
  for (const ft::Run& run : plan.runs) {
    CHECK(run.slot % run.kernels->row_group == 0, run.slot);
    for (uint32_t i = 0; i < run.rows; i++) {
      uint32_t pair = plan.pairs[run.first_pair + i];
      CHECK(routes[pair] == int32_t(run.expert), pair);
      CHECK(plan.slots[pair] == run.slot + i, pair);
      CHECK(pair_at.emplace(run.slot + i, pair).second, "slot used twice: ", run.slot + i);
      CHECK(i == 0 || plan.pairs[run.first_pair + i - 1] < pair, "pairs out of order");
    }
  }
  size_t routed = 0;
  for (size_t i = 0; i < routes.size(); i++) {
    routed += routes[i] >= 0;
    CHECK((routes[i] < 0) == (plan.slots[i] == ft::JobPlan::kNoSlot), i);
  }
  CHECK(pair_at.size() == routed, pair_at.size(), " of ", routed);
}

void check_groups(const ft::JobPlan& plan, uint32_t limit) {
  uint32_t run = 0, slot = 0;
  for (const ft::Group& group : plan.groups) {
    CHECK(group.first_run == run && group.end_run > run, "groups do not follow each other");
    CHECK(group.first_slot >= slot && group.end_slot - group.first_slot <= limit, group.first_slot,
          group.end_slot);
    for (; run < group.end_run; run++)
      CHECK(plan.runs[run].slot >= group.first_slot &&
                plan.runs[run].slot + plan.runs[run].rows <= group.end_slot,
            run);
    slot = group.end_slot;
  }
  CHECK(run == plan.runs.size(), run);
}

// The tiles cover rows x features [first, features) of every run exactly once; `first` is a run's own or 0.
void check_tiles(const ft::JobPlan& plan, const ft::Group& group, const std::vector<ft::Tile>& tiles,
                 uint32_t features, bool all_features) {
  std::map<uint32_t, uint64_t> covered;
  for (const ft::Tile& tile : tiles) {
    CHECK(tile.run >= group.first_run && tile.run < group.end_run, tile.run);
    CHECK(tile.begin % ft::kBandStep == 0 && tile.end <= features && tile.end - tile.begin <= ft::kMaxBand,
          tile.begin);
    CHECK(all_features || tile.begin >= plan.runs[tile.run].first_feature, tile.begin);
    CHECK(tile.first_row % plan.runs[tile.run].kernels->row_group == 0, tile.first_row);
    covered[tile.run] += uint64_t(tile.rows) * (tile.end - tile.begin);
  }
  for (uint32_t i = group.first_run; i < group.end_run; i++) {
    uint32_t first = all_features ? 0 : plan.runs[i].first_feature;
    CHECK(covered[i] == uint64_t(plan.runs[i].rows) * (features - first), i, " ", covered[i]);
  }
}

// Runs of the shared expert begin at its first feature; the job reads so much less.
void check_sharing(const ft::JobPlan& plan, const ft::Layer& layer, const ft::SharedExpert& shared) {
  bool routed = false;
  for (const ft::Run& run : plan.runs) {
    bool is_shared = int32_t(run.expert) == shared.expert;
    routed |= is_shared;
    CHECK(run.first_feature == (is_shared ? shared.begin : 0), run.first_feature);
  }
  uint64_t feature_bytes = uint64_t(6) * layer.table.hidden;
  uint64_t bytes = plan.num_experts * feature_bytes * layer.table.intermediate;
  CHECK(plan.bytes(layer) == bytes - (routed ? shared.begin * feature_bytes : 0), plan.bytes(layer));
}

void random_plan(std::mt19937_64& random) {
  uint32_t experts = uint32_t(1 + random() % 300), topk = uint32_t(1 + random() % 10);
  uint32_t rows = uint32_t(1 + random() % (random() % 2 ? 8 : 3000));
  uint32_t hidden = uint32_t(1 + random() % 8000), intermediate = uint32_t(1 + random() % 16000);
  ft::Layer layer = make_layer(experts, hidden, intermediate);
  std::vector<int32_t> routes(size_t(rows) * topk);
  for (int32_t& route : routes) route = int32_t(random() % (experts + 1)) - 1;
  ft::KernelChoice choice{&kFew, &kMany, uint32_t(1 + random() % 40)};
  ft::JobPlan plan;
  ft::SharedExpert shared{int32_t(random() % (experts + 1)) - 1, 0};
  shared.begin = uint32_t(random() % (intermediate / FT_SHARED_STEP + 1)) * FT_SHARED_STEP;
  CHECK(plan.build(layer, choice, routes.data(), rows, topk, shared));
  check_slots(plan, routes);
  check_sharing(plan, layer, shared);
  check_groups(plan, ft::max_group_slots(ft::slot_bytes(layer.table, 4)));
  for (const ft::Group& group : plan.groups) {
    uint32_t threads = uint32_t(1 + random() % 64);
    check_tiles(plan, group, plan.gate_up_tiles(layer, group, threads), intermediate, false);
    check_tiles(plan, group, plan.down_tiles(layer, group, threads), hidden, true);
  }
}

void bad_routes_are_refused() {
  ft::Layer layer = make_layer(8, 64, 64);
  for (int32_t bad : {8, -2, INT32_MAX, INT32_MIN}) {
    int32_t routes[] = {0, 7, bad, -1};
    ft::JobPlan plan;
    CHECK(!plan.build(layer, {&kFew, nullptr, UINT32_MAX}, routes, 2, 2, {}), bad);
    CHECK(plan.bad_route == bad, plan.bad_route);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(seed());
  for (int i = 0; i < 200; i++) random_plan(random);
  bad_routes_are_refused();
  return report("plan", 201);
}
