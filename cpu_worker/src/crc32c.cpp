// SPDX-License-Identifier: Apache-2.0
//
// CRC-32C (Castagnoli), as iSCSI and ext4 use it; by the CPU's instruction where there is one.
#include <array>
#include <cstdint>
#include <cstring>

#include "sglang_ft/ring.h"

namespace {

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0u);
    table[i] = value;
  }
  return table;
}

uint32_t by_table(uint32_t crc, const uint8_t* data, uint64_t bytes) {
  static constexpr std::array<uint32_t, 256> table = make_table();
  for (uint64_t i = 0; i < bytes; i++) crc = crc >> 8 ^ table[(crc ^ data[i]) & 0xff];
  return crc;
}

#if defined(__x86_64__)
// The instruction takes three cycles, and one can start in each: three stretches at once, joined at the end.
constexpr uint64_t kWorthJoining = 4096;

uint32_t times(const std::array<uint32_t, 32>& matrix, uint32_t vector) {
  uint32_t sum = 0;
  for (int i = 0; vector; i++, vector >>= 1)
    if (vector & 1) sum ^= matrix[i];
  return sum;
}

// The checksum of a text that goes on for `zeros` zero bytes more; by squaring the step of one bit.
uint32_t go_on(uint32_t crc, uint64_t zeros) {
  std::array<uint32_t, 32> step{};
  step[0] = 0x82f63b78u;
  for (int i = 1; i < 32; i++) step[i] = 1u << (i - 1);
  for (uint64_t bits = zeros * 8; bits; bits >>= 1) {
    if (bits & 1) crc = times(step, crc);
    std::array<uint32_t, 32> square{};
    for (int i = 0; i < 32; i++) square[i] = times(step, step[i]);
    step = square;
  }
  return crc;
}

uint64_t word_at(const uint8_t* data) {
  uint64_t word;
  memcpy(&word, data, 8);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const uint8_t* data, uint64_t bytes) {
  uint64_t value = crc;
  if (bytes >= kWorthJoining) {
    uint64_t third = bytes / 24 * 8, second = 0, last = 0;
    for (uint64_t at = 0; at < third; at += 8) {
      value = __builtin_ia32_crc32di(value, word_at(data + at));
      second = __builtin_ia32_crc32di(second, word_at(data + third + at));
      last = __builtin_ia32_crc32di(last, word_at(data + 2 * third + at));
    }
    value = go_on(go_on(uint32_t(value), third) ^ uint32_t(second), third) ^ uint32_t(last);
    data += 3 * third;
    bytes -= 3 * third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) value = __builtin_ia32_crc32di(value, word_at(data));
  uint32_t rest = uint32_t(value);
  for (; bytes > 0; data++, bytes--) rest = __builtin_ia32_crc32qi(rest, *data);
  return rest;
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#else
uint32_t by_instruction(uint32_t crc, const uint8_t* data, uint64_t bytes) {
  return by_table(crc, data, bytes);
}
bool has_instruction() { return false; }
#endif

}  // namespace

extern "C" uint32_t ft_client_crc32c(uint32_t crc, const void* data, uint64_t bytes) {
  static const bool fast = has_instruction();
  auto* from = static_cast<const uint8_t*>(data);
  return ~(fast ? by_instruction(~crc, from, bytes) : by_table(~crc, from, bytes));
}
