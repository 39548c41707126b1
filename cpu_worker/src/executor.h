// SPDX-License-Identifier: Apache-2.0
//
// Runs one job on the team: pack, gate_up, down, then the weighted sum into the results. Owns the scratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "layers.h"
#include "plan.h"
#include "team.h"

namespace ft {

// The inputs and the output of a job, inside its block.
struct JobData {
  uint32_t rows, topk, row_dtype;
  const int32_t* routes;  // [rows, topk]
  const float* weights;   // [rows, topk]
  const void* input;      // [rows, hidden] of row_dtype
  float* results;         // [rows, hidden]
  SharedExpert shared = {};
};

struct Outcome {
  ft_status status = FT_OK;
  int32_t argument = 0;
  uint32_t experts = 0;
  uint64_t expert_rows = 0;
  uint64_t bytes = 0;
};

// Memory that grows by being replaced; its contents are lost then. Pages are touched on first use.
class Scratch {
 public:
  ~Scratch();
  std::byte* reserve(uint64_t bytes);

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

class Executor {
 public:
  explicit Executor(Team& team);

  // The shape of the job was checked by the caller; routes are checked here.
  Outcome run(const Layer& layer, const JobData& job);

 private:
  struct GroupBuffers {
    std::byte *packed, *h;
    float* partial;
    SlotBytes bytes;
    uint32_t first_slot;

    std::byte* packed_at(uint32_t slot) const { return packed + (slot - first_slot) * bytes.packed; }
    std::byte* h_at(uint32_t slot) const { return h + (slot - first_slot) * bytes.h; }
    float* partial_at(uint32_t slot) const {
      return partial + (slot - first_slot) * (bytes.partial / sizeof(float));
    }
  };

  GroupBuffers buffers_for(const Layer& layer, const Group& group, uint32_t element_bytes);
  void compute_coefficients(const Layer& layer, const JobData& job);
  void pack(const Layer& layer, const JobData& job, const Group& group, const GroupBuffers& buffers);
  void gate_up(const Layer& layer, const Group& group, const GroupBuffers& buffers);
  void down(const Layer& layer, const JobData& job, const Group& group, const GroupBuffers& buffers);
  void add_up(const Layer& layer, const JobData& job, const Group& group, const GroupBuffers& buffers,
              bool first);

  // Runs the pieces on the team, or right here when all together are few elements.
  template <class Function>
  void run_pieces(uint64_t elements, uint32_t count, const Function& function);

  float* scratch_of(uint32_t member) { return member_scratch_ + size_t(member) * kScratchFloats; }

  Team& team_;
  JobPlan plan_;
  Scratch packed_, h_, partial_, members_;
  float* member_scratch_;
  std::vector<uint32_t> pair_rows_;    // token row of each sorted pair
  std::vector<float> input_factors_;   // of each sorted pair; used with FT_LAYER_WEIGHT_ON_INPUT
  std::vector<float> output_factors_;  // of each (row, k)
};

}  // namespace ft
