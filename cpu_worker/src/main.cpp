// SPDX-License-Identifier: Apache-2.0
//
// Start and end of the cpu_worker process. Exit status: 0 after FT_CMD_STOP, 2 refused, 3 parent gone.
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>

#include "futex.h"
#include "isa.h"
#include "options.h"
#include "ring_memory.h"
#include "service.h"
#include "topology.h"

namespace {

using namespace ft;

enum ExitStatus { kExitStopped = 0, kExitRefused = 2, kExitOrphaned = 3 };

void set_state(ft_ring_header& header, ft_worker_state state) {
  shared(header.worker_state).store(state, std::memory_order_release);
  futex_wake(&header.worker_state);
}

// Dies with the parent. The signal alone is not enough: the parent may be gone before prctl runs.
bool bind_to_parent(int parent_pid) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return getppid() == parent_pid;
}

ft_isa choose_isa(ft_isa wanted) {
  ft_isa detected = detect_isa();
  if (wanted == FT_ISA_AUTO) return detected;
  if (available(wanted, detected)) return wanted;
  throw RefusedError(std::string("--isa ") + isa_name(wanted) + ": not available here, the best is " +
                     isa_name(detected));
}

// Threads and cores by the options; what they leave open by the topology.
void complete(Options& options) {
  bool by_topology = options.cores.empty();
  if (by_topology) options.cores = physical_cores();
  unsigned cores = unsigned(options.cores.size());
  if (options.threads == 0) options.threads = by_topology ? default_threads(cores) : cores;
}

int serve(Options options, Memory& memory) {
  map_memory(options.ring_fd, options.pool_fd, memory);
  ft_ring_header& header = memory.header();
  header.worker_pid = uint32_t(getpid());
  header.worker_isa_detected = detect_isa();
  set_state(header, FT_WORKER_STARTING);
  ft_isa isa = choose_isa(options.isa);
  complete(options);
  populate_pool(memory);  // before the team pins this thread, whose cores a new one inherits
  Team team(options.threads, options.cores, header.spin_ns);
  Service service(memory, team, isa, options.parent_pid);
  header.worker_isa = isa;
  header.worker_threads = options.threads;
  set_state(header, FT_WORKER_READY);
  Leave leave = service.serve();
  set_state(header, FT_WORKER_STOPPED);
  return leave == Leave::kStopped ? kExitStopped : kExitOrphaned;
}

}  // namespace

int main(int argc, char** argv) {
  Memory memory;
  try {
    Options options = parse_options(argc, argv);
    if (options.version)
      return printf("cpu_worker %s, ring version %u, isa %s\n", FT_VERSION, FT_RING_VERSION,
                    isa_name(detect_isa())),
             0;
    if (options.help) return fputs(kUsage, stdout), 0;
    if (!bind_to_parent(options.parent_pid)) return kExitOrphaned;
    signal(SIGINT, SIG_IGN);  // Ctrl-C reaches the whole process group; the owner decides when to stop
    return serve(options, memory);
  } catch (const std::exception& error) {
    fprintf(stderr, "cpu_worker: %s\n", error.what());
    if (memory.ring) set_state(memory.header(), FT_WORKER_REFUSED);
    return kExitRefused;
  }
}
