// SPDX-License-Identifier: Apache-2.0
//
// Kernels without a ring: expert bytes a second against a plain streaming read of the same pool, and
// products a second, for one BF16 layer shape.
//
// usage: micro_bench [--isa NAME] [--threads N] [--gib G] [--hidden H] [--intermediate I] [--topk K]
//                    [--format 1|2|3] [--rows N,N,...] [--seconds S] [--clock wall|cpu]
// --clock cpu counts this process's CPU time: with --threads 1 it tells kernels apart on a busy machine.
#include <algorithm>
#include <atomic>
#include <map>
#include <sstream>

#include "executor.h"
#include "futex.h"
#include "isa.h"
#include "test_ring.h"
#include "topology.h"

using namespace ft;

namespace {

struct Settings {
  ft_isa isa = detect_isa();
  uint32_t threads = 2, hidden = 2048, intermediate = 512, topk = 8, format = FT_FORMAT_BF16;
  double gib = 2, seconds = 1;
  clockid_t clock = CLOCK_MONOTONIC;
  std::vector<uint32_t> rows{1, 2, 8, 64, 512};
};

Settings parse(int argc, char** argv) {
  Settings s;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--isa") s.isa = isa_from_name(value).value();
    if (flag == "--threads") s.threads = uint32_t(std::stoul(value));
    if (flag == "--hidden") s.hidden = uint32_t(std::stoul(value));
    if (flag == "--intermediate") s.intermediate = uint32_t(std::stoul(value));
    if (flag == "--topk") s.topk = uint32_t(std::stoul(value));
    if (flag == "--format") s.format = uint32_t(std::stoul(value));
    if (flag == "--gib") s.gib = std::stod(value);
    if (flag == "--clock" && value == "cpu") s.clock = CLOCK_PROCESS_CPUTIME_ID;
    if (flag == "--seconds") s.seconds = std::stod(value);
    if (flag != "--rows") continue;
    s.rows.clear();
    std::stringstream list(value);
    for (std::string item; std::getline(list, item, ',');) s.rows.push_back(uint32_t(std::stoul(item)));
  }
  return s;
}

// Small values of either sign in any 16-bit format; repeated, since the values do not change the speed.
void fill(std::byte* pool, uint64_t bytes) {
  std::mt19937 random(1);
  std::vector<uint16_t> block(1 << 20);
  for (uint16_t& x : block) x = uint16_t((random() & 0x80ff) | 0x3c00);
  for (uint64_t at = 0; at < bytes; at += block.size() * 2)
    memcpy(pool + at, block.data(), std::min<uint64_t>(block.size() * 2, bytes - at));
}

struct MicroBench {
  explicit MicroBench(const Settings& settings) : s(settings) {}

  Settings s;
  uint64_t element = s.format == FT_FORMAT_FP32 ? 4 : 2;
  uint64_t expert_bytes = uint64_t(3) * s.hidden * s.intermediate * element;
  uint32_t experts = uint32_t(std::min(s.gib * double(1 << 30) / double(expert_bytes), 60000.0));
  testing::TestRing ring{{1, 4096, s.topk, s.hidden, experts * expert_bytes + 4096, 0}};
  Team team{s.threads, physical_cores(), 100'000'000};
  Executor executor{team};
  Layer layer{};
  std::mt19937_64 random{2};

  void prepare() {
    fill(ring.pool(), ring.memory.pool_bytes);
    ft_layer& t = ring.layer(0);
    t = {};
    t.format = s.format;
    t.flags = FT_LAYER_GATED;
    t.num_experts = experts;
    t.hidden = s.hidden;
    t.intermediate = s.intermediate;
    t.output_scale = 1;
    ring.add_bank(t, FT_ROLE_GATE_UP, expert_bytes / 3 * 2, experts);
    ring.add_bank(t, FT_ROLE_DOWN, expert_bytes / 3, experts);
    layer = attach_layer(ring.memory, 0, s.isa);
    if (layer.status != FT_OK) abort();
    uint16_t* rows = static_cast<uint16_t*>(ring.rows(1));
    for (size_t i = 0; i < size_t(4096) * s.hidden; i++) rows[i] = uint16_t((random() & 0x80ff) | 0x3f00);
    for (size_t i = 0; i < size_t(4096) * s.topk; i++) ring.weights(1)[i] = 0.125f;
  }

  // Fresh experts for each job: a window of 256 random ones, topk different ones for each row.
  void draw_routes(uint32_t rows) {
    uint32_t window = std::min(256u, experts), base = uint32_t(random() % (experts - window + 1));
    for (uint32_t r = 0; r < rows; r++)
      for (uint32_t k = 0; k < s.topk; k++) {
        int32_t* row = ring.routes(1) + size_t(r) * s.topk;
        do row[k] = int32_t(base + random() % window);
        while (std::find(row, row + k, row[k]) != row + k);
      }
  }

  uint64_t clock_ns() const {
    timespec t;
    clock_gettime(s.clock, &t);
    return uint64_t(t.tv_sec) * kSecond + uint64_t(t.tv_nsec);
  }

  // Bytes a nanosecond, that is GB/s.
  double read_once(uint64_t bytes) {
    constexpr uint64_t kPiece = 1 << 20;
    uint64_t pieces = std::min(bytes, ring.memory.pool_bytes) / kPiece;
    uint64_t base = random() % (ring.memory.pool_bytes / kPiece - pieces + 1) * kPiece;
    std::atomic<uint64_t> sum{0};
    team.begin();
    uint64_t start = clock_ns();
    team.run(uint32_t(pieces), [&](Piece p) {
      sum += streaming_sum(s.isa, ring.memory.pool + base + p.index * kPiece, kPiece);
    });
    uint64_t elapsed = clock_ns() - start;
    team.end();
    return double(pieces * kPiece) / double(elapsed);
  }

  // {GB/s, nanoseconds}
  std::pair<double, double> job_once(uint32_t rows) {
    draw_routes(rows);
    JobData job{rows, s.topk, FT_DTYPE_BF16, ring.routes(1), ring.weights(1), ring.rows(1), ring.results(1)};
    team.begin();
    uint64_t start = clock_ns();
    Outcome outcome = executor.run(layer, job);
    uint64_t elapsed = clock_ns() - start;
    team.end();
    return {double(outcome.bytes) / double(elapsed), double(elapsed)};
  }
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + long(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  MicroBench bench(parse(argc, argv));
  bench.prepare();
  printf("%s, %u threads, H %u I %u top %u, %u experts\n", isa_name(bench.s.isa), bench.s.threads,
         bench.s.hidden, bench.s.intermediate, bench.s.topk, bench.experts);
  for (uint32_t rows : bench.s.rows) {
    std::vector<double> shares, rates, reads, times;
    uint64_t end = now_ns() + uint64_t(bench.s.seconds * 1e9);
    do {
      double read = bench.read_once(bench.s.topk * bench.expert_bytes);
      auto [rate, elapsed] = bench.job_once(rows);
      shares.push_back(rate / read);
      reads.push_back(read);
      rates.push_back(rate);
      times.push_back(elapsed);
    } while (now_ns() < end);
    double products = 6.0 * rows * bench.s.topk * bench.s.hidden * bench.s.intermediate;
    double best = *std::max_element(rates.begin(), rates.end());
    printf(
        "rows %4u: share %.3f  experts %6.2f (best %6.2f) GB/s  read %6.2f GB/s  %9.1f us  %7.1f GFLOP/s\n",
        rows, median(shares), median(rates), best, median(reads), median(times) / 1e3,
        products / median(times));
  }
}
