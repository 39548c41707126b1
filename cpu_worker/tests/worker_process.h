// SPDX-License-Identifier: Apache-2.0
//
// A real cpu_worker process on a ring, and an owner that gives it jobs with known results.
#pragma once

#include <signal.h>
#include <sys/wait.h>

#include <functional>

#include "futex.h"
#include "reference.h"
#include "testing.h"

namespace testing {

constexpr uint64_t kMs = 1'000'000, kPatience = 20'000 * kMs;
inline const char* worker_path;  // set by main

// Starts the worker as a child of this process.
class Worker {
 public:
  explicit Worker(TestRing& ring, std::vector<std::string> extra = {}, int stderr_fd = -1) : ring_(ring) {
    ring.header().worker_state = FT_WORKER_ABSENT;
    pid = spawn(ring, extra, stderr_fd);
  }
  ~Worker() { kill_now(); }

  static pid_t spawn(TestRing& ring, const std::vector<std::string>& extra, int stderr_fd) {
    std::string parent = std::to_string(getpid());
    pid_t child = fork();
    if (child != 0) return child;
    if (stderr_fd >= 0) dup2(stderr_fd, 2);
    std::vector<std::string> words = {worker_path,
                                      "--ring-fd",
                                      std::to_string(ring.ring_fd),
                                      "--pool-fd",
                                      std::to_string(ring.pool_fd),
                                      "--parent-pid",
                                      parent,
                                      "--threads",
                                      "2"};
    words.insert(words.end(), extra.begin(), extra.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    execv(worker_path, argv.data());
    _exit(127);
  }

  void wait_ready() {
    uint32_t state;
    while ((state = ft::shared(ring_.header().worker_state).load()) != FT_WORKER_READY) {
      CHECK(state <= FT_WORKER_STARTING, "worker state ", state);
      if (ft_client_state_wait(ring_.memory.ring, state, kPatience)) {
        CHECK(false, "not ready in time");
        return;
      }
    }
  }

  int wait_exit() {
    int status = 0;
    waitpid(pid, &status, 0);
    pid = -1;
    return status;
  }

  void kill_now() {
    if (pid < 0) return;
    kill(pid, SIGKILL);
    wait_exit();
  }

  pid_t pid;

 private:
  TestRing& ring_;
};

// A ring with one small layer and everything needed to run and check jobs on it.
struct Server {
  explicit Server(uint64_t spin_ns = 50'000, uint32_t blocks = 2, uint32_t hidden = 48,
                  uint32_t intermediate = 32)
      : shape{FT_FORMAT_FP32, FT_ACT_SILU, FT_LAYER_GATED, false, 6, hidden, intermediate, 0, 0, 1},
        random(seed()),
        ring({blocks, 64, 4, 256, 4 << 20, spin_ns}) {
    reference = make_layer(random, ring, 0, shape);
    ring.header().num_layers = 1;
  }

  void fill_job(uint32_t rows) {
    seq++;
    job = make_job(random, ring, seq, 0, shape, {rows, 3, FT_DTYPE_FP32});
  }

  void ring_job(uint32_t rows) {
    fill_job(rows);
    ft_client_ring(ring.memory.ring, seq);
  }

  // As a GPU does: stores the doorbell, wakes nobody.
  void ring_silently(uint32_t rows) {
    fill_job(rows);
    ft::shared(ring.block(seq).doorbell).store(seq, std::memory_order_release);
  }

  int wait(uint64_t spin_ns = 20'000, uint64_t timeout = kPatience) {
    return ft_client_wait(ring.memory.ring, seq, spin_ns, timeout);
  }

  void check_results(const char* when) {
    CHECK(ring.block(seq).status == FT_OK, when, " job ", seq, " status ", ring.block(seq).status);
    double error = relative_error(ring.results(seq), reference_results(reference, job, false));
    CHECK(error < 1e-5, when, " job ", seq, " error ", error);
  }

  uint32_t status_of(const std::function<void(ft_block&)>& spoil) {
    seq++;
    make_job(random, ring, seq, 0, shape, {2, 3, FT_DTYPE_FP32});
    spoil(ring.block(seq));
    ft_client_ring(ring.memory.ring, seq);
    CHECK(wait() == 0, "bad job not answered");
    return ring.block(seq).status;
  }

  uint32_t command(uint32_t kind, uint64_t arg0 = 0, uint64_t arg1 = 0, uint64_t arg2 = 0) {
    ft_ring_header& h = ring.header();
    h.command = kind;
    h.arg[0] = arg0;
    h.arg[1] = arg1;
    h.arg[2] = arg2;
    ft_client_command(ring.memory.ring, ++command_seq);
    CHECK(ft_client_command_wait(ring.memory.ring, command_seq, kPatience) == 0, "command ", kind,
          " not answered");
    return h.command_status;
  }

  LayerCase shape;
  Random random;
  TestRing ring;
  ReferenceLayer reference;
  ReferenceJob job;
  uint64_t seq = 0, command_seq = 0;
};

}  // namespace testing
