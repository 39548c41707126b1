// SPDX-License-Identifier: Apache-2.0
//
// libsglang_ft_client: the owner's half of the ring protocol. The ordering is argued in ring.h.
#include <algorithm>

#include "futex.h"
#include "sglang_ft/ring.h"

namespace {

using namespace ft;

// A sleeping waiter looks at `abort` this often: the futex word does not change when only `abort` does.
constexpr uint64_t kAbortCheckNs = 20'000'000;
constexpr int kPollsBetweenClockReads = 32;

ft_ring_header& header(void* ring) { return *static_cast<ft_ring_header*>(ring); }

ft_block& block_of(void* ring, uint64_t seq) {
  ft_ring_header& h = header(ring);
  uint64_t index = (seq - 1) % h.num_blocks;
  return *reinterpret_cast<ft_block*>(static_cast<char*>(ring) + h.blocks_offset + index * h.block_stride);
}

void bump_wake(ft_ring_header& h) {
  shared(h.wake).fetch_add(1, std::memory_order_release);
  futex_wake(&h.wake);
}

void wake_if_asleep(ft_ring_header& h) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (shared(h.worker_asleep).load(std::memory_order_relaxed)) bump_wake(h);
}

enum WaitResult { kDone = 0, kTimeout = 1, kAborted = 2 };

// Polls `reached` until the deadline; kTimeout when it passed.
template <class Condition>
int spin_until(ft_ring_header& h, Condition reached, uint64_t deadline) {
  do {
    for (int i = 0; i < kPollsBetweenClockReads; i++) {
      if (reached()) return kDone;
      cpu_relax();
    }
    if (shared(h.abort).load(std::memory_order_acquire)) return kAborted;
  } while (now_ns() < deadline);
  return kTimeout;
}

// Sleeps on the low half of `word` until `reached` or the deadline.
template <class Condition>
int sleep_until(ft_ring_header& h, uint64_t& word, Condition reached, uint64_t deadline) {
  while (true) {
    uint32_t seen = uint32_t(shared(word).load(std::memory_order_acquire));
    if (reached()) return kDone;
    if (shared(h.abort).load(std::memory_order_acquire)) return kAborted;
    uint64_t now = now_ns();
    if (now >= deadline) return kTimeout;
    futex_wait(low_half(&word), seen, std::min(deadline - now, kAbortCheckNs));
  }
}

uint64_t deadline_after(uint64_t now, uint64_t timeout_ns) {
  return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

}  // namespace

extern "C" {

void ft_client_ring(void* ring, uint64_t seq) {
  ft_block& block = block_of(ring, seq);
  block.rung_ns = now_ns();
  shared(block.doorbell).store(seq, std::memory_order_release);
  wake_if_asleep(header(ring));
}

int ft_client_wait(void* ring, uint64_t seq, uint64_t spin_ns, uint64_t timeout_ns) {
  ft_ring_header& h = header(ring);
  ft_block& block = block_of(ring, seq);
  auto reached = [&] { return shared(block.done).load(std::memory_order_acquire) >= seq; };
  uint64_t start = now_ns();
  uint64_t deadline = deadline_after(start, timeout_ns);
  int result = spin_until(h, reached, std::min(deadline, deadline_after(start, spin_ns)));
  if (result != kTimeout) return result;
  shared(block.owner_waiting).store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  result = sleep_until(h, block.done, reached, deadline);
  shared(block.owner_waiting).store(0, std::memory_order_relaxed);
  return result;
}

void ft_client_command(void* ring, uint64_t seq) {
  ft_ring_header& h = header(ring);
  shared(h.command_doorbell).store(seq, std::memory_order_release);
  wake_if_asleep(h);
}

int ft_client_command_wait(void* ring, uint64_t seq, uint64_t timeout_ns) {
  ft_ring_header& h = header(ring);
  auto reached = [&] { return shared(h.command_done).load(std::memory_order_acquire) >= seq; };
  return sleep_until(h, h.command_done, reached, deadline_after(now_ns(), timeout_ns));
}

void ft_client_give_up(void* ring, uint64_t seq, uint32_t status) {
  ft_block& block = block_of(ring, seq);
  block.status = status;
  block.status_arg = 0;
  shared(block.done).store(seq, std::memory_order_release);
  futex_wake(low_half(&block.done));
}

void ft_client_wake(void* ring) { bump_wake(header(ring)); }

void ft_client_abort(void* ring, uint32_t value) {
  ft_ring_header& h = header(ring);
  shared(h.abort).store(value, std::memory_order_release);
  for (uint64_t seq = 1; seq <= h.num_blocks; seq++) futex_wake(low_half(&block_of(ring, seq).done));
  futex_wake(low_half(&h.command_done));
}

int ft_client_state_wait(void* ring, uint32_t state, uint64_t timeout_ns) {
  ft_ring_header& h = header(ring);
  uint64_t deadline = deadline_after(now_ns(), timeout_ns);
  while (shared(h.worker_state).load(std::memory_order_acquire) == state) {
    uint64_t now = now_ns();
    if (now >= deadline) return kTimeout;
    futex_wait(&h.worker_state, state, deadline - now);
  }
  return kDone;
}

}  // extern "C"
