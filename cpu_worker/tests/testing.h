// SPDX-License-Identifier: Apache-2.0
//
// The little that these tests need of a test framework: checks that say what they saw, and a seed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>

namespace testing {

inline int failures = 0;

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

#define CHECK(condition, ...)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      testing::failures++;                                                         \
      fprintf(stderr, "%s:%d: not true: %s; %s\n", __FILE__, __LINE__, #condition, \
              testing::text("" __VA_OPT__(, ) __VA_ARGS__).c_str());               \
      if (testing::failures > 20) exit(1);                                         \
    }                                                                              \
  } while (0)

// Fresh at each run; FT_SEED repeats a run.
inline uint64_t seed() {
  static const uint64_t value = [] {
    const char* given = getenv("FT_SEED");
    uint64_t s = given ? strtoull(given, nullptr, 10) : std::random_device{}();
    printf("FT_SEED=%llu\n", static_cast<unsigned long long>(s));
    return s;
  }();
  return value;
}

inline int report(const char* what, size_t cases) {
  printf("%s: %zu cases, %d failed\n", what, cases, failures);
  return failures ? 1 : 0;
}

}  // namespace testing
