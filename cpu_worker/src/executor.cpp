// SPDX-License-Identifier: Apache-2.0
#include "executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace ft {
namespace {

// Rows and columns of one piece of the sum phase.
constexpr uint32_t kSumRows = 8, kSumColumns = 512;
// Below this many elements a phase is done by the calling thread: cheaper than handing it out.
constexpr uint64_t kInlineElements = 20000;

Matrix down_weights(const Layer& layer, uint32_t expert, const SharedExpert& shared) {
  Matrix m = layer.down(expert);
  if (!shared.is(expert)) return m;
  m.first_in = shared.begin;
  m.bias = nullptr;
  return m;
}

}  // namespace

Scratch::~Scratch() {
  if (data_) munmap(data_, bytes_);
}

std::byte* Scratch::reserve(uint64_t bytes) {
  if (bytes <= bytes_) return data_;
  if (data_) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = (bytes + (uint64_t(2) << 20) - 1) & ~((uint64_t(2) << 20) - 1);
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, bytes_, MADV_HUGEPAGE);
  data_ = static_cast<std::byte*>(p);
  return data_;
}

Executor::Executor(Team& team) : team_(team) {
  member_scratch_ =
      reinterpret_cast<float*>(members_.reserve(team.threads() * uint64_t(kScratchFloats) * sizeof(float)));
}

Outcome Executor::run(const Layer& layer, const JobData& job) {
  const KernelChoice& choice = layer.kernels[job.row_dtype];
  if (!plan_.build(layer, choice, job.routes, job.rows, job.topk, job.shared))
    return {FT_ERR_ROUTE, plan_.bad_route};
  compute_coefficients(layer, job);
  if (plan_.groups.empty()) memset(job.results, 0, size_t(job.rows) * layer.table.hidden * sizeof(float));
  for (const Group& group : plan_.groups) {
    GroupBuffers buffers = buffers_for(layer, group, choice.few->element_bytes);
    pack(layer, job, group, buffers);
    gate_up(layer, group, buffers);
    down(layer, job, group, buffers);
    add_up(layer, job, group, buffers, &group == &plan_.groups.front());
  }
  return {FT_OK, 0, plan_.num_experts, plan_.pairs.size(), plan_.bytes(layer)};
}

Executor::GroupBuffers Executor::buffers_for(const Layer& layer, const Group& group, uint32_t element_bytes) {
  SlotBytes bytes = slot_bytes(layer.table, element_bytes);
  uint64_t slots = plan_.max_slots;
  return {packed_.reserve(slots * bytes.packed), h_.reserve(slots * bytes.h),
          reinterpret_cast<float*>(partial_.reserve(slots * bytes.partial)), bytes, group.first_slot};
}

template <class Function>
void Executor::run_pieces(uint64_t elements, uint32_t count, const Function& function) {
  if (elements > kInlineElements) return team_.run(count, function);
  for (uint32_t i = 0; i < count; i++) function(Piece{i, 0, i + 1 < count});
}

// Where the router weight goes. The output scale is folded into the output factors.
void Executor::compute_coefficients(const Layer& layer, const JobData& job) {
  bool on_input = layer.table.flags & FT_LAYER_WEIGHT_ON_INPUT;
  size_t count = size_t(job.rows) * job.topk;
  output_factors_.resize(count);
  for (size_t i = 0; i < count; i++)
    output_factors_[i] = layer.table.output_scale * (on_input ? 1.0f : job.weights[i]);
  pair_rows_.resize(plan_.pairs.size());
  for (size_t i = 0; i < pair_rows_.size(); i++) pair_rows_[i] = plan_.pairs[i] / job.topk;
  input_factors_.resize(on_input ? pair_rows_.size() : 0);
  for (size_t i = 0; i < input_factors_.size(); i++) input_factors_[i] = job.weights[plan_.pairs[i]];
}

void Executor::pack(const Layer& layer, const JobData& job, const Group& group, const GroupBuffers& buffers) {
  const std::vector<Tile>& tiles = plan_.pack_tiles(group);
  uint64_t elements = uint64_t(group.end_slot - group.first_slot) * layer.table.hidden;
  run_pieces(elements, uint32_t(tiles.size()), [&](Piece piece) {
    const Tile& tile = tiles[piece.index];
    const Run& run = plan_.runs[tile.run];
    uint32_t pair = run.first_pair + tile.first_row;
    const float* factors = input_factors_.empty() ? nullptr : &input_factors_[pair];
    run.kernels->pack({job.input, &pair_rows_[pair], factors, buffers.packed_at(run.slot + tile.first_row),
                       job.row_dtype, layer.table.hidden, tile.rows});
  });
}

void Executor::gate_up(const Layer& layer, const Group& group, const GroupBuffers& buffers) {
  const std::vector<Tile>& tiles = plan_.gate_up_tiles(layer, group, team_.threads());
  Activation activation = layer.activation();
  team_.run(uint32_t(tiles.size()), [&](Piece piece) {
    const Tile& tile = tiles[piece.index];
    const Run& run = plan_.runs[tile.run];
    uint32_t slot = run.slot + tile.first_row;
    run.kernels->gate_up({layer.gate_up(run.expert), activation, buffers.packed_at(slot), buffers.h_at(slot),
                          scratch_of(piece.member), tile.rows, layer.table.intermediate, tile.begin, tile.end,
                          piece.goes_on && tiles[piece.index + 1].follows(tile)});
  });
}

void Executor::down(const Layer& layer, const JobData& job, const Group& group, const GroupBuffers& buffers) {
  const std::vector<Tile>& tiles = plan_.down_tiles(layer, group, team_.threads());
  team_.run(uint32_t(tiles.size()), [&](Piece piece) {
    const Tile& tile = tiles[piece.index];
    const Run& run = plan_.runs[tile.run];
    uint32_t slot = run.slot + tile.first_row;
    run.kernels->down({down_weights(layer, run.expert, job.shared), buffers.h_at(slot),
                       buffers.partial_at(slot), scratch_of(piece.member), tile.rows, tile.begin, tile.end,
                       piece.goes_on && tiles[piece.index + 1].follows(tile)});
  });
}

// results[row] (+)= sum over k, in order, of factor * partial. Groups follow each other, so the order of all
// additions is fixed.
void Executor::add_up(const Layer& layer, const JobData& job, const Group& group, const GroupBuffers& buffers,
                      bool first) {
  uint32_t hidden = layer.table.hidden;
  uint32_t column_blocks = (hidden + kSumColumns - 1) / kSumColumns;
  uint32_t row_blocks = (job.rows + kSumRows - 1) / kSumRows;
  uint64_t elements = uint64_t(group.end_slot - group.first_slot) * hidden;
  run_pieces(elements, row_blocks * column_blocks, [&](Piece piece) {
    uint32_t begin = piece.index % column_blocks * kSumColumns, end = std::min(begin + kSumColumns, hidden);
    uint32_t row = piece.index / column_blocks * kSumRows, end_row = std::min(row + kSumRows, job.rows);
    for (; row < end_row; row++) {
      float* result = job.results + size_t(row) * hidden;
      if (first) std::fill(result + begin, result + end, 0.0f);
      for (size_t pair = size_t(row) * job.topk; pair < size_t(row + 1) * job.topk; pair++) {
        uint32_t slot = plan_.slots[pair];
        if (slot < group.first_slot || slot >= group.end_slot) continue;  // not routed, or of another group
        const float* partial = buffers.partial_at(slot);
        float factor = output_factors_[pair];
        for (uint32_t i = begin; i < end; i++) result[i] += factor * partial[i];
      }
    }
  });
}

}  // namespace ft
