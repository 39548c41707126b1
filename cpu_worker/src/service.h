// SPDX-License-Identifier: Apache-2.0
//
// The worker's side of the ring: waits for doorbells and commands, runs them, answers, sleeps. The ordering
// is argued in ring.h.
#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"
#include "layers.h"
#include "team.h"

namespace ft {

enum class Leave { kStopped, kOrphaned };

class Service {
 public:
  Service(const Memory& memory, Team& team, ft_isa isa, int parent_pid);

  // Serves until FT_CMD_STOP, or until the parent is gone.
  Leave serve();

 private:
  bool poll();  // runs what is there; false: nothing was
  // Both end when `wake` is no longer `seen`, the value with which serve() last looked for activity.
  void nap(uint32_t seen);
  bool sleep(uint32_t seen);  // false: the parent is gone
  bool job_waits() const;
  bool command_waits() const;
  void run_job(ft_block& block);
  Outcome execute(const ft_block& block);
  void record(const ft_block& block, const Outcome& outcome, uint64_t started, uint64_t finished);
  void run_command();
  ft_status attach(int32_t& bad_layer);
  ft_status measure();

  Memory memory_;
  ft_ring_header& header_;
  Team& team_;
  ft_isa isa_;
  int parent_pid_;
  Executor executor_;
  std::vector<Layer> layers_;
  uint64_t next_job_;
  bool stopping_ = false;
};

}  // namespace ft
