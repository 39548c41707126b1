// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <cstdio>

#include "futex.h"

namespace ft {
namespace {

constexpr int kPollsBetweenClockReads = 64;
constexpr uint64_t kMaxSleepNs = kSecond;
// Waking is a system call that takes time for each sleeper; as a tree it takes the logarithm of that.
constexpr int kWakesByEach = 2;

uint64_t share_of(uint64_t next, uint64_t end) { return end << 32 | next; }
uint32_t next_of(uint64_t share) { return uint32_t(share); }
uint32_t end_of(uint64_t share) { return uint32_t(share >> 32); }

}  // namespace

void pin_to_core(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set) != 0)
    fprintf(stderr, "cpu_worker: cannot pin a thread to core %d; it runs unpinned\n", core);
}

void name_thread(const char* prefix, uint32_t number) {
  char name[16];
  snprintf(name, sizeof(name), "%s-%u", prefix, number);
  pthread_setname_np(pthread_self(), name);
}

Team::Team(uint32_t threads, const std::vector<int>& cores, uint64_t spin_ns)
    : spin_ns_(spin_ns), threads_(threads), shares_(new Share[threads]) {
  auto core_of = [&](uint32_t member) { return cores.empty() ? -1 : cores[member % cores.size()]; };
  if (core_of(0) >= 0) pin_to_core(core_of(0));
  for (uint32_t member = 1; member < threads; member++)
    helpers_.emplace_back([this, member, core = core_of(member)] { help(member, core); });
}

Team::~Team() {
  leaving_.store(true);
  wake_sleepers();
  for (std::thread& helper : helpers_) helper.join();
}

void Team::begin() {
  awake_.store(1);
  wake_sleepers();
}

void Team::end() { awake_.store(0); }

void Team::run_phase(uint32_t count, Call call, const void* function) {
  if (count == 0) return;
  call_ = call;
  function_ = function;
  finished_.store(0, std::memory_order_relaxed);
  uint64_t members = threads();
  for (uint64_t m = 0; m < members; m++)
    shares_[m].pieces.store(share_of(count * m / members, count * (m + 1) / members),
                            std::memory_order_release);
  phase_.fetch_add(1, std::memory_order_release);
  work(0);
  while (finished_.load(std::memory_order_acquire) != count) cpu_relax();
}

// The member's own share, then what is left of the others'.
void Team::work(uint32_t member) {
  uint32_t finished = 0;
  for (uint32_t i = 0; i < threads(); i++) finished += work_on((member + i) % threads(), member);
  if (finished) finished_.fetch_add(finished, std::memory_order_release);
}

uint32_t Team::work_on(uint32_t share, uint32_t member) {
  std::atomic<uint64_t>& pieces = shares_[share].pieces;
  bool own = share == member;
  uint32_t finished = 0;
  uint64_t seen = pieces.load(std::memory_order_relaxed);
  while (next_of(seen) < end_of(seen)) {
    uint32_t next = next_of(seen), end = end_of(seen);
    uint64_t rest = own ? share_of(next + 1, end) : share_of(next, end - 1);
    if (!pieces.compare_exchange_weak(seen, rest, std::memory_order_acquire, std::memory_order_relaxed))
      continue;
    call_(function_, {own ? next : end - 1, member, own && next + 1 < end});
    if (member == 0 && progress_) shared(*progress_).fetch_add(1, std::memory_order_relaxed);
    finished++;
    seen = pieces.load(std::memory_order_relaxed);
  }
  return finished;
}

void Team::help(uint32_t member, int core) {
  name_thread("ft-worker", member);
  if (core >= 0) pin_to_core(core);
  uint64_t idle_since = now_ns(), seen = 0;
  while (!leaving_.load(std::memory_order_relaxed)) {
    bool worked = false;
    for (int i = 0; i < kPollsBetweenClockReads; i++) {
      uint64_t phase = phase_.load(std::memory_order_acquire);
      if (phase != seen) {
        seen = phase;
        worked = true;
        work(member);
      }
      cpu_relax();
    }
    uint64_t now = now_ns();
    if (worked || awake_.load(std::memory_order_relaxed)) idle_since = now;
    if (now - idle_since < spin_ns_) continue;
    sleep_until_work();
    idle_since = now_ns();
  }
}

// Announces the sleep, then looks once more; begin() and the destructor publish, then look for sleepers. All
// of these are sequentially consistent, so one of the two sees the other. Who wakes passes it on.
void Team::sleep_until_work() {
  sleepers_.fetch_add(1);
  uint32_t seen = wake_word_.load();
  if (!work_expected()) futex_wait(reinterpret_cast<uint32_t*>(&wake_word_), seen, kMaxSleepNs);
  sleepers_.fetch_sub(1);
  if (work_expected()) wake_some();
}

bool Team::work_expected() const { return awake_.load() || leaving_.load(); }

void Team::wake_sleepers() {
  wake_word_.fetch_add(1);
  wake_some();
}

void Team::wake_some() {
  if (sleepers_.load()) futex_wake(reinterpret_cast<uint32_t*>(&wake_word_), kWakesByEach);
}

}  // namespace ft
