// SPDX-License-Identifier: Apache-2.0
//
// Maps the two memory files and checks that the layout in the ring's header stays inside them.
#pragma once

#include <stdexcept>
#include <string>

#include "layers.h"

namespace ft {

// The ring cannot be served; what() is for the user.
struct RefusedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Maps ring (read-write) and pool (read-only). Throws RefusedError when they cannot be mapped or when the
// header is not one that this worker understands; `memory.ring` is then set as soon as the header itself is
// safe to write to.
void map_memory(int ring_fd, int pool_fd, Memory& memory);

// Fills this process's page table for the pool, in the background: an expert's first job would otherwise
// fault in every page of it, which takes ten times as long as the job.
void populate_pool(const Memory& memory);

}  // namespace ft
