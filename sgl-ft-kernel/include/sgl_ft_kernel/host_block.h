// SPDX-License-Identifier: Apache-2.0
//
// The one thread that runs a plan on the host.
#pragma once

#include <atomic>
#include <cstdint>

namespace ft {

struct HostBlock {
  uint32_t tid() const { return 0; }
  uint32_t size() const { return 1; }
  void sync() {}
  uint64_t now() const { return 0; }
  uint32_t add(uint32_t* value, uint32_t n) {
    uint32_t before = *value;
    *value += n;
    return before;
  }
  void count(uint64_t* sum, uint64_t n) { *sum += n; }
  void set_bit(uint32_t* bits, uint32_t i) { bits[i / 32] |= 1u << (i % 32); }
  uint32_t maximum(uint32_t value) { return value; }
  // Exclusive sums in place; returns the total.
  uint32_t scan(uint32_t* values, uint32_t count) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < count; i++) {
      uint32_t value = values[i];
      values[i] = sum;
      sum += value;
    }
    return sum;
  }
  void ring(uint64_t* doorbell, uint64_t sequence) {
    reinterpret_cast<std::atomic<uint64_t>*>(doorbell)->store(sequence, std::memory_order_release);
  }
};

}  // namespace ft
