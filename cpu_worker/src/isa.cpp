// SPDX-License-Identifier: Apache-2.0
#include "isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <iterator>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ft {
namespace {

constexpr const char* kNames[] = {"auto", "scalar", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__)

struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Leaf cpuid(uint32_t leaf, uint32_t subleaf) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

constexpr bool has(uint32_t word, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(word >> bit & 1)) return false;
  return true;
}

// Register state that the operating system saves (XCR0).
uint64_t saved_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool kernel_grants_tiles() {
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

ft_isa detect() {
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  Leaf one = cpuid(1, 0);
  if (!has(one.c, {27 /* osxsave */, 12 /* fma */, 28 /* avx */, 29 /* f16c */})) return FT_ISA_SCALAR;
  uint64_t state = saved_state();
  Leaf seven = cpuid(7, 0);
  if ((state & kYmm) != kYmm || !has(seven.b, {5 /* avx2 */})) return FT_ISA_SCALAR;
  if ((state & kZmm) != kZmm || !has(seven.b, {16, 17, 30, 31} /* f, dq, bw, vl */)) return FT_ISA_AVX2;
  if (!has(cpuid(7, 1).a, {5 /* avx512_bf16 */})) return FT_ISA_AVX512;
  bool tiles = (state & kTiles) == kTiles && has(seven.d, {22, 24} /* amx_bf16, amx_tile */);
  return tiles && kernel_grants_tiles() ? FT_ISA_AMX : FT_ISA_AVX512_BF16;
}

#else

ft_isa detect() { return FT_ISA_SCALAR; }

#endif

}  // namespace

ft_isa detect_isa() {
  static const ft_isa isa = detect();
  return isa;
}

const char* isa_name(ft_isa isa) { return kNames[isa]; }

std::optional<ft_isa> isa_from_name(std::string_view name) {
  for (uint32_t i = 0; i < std::size(kNames); i++)
    if (name == kNames[i]) return ft_isa(i);
  return std::nullopt;
}

}  // namespace ft
