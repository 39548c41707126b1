// SPDX-License-Identifier: Apache-2.0
//
// The command line of cpu_worker.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "sglang_ft/ring.h"

namespace ft {

struct Options {
  int ring_fd = -1;
  int pool_fd = -1;
  int parent_pid = 0;
  unsigned threads = 0;    // 0: by topology
  std::vector<int> cores;  // empty: by topology
  ft_isa isa = FT_ISA_AUTO;
  bool version = false;
  bool help = false;
};

extern const char* const kUsage;

// Throws std::invalid_argument with a text for the user.
Options parse_options(int argc, char** argv);

}  // namespace ft
