// SPDX-License-Identifier: Apache-2.0
//
// io_uring by its system calls: liburing would be a dependency, and reads need three calls and two rings of
// it.
#include "sglang_ft/reads.h"

#include <cerrno>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

// Their numbers are the same on all architectures; old headers lack them.
#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

namespace {

constexpr uint32_t kMostDepth = 256;

// Memory shared with the kernel.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, uint64_t bytes, uint64_t what) : bytes_(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, off_t(what));
    if (at != MAP_FAILED) at_ = static_cast<char*>(at);
  }
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (at_) munmap(at_, bytes_);
  }
  explicit operator bool() const { return at_ != nullptr; }
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(at_ + offset);
  }

 private:
  char* at_ = nullptr;
  uint64_t bytes_ = 0;
};

// The kernel reads what is before the tail of submissions and writes the tail of completions: each side
// stores its own index with release and loads the other's with acquire.
uint32_t load(uint32_t* index) { return std::atomic_ref(*index).load(std::memory_order_acquire); }
void store(uint32_t* index, uint32_t value) {
  std::atomic_ref(*index).store(value, std::memory_order_release);
}

struct Queue {
  int fd = -1;
  uint32_t depth = 0, under_way = 0;
  Mapping submissions, completions, entries;
  io_uring_params params{};

  ~Queue() {
    if (fd >= 0) close(fd);
  }

  int open(uint32_t wanted) {
    depth = std::clamp(wanted, 1u, kMostDepth);
    fd = int(syscall(__NR_io_uring_setup, depth, &params));
    if (fd < 0) return errno;
    if (!knows_reads()) return ENOSYS;
    submissions = Mapping(fd, params.sq_off.array + params.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING);
    completions =
        Mapping(fd, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    entries = Mapping(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    return submissions && completions && entries ? 0 : ENOMEM;
  }

  // IORING_OP_READ came a year after io_uring, with the means to ask for it.
  bool knows_reads() const {
    constexpr uint32_t kOps = 64;
    alignas(io_uring_probe) char memory[sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op)] = {};
    auto& probe = *reinterpret_cast<io_uring_probe*>(memory);
    if (syscall(__NR_io_uring_register, fd, IORING_REGISTER_PROBE, &probe, kOps) < 0) return false;
    return probe.last_op >= IORING_OP_READ && probe.ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED;
  }

  int begin(int file, uint64_t offset, void* to, uint32_t bytes, uint64_t tag) {
    if (under_way == depth) return EBUSY;
    auto* tail = submissions.at<uint32_t>(params.sq_off.tail);
    uint32_t mask = *submissions.at<uint32_t>(params.sq_off.ring_mask), at = *tail;
    io_uring_sqe& entry = entries.at<io_uring_sqe>(0)[at & mask];
    entry = {};
    entry.opcode = IORING_OP_READ;
    entry.fd = file;
    entry.off = offset;
    entry.addr = reinterpret_cast<uint64_t>(to);
    entry.len = bytes;
    entry.user_data = tag;
    submissions.at<uint32_t>(params.sq_off.array)[at & mask] = at & mask;
    store(tail, at + 1);
    int result = enter(1, 0);
    if (result != 0) {
      store(tail, at);  // the kernel has not taken it
      return result;
    }
    under_way++;
    return 0;
  }

  void wait(uint64_t* tag, int32_t* result) {
    auto* head = completions.at<uint32_t>(params.cq_off.head);
    while (*head == load(completions.at<uint32_t>(params.cq_off.tail))) {
      int error = under_way > 0 ? enter(0, 1) : EINVAL;
      // The memory of reads that are lost track of may still be written to.
      if (error != 0 && error != EAGAIN && error != EBUSY) std::abort();
    }
    uint32_t mask = *completions.at<uint32_t>(params.cq_off.ring_mask);
    const io_uring_cqe& entry = completions.at<io_uring_cqe>(params.cq_off.cqes)[*head & mask];
    *tag = entry.user_data;
    *result = entry.res;
    store(head, *head + 1);
    under_way--;
  }

  // Gives `submit` entries to the kernel and waits for `complete` ends. Returns 0 or an errno.
  int enter(uint32_t submit, uint32_t complete) const {
    while (true) {
      uint32_t flags = complete ? uint32_t(IORING_ENTER_GETEVENTS) : 0u;
      long result = syscall(__NR_io_uring_enter, fd, submit, complete, flags, nullptr, 0);
      if (result >= 0) return submit > 0 && result == 0 ? EAGAIN : 0;
      if (errno != EINTR) return errno;
    }
  }
};

}  // namespace

extern "C" {

void* ft_client_reads_open(uint32_t depth, int* error) {
  auto queue = std::make_unique<Queue>();
  *error = queue->open(depth);
  return *error ? nullptr : queue.release();
}

int ft_client_reads_begin(void* queue, int fd, uint64_t offset, void* to, uint32_t bytes, uint64_t tag) {
  return static_cast<Queue*>(queue)->begin(fd, offset, to, bytes, tag);
}

void ft_client_reads_wait(void* queue, uint64_t* tag, int32_t* result) {
  static_cast<Queue*>(queue)->wait(tag, result);
}

void ft_client_reads_close(void* queue) {
  std::unique_ptr<Queue> owned(static_cast<Queue*>(queue));
  uint64_t tag;
  int32_t result;
  while (owned->under_way > 0) owned->wait(&tag, &result);
}

}  // extern "C"

#else

extern "C" {
void* ft_client_reads_open(uint32_t, int* error) {
  *error = ENOSYS;
  return nullptr;
}
int ft_client_reads_begin(void*, int, uint64_t, void*, uint32_t, uint64_t) { return ENOSYS; }
void ft_client_reads_wait(void*, uint64_t*, int32_t*) {}
void ft_client_reads_close(void*) {}
}

#endif
