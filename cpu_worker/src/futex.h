// SPDX-License-Identifier: Apache-2.0
//
// Futex wait and wake, and the monotonic clock of the ring's time stamps. Linux only.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ft {

constexpr uint64_t kSecond = 1'000'000'000;

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * kSecond + uint64_t(t.tv_nsec);
}

// Sleeps while *word == expected, at most timeout_ns. The word may be shared between processes. Returns on
// wake-ups, timeouts, changed values and signals alike: the caller looks at its condition again.
inline void futex_wait(const uint32_t* word, uint32_t expected, uint64_t timeout_ns) {
  timespec t{time_t(timeout_ns / kSecond), long(timeout_ns % kSecond)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, nullptr, 0);
}

inline void futex_wake(const uint32_t* word, int count = INT_MAX) {
  syscall(SYS_futex, word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

// The half of a 64-bit word that changes first: the futex word of a sequence number (little-endian hosts).
inline const uint32_t* low_half(const uint64_t* word) { return reinterpret_cast<const uint32_t*>(word); }

// Atomic view of a plain field of the ring.
template <class T>
std::atomic_ref<T> shared(T& field) {
  return std::atomic_ref<T>(field);
}

// Tells the core that this is a polling loop.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace ft
