// SPDX-License-Identifier: Apache-2.0
#include "service.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "futex.h"

namespace ft {
namespace {

constexpr int kPollsBetweenClockReads = 32;
// The kernel may end a wait this late; its default of 50 us would double a nap.
constexpr unsigned long kTimerSlackNs = 1000;
constexpr uint64_t kMeasurePiece = uint64_t(1) << 20;

uint32_t element_bytes(uint32_t row_dtype) { return row_dtype == FT_DTYPE_FP32 ? 4 : 2; }

// Jobs run in order, so the newest finished one tells where to go on.
uint64_t first_unfinished(const Memory& memory) {
  uint64_t newest = 0;
  for (uint64_t seq = 1; seq <= memory.header().num_blocks; seq++)
    newest = std::max(newest, shared(memory.block(seq).done).load(std::memory_order_acquire));
  return newest + 1;
}

bool shape_allowed(const ft_ring_header& h, const Layer& layer, const ft_block& job) {
  if (job.rows < 1 || job.rows > h.max_rows || job.topk < 1 || job.topk > h.max_topk) return false;
  if (job.row_dtype < FT_DTYPE_BF16 || job.row_dtype > FT_DTYPE_FP32) return false;
  uint64_t elements = uint64_t(job.rows) * layer.table.hidden;
  return elements * element_bytes(job.row_dtype) <= h.results_offset - h.rows_offset &&
         elements * sizeof(float) <= h.block_stride - h.results_offset;
}

bool sharing_allowed(const Layer& layer, const ft_block& job) {
  if (job.shared_expert == -1) return true;
  return job.shared_expert >= 0 && uint32_t(job.shared_expert) < layer.table.num_experts &&
         job.shared_begin <= layer.table.intermediate && job.shared_begin % FT_SHARED_STEP == 0;
}

void add(uint64_t& counter, uint64_t n) { shared(counter).fetch_add(n, std::memory_order_relaxed); }

}  // namespace

Service::Service(const Memory& memory, Team& team, ft_isa isa, int parent_pid)
    : memory_(memory),
      header_(memory_.header()),
      team_(team),
      isa_(isa),
      parent_pid_(parent_pid),
      executor_(team),
      next_job_(first_unfinished(memory)) {
  team_.count_progress_in(&header_.progress);
  shared(header_.worker_asleep).store(0);
  int32_t bad_layer = 0;
  attach(bad_layer);
}

Leave Service::serve() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  uint64_t last_active = now_ns();
  uint32_t last_wake = shared(header_.wake).load(std::memory_order_relaxed);
  while (true) {
    bool active = false;
    for (int i = 0; i < kPollsBetweenClockReads && !active; i++) {
      active = poll();
      if (!active) cpu_relax();
    }
    if (stopping_) return Leave::kStopped;
    uint32_t wake = shared(header_.wake).load(std::memory_order_relaxed);
    uint64_t now = now_ns();
    if (active || wake != last_wake) last_active = now;
    last_wake = wake;
    uint64_t idle = now - last_active;
    if (idle < header_.spin_ns) continue;
    if (idle < header_.nap_ns) {
      nap(wake);
      continue;
    }
    if (!sleep(wake)) return Leave::kOrphaned;
    last_active = now_ns();
  }
}

bool Service::job_waits() const {
  return shared(memory_.block(next_job_).doorbell).load(std::memory_order_acquire) == next_job_;
}

bool Service::command_waits() const {
  return shared(header_.command_doorbell).load(std::memory_order_acquire) >
         shared(header_.command_done).load(std::memory_order_relaxed);
}

bool Service::poll() {
  if (job_waits()) {
    run_job(memory_.block(next_job_));
  } else if (command_waits()) {
    run_command();
  } else {
    return false;
  }
  return true;
}

void Service::nap(uint32_t seen) { futex_wait(&header_.wake, seen, uint64_t(FT_NAP_US) * 1000); }

bool Service::sleep(uint32_t seen) {
  add(header_.stats.sleeps, 1);
  shared(header_.worker_asleep).store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool parent_lives = true;
  while (shared(header_.wake).load(std::memory_order_acquire) == seen && !job_waits() && !command_waits() &&
         parent_lives) {
    futex_wait(&header_.wake, seen, uint64_t(FT_SLEEP_MAX_MS) * 1'000'000);
    parent_lives = getppid() == parent_pid_;
  }
  shared(header_.worker_asleep).store(0, std::memory_order_relaxed);
  add(header_.stats.wakeups, 1);
  return parent_lives;
}

