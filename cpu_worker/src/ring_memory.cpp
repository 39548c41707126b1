// SPDX-License-Identifier: Apache-2.0
#include "ring_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

namespace ft {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw RefusedError(text); }

uint64_t file_bytes(int fd, const char* what) {
  struct stat s;
  if (fstat(fd, &s) != 0)
    refuse(std::string(what) + ": file descriptor " + std::to_string(fd) + " is not open");
  return uint64_t(s.st_size);
}

// Replaces what is mapped at `address`, unless that is null.
void* map_file(int fd, uint64_t bytes, int protection, const char* what, void* address) {
  void* p = mmap(address, bytes, protection, MAP_SHARED | (address ? MAP_FIXED : 0), fd, 0);
  if (p == MAP_FAILED)
    refuse(std::string("cannot map the ") + what + " (" + std::to_string(bytes) +
           " bytes): " + strerror(errno));
  return p;
}

constexpr uint64_t kHugePage = uint64_t(2) << 20;

// From a border of a huge page on, so that the pool's pages of that size are mapped as such.
void* map_aligned(int fd, uint64_t bytes, int protection, const char* what) {
  uint64_t span = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  void* reserved = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return map_file(fd, bytes, protection, what, nullptr);
  uint64_t address = (reinterpret_cast<uint64_t>(reserved) + kHugePage - 1) / kHugePage * kHugePage;
  return map_file(fd, bytes, protection, what, reinterpret_cast<void*>(address));
}

void check_identity(const ft_ring_header& h, uint64_t ring_bytes, uint64_t pool_bytes) {
  if (h.magic != FT_RING_MAGIC) refuse("the ring file is not a ring of sglang_ft");
  if (h.version != FT_RING_VERSION)
    refuse("the ring has version " + std::to_string(h.version) + ", this cpu_worker serves version " +
           std::to_string(FT_RING_VERSION) + "; install matching versions");
  if (h.ring_bytes > ring_bytes) refuse("the ring file is shorter than its header says");
  if (h.pool_bytes > pool_bytes) refuse("the pool file is shorter than the ring's header says");
}

// The regions of the ring lie in order, aligned, inside the file. `limit` is the end of the region before
// it is checked against the next offset.
struct RegionCheck {
  uint64_t end = 0;

  // A region at `offset` of `count` items of `bytes` each.
  void next(const char* name, uint64_t offset, uint64_t count, uint64_t bytes) {
    uint64_t size;
    if (offset % FT_CACHE_LINE || offset < end || __builtin_mul_overflow(count, bytes, &size) ||
        __builtin_add_overflow(offset, size, &end))
      refuse(std::string("the ring's header puts the ") + name + " at an impossible offset (" +
             std::to_string(offset) + ")");
  }
};

void check_layout(const ft_ring_header& h) {
  if (h.num_blocks == 0 || h.max_rows == 0 || h.max_topk == 0 || h.max_hidden == 0)
    refuse("the ring's header has a zero for blocks, rows, topk or hidden");
  if (h.num_layers > FT_MAX_LAYERS)
    refuse("the ring has " + std::to_string(h.num_layers) + " layers, at most " +
           std::to_string(FT_MAX_LAYERS) + " are possible");
  RegionCheck block;
  uint64_t pairs = uint64_t(h.max_rows) * h.max_topk;
  block.next("descriptor", 0, 1, sizeof(ft_block));
  block.next("routes", h.routes_offset, pairs, sizeof(int32_t));
  block.next("weights", h.weights_offset, pairs, sizeof(float));
  block.next("rows", h.rows_offset, 0, 0);
  block.next("results", h.results_offset, 0, 0);
  block.next("end of a block", h.block_stride, 0, 0);
  RegionCheck ring;
  ring.next("header", 0, 1, sizeof(ft_ring_header));
  ring.next("layers", h.layers_offset, FT_MAX_LAYERS, sizeof(ft_layer));
  ring.next("blocks", h.blocks_offset, h.num_blocks, h.block_stride);
  if (ring.end > h.ring_bytes) refuse("the blocks reach beyond the ring");
}

// Linux 5.14; older kernels answer EINVAL.
constexpr int kPopulateRead = 22;
constexpr uint64_t kPopulatePiece = uint64_t(64) << 20;

}  // namespace

void map_memory(int ring_fd, int pool_fd, Memory& memory) {
  uint64_t ring_bytes = file_bytes(ring_fd, "--ring-fd");
  uint64_t pool_bytes = file_bytes(pool_fd, "--pool-fd");
  if (ring_bytes < sizeof(ft_ring_header)) refuse("the ring file is too short for a header");
  void* ring = map_file(ring_fd, ring_bytes, PROT_READ | PROT_WRITE, "ring", nullptr);
  if (static_cast<ft_ring_header*>(ring)->magic == FT_RING_MAGIC) memory.ring = static_cast<std::byte*>(ring);
  check_identity(*static_cast<ft_ring_header*>(ring), ring_bytes, pool_bytes);
  check_layout(memory.header());
  memory.pool_bytes = memory.header().pool_bytes;
  if (memory.pool_bytes == 0) return;
  memory.pool = static_cast<const std::byte*>(map_aligned(pool_fd, memory.pool_bytes, PROT_READ, "pool"));
}

void populate_pool(const Memory& memory) {
  if (memory.pool_bytes == 0) return;
  std::thread([begin = const_cast<std::byte*>(memory.pool), bytes = memory.pool_bytes] {
    setpriority(PRIO_PROCESS, id_t(gettid()), 19);
    for (uint64_t at = 0; at < bytes; at += kPopulatePiece)
      if (madvise(begin + at, std::min(kPopulatePiece, bytes - at), kPopulateRead) != 0) return;
  }).detach();
}

}  // namespace ft
