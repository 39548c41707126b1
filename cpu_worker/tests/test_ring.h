// SPDX-License-Identifier: Apache-2.0
//
// An owner for tests: makes ring and pool as the Python owner does, fills layers and jobs.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "layers.h"
#include "sglang_ft/ring.h"

namespace testing {

inline uint64_t align64(uint64_t n) { return (n + 63) / 64 * 64; }

struct RingShape {
  uint32_t num_blocks = 2, max_rows = 64, max_topk = 4, max_hidden = 256;
  uint64_t pool_bytes = 1 << 20;
  uint64_t spin_ns = 50'000;
};

class TestRing {
 public:
  explicit TestRing(const RingShape& shape) {
    uint64_t blocks_offset = align64(sizeof(ft_ring_header)) + FT_MAX_LAYERS * sizeof(ft_layer);
    uint64_t pairs = uint64_t(shape.max_rows) * shape.max_topk,
             elements = uint64_t(shape.max_rows) * shape.max_hidden;
    uint64_t routes = align64(sizeof(ft_block)), weights = routes + align64(pairs * 4);
    uint64_t rows = weights + align64(pairs * 4), results = rows + align64(elements * 4);
    uint64_t stride = results + align64(elements * 4);
    ring_bytes_ = blocks_offset + stride * shape.num_blocks;
    pool_bytes_ = shape.pool_bytes;
    ring_fd = memfd_create("ft-test-ring", 0);
    pool_fd = memfd_create("ft-test-pool", 0);
    if (ftruncate(ring_fd, off_t(ring_bytes_)) || ftruncate(pool_fd, off_t(pool_bytes_))) abort();
    memory.ring = map(ring_fd, ring_bytes_);
    memory.pool = map(pool_fd, pool_bytes_);
    memory.pool_bytes = pool_bytes_;
    ft_ring_header& h = header();
    h.magic = FT_RING_MAGIC;
    h.version = FT_RING_VERSION;
    h.num_blocks = shape.num_blocks;
    h.ring_bytes = ring_bytes_;
    h.pool_bytes = pool_bytes_;
    h.layers_offset = align64(sizeof(ft_ring_header));
    h.blocks_offset = blocks_offset;
    h.block_stride = stride;
    h.routes_offset = routes;
    h.weights_offset = weights;
    h.rows_offset = rows;
    h.results_offset = results;
    h.max_rows = shape.max_rows;
    h.max_topk = shape.max_topk;
    h.max_hidden = shape.max_hidden;
    h.spin_ns = shape.spin_ns;
  }

  ~TestRing() {
    munmap(memory.ring, ring_bytes_);
    munmap(pool(), pool_bytes_);
    close(ring_fd);
    close(pool_fd);
  }
  TestRing(const TestRing&) = delete;
  TestRing& operator=(const TestRing&) = delete;

  ft_ring_header& header() { return memory.header(); }
  std::byte* pool() { return const_cast<std::byte*>(memory.pool); }
  ft_layer& layer(uint32_t i) { return const_cast<ft_layer&>(memory.layer(i)); }
  ft_block& block(uint64_t seq) { return memory.block(seq); }

  int32_t* routes(uint64_t seq) { return at<int32_t>(seq, header().routes_offset); }
  float* weights(uint64_t seq) { return at<float>(seq, header().weights_offset); }
  void* rows(uint64_t seq) { return at<void>(seq, header().rows_offset); }
  float* results(uint64_t seq) { return at<float>(seq, header().results_offset); }

  // Reserves the bank of a role: `bytes` for each of `experts` experts. Returns its place in the pool.
  std::byte* add_bank(ft_layer& layer, uint32_t role, uint64_t bytes, uint32_t experts) {
    layer.role[role] = {next_bank_, align64(bytes)};
    next_bank_ += align64(bytes) * experts;
    if (next_bank_ > pool_bytes_) abort();
    return pool() + layer.role[role].offset;
  }
  void clear_banks() { next_bank_ = 0; }

  ft::Memory memory;
  int ring_fd, pool_fd;

 private:
  static std::byte* map(int fd, uint64_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) abort();
    return static_cast<std::byte*>(p);
  }

  template <class T>
  T* at(uint64_t seq, uint64_t offset) {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(&block(seq)) + offset);
  }

  uint64_t ring_bytes_, pool_bytes_, next_bank_ = 0;
};

}  // namespace testing