void Service::run_job(ft_block& block) {
  uint64_t started = now_ns();
  team_.begin();
  Outcome outcome = execute(block);
  team_.end();
  uint64_t finished = now_ns();
  record(block, outcome, started, finished);
  block.status = outcome.status;
  block.status_arg = outcome.argument;
  block.started_ns = started;
  block.finished_ns = finished;
  block.experts = outcome.experts;
  block.bytes = outcome.bytes;
  shared(block.done).store(next_job_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (shared(block.owner_waiting).load(std::memory_order_relaxed)) futex_wake(low_half(&block.done));
  next_job_++;
}

Outcome Service::execute(const ft_block& block) {
  const ft_block job = block;  // checked once, used unchanged
  if (job.layer >= layers_.size()) return {FT_ERR_LAYER, int32_t(job.layer)};
  const Layer& layer = layers_[job.layer];
  if (layer.status != FT_OK) return {layer.status, int32_t(job.layer)};
  if (!shape_allowed(header_, layer, job) || !sharing_allowed(layer, job))
    return {FT_ERR_SHAPE, int32_t(job.rows)};
  // The block is one region of the ring; its parts were checked when the ring was mapped.
  std::byte* base = reinterpret_cast<std::byte*>(const_cast<ft_block*>(&block));
  JobData data{job.rows,
               job.topk,
               job.row_dtype,
               reinterpret_cast<const int32_t*>(base + header_.routes_offset),
               reinterpret_cast<const float*>(base + header_.weights_offset),
               base + header_.rows_offset,
               reinterpret_cast<float*>(base + header_.results_offset),
               {job.shared_expert, job.shared_begin}};
  return executor_.run(layer, data);
}

void Service::record(const ft_block& block, const Outcome& outcome, uint64_t started, uint64_t finished) {
  ft_stats& stats = header_.stats;
  add(stats.jobs, 1);
  add(stats.failed_jobs, outcome.status != FT_OK);
  add(stats.rows, outcome.status == FT_OK ? block.rows : 0);
  add(stats.expert_rows, outcome.expert_rows);
  add(stats.experts, outcome.experts);
  add(stats.bytes, outcome.bytes);
  add(stats.busy_ns, finished - started);
  if (block.rung_ns && block.rung_ns < started) add(stats.handoff_ns, started - block.rung_ns);
}

void Service::run_command() {
  uint64_t seq = shared(header_.command_doorbell).load(std::memory_order_acquire);
  int32_t argument = 0;
  ft_status status = FT_OK;
  switch (header_.command) {
    case FT_CMD_ATTACH:
      status = attach(argument);
      break;
    case FT_CMD_MEASURE:
      status = measure();
      break;
    case FT_CMD_STOP:
      stopping_ = true;
      break;
    default:
      status = FT_ERR_COMMAND;
      argument = int32_t(header_.command);
  }
  header_.command_status = status;
  header_.command_status_arg = argument;
  shared(header_.command_done).store(seq, std::memory_order_release);
  futex_wake(low_half(&header_.command_done));
}

// Attaches every layer of the table; a layer that is refused answers for itself in its jobs.
ft_status Service::attach(int32_t& bad_layer) {
  uint32_t count = header_.num_layers;
  layers_.clear();
  if (count > FT_MAX_LAYERS) {
    bad_layer = int32_t(count);
    return FT_ERR_LAYER;
  }
  ft_status status = FT_OK;
  for (uint32_t i = 0; i < count; i++) {
    layers_.push_back(attach_layer(memory_, i, isa_));
    if (status != FT_OK || layers_[i].status == FT_OK) continue;
    status = layers_[i].status;
    bad_layer = int32_t(i);
  }
  return status;
}

ft_status Service::measure() {
  uint64_t begin = header_.arg[0], bytes = header_.arg[1] / FT_CACHE_LINE * FT_CACHE_LINE;
  uint64_t passes = std::max<uint64_t>(header_.arg[2], 1);
  if (begin % FT_CACHE_LINE || begin > memory_.pool_bytes || bytes > memory_.pool_bytes - begin)
    return FT_ERR_BOUNDS;
  uint64_t pieces = (bytes + kMeasurePiece - 1) / kMeasurePiece;
  std::atomic<uint64_t> total{0};  // the reads cannot be optimised away: other files compute the sums
  team_.begin();
  uint64_t started = now_ns();
  for (uint64_t pass = 0; pass < passes; pass++) {
    team_.run(uint32_t(pieces), [&](Piece piece) {
      uint64_t at = piece.index * kMeasurePiece;
      total += streaming_sum(isa_, memory_.pool + begin + at, std::min(kMeasurePiece, bytes - at));
    });
  }
  uint64_t elapsed = now_ns() - started;
  team_.end();
  header_.result[0] = bytes * passes;
  header_.result[1] = elapsed;
  return FT_OK;
}

}  // namespace ft
