// SPDX-License-Identifier: Apache-2.0
//
// A team of pinned threads that run the pieces of a job. The calling thread is member 0.
//
// Each member has a share of consecutive pieces, which it claims from the front one by one; who has none left
// takes from the back of the others' shares. So a slow core does fewer, a descheduled thread that holds no
// piece delays nobody, and yet a member mostly reads on where it stopped. A phase is over when all its pieces
// are finished, not when all threads have arrived.
//
// Ordering. A share holds {end, next piece}. Publishing a phase writes its description, then stores the
// shares with release order; a claim is a compare-and-swap with acquire order, so whoever claims sees the
// description. The description is replaced only after every claimed piece was counted as finished; a claim
// that succeeds therefore always belongs to the description it reads, however long the thread slept between
// loading the share and swapping it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace ft {

struct Piece {
  uint32_t index;
  uint32_t member;  // 0 .. threads - 1, for per-thread scratch
  bool goes_on;     // this member means to do the next piece too
};

class Team {
 public:
  // cores[i % cores.size()] is where member i is pinned; empty: not pinned. Member 0 is the calling thread.
  Team(uint32_t threads, const std::vector<int>& cores, uint64_t spin_ns);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  uint32_t threads() const { return threads_; }

  // Members stay awake from begin() to end(), and spin_ns longer.
  void begin();
  void end();

  // Runs function(Piece) for pieces 0 .. count - 1; returns when all are finished. Inside begin() .. end().
  template <class Function>
  void run(uint32_t count, const Function& function) {
    auto call = [](const void* f, Piece piece) { (*static_cast<const Function*>(f))(piece); };
    run_phase(count, call, &function);
  }

  // Incremented at each piece of the calling thread.
  void count_progress_in(uint64_t* progress) { progress_ = progress; }

 private:
  using Call = void (*)(const void*, Piece);

  void run_phase(uint32_t count, Call call, const void* function);
  void help(uint32_t member, int core);
  void work(uint32_t member);
  uint32_t work_on(uint32_t share, uint32_t member);
  void sleep_until_work();
  bool work_expected() const;
  void wake_sleepers();
  void wake_some();

  Call call_ = nullptr;
  const void* function_ = nullptr;
  uint64_t spin_ns_;
  uint32_t threads_;
  uint64_t* progress_ = nullptr;
  struct alignas(64) Share {
    std::atomic<uint64_t> pieces{0};
  };
  std::unique_ptr<Share[]> shares_;
  alignas(64) std::atomic<uint64_t> phase_{0};  // the number of the last one
  alignas(64) std::atomic<uint32_t> finished_{0};
  alignas(64) std::atomic<uint32_t> awake_{0};  // 1 between begin() and end()
  std::atomic<bool> leaving_{false};
  alignas(64) std::atomic<uint32_t> wake_word_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::vector<std::thread> helpers_;
};

// Pins the calling thread; warns on stderr when the kernel refuses.
void pin_to_core(int core);
void name_thread(const char* prefix, uint32_t number);

}  // namespace ft
