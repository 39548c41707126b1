// SPDX-License-Identifier: Apache-2.0
//
// The plan of one step of one layer, run by one block of threads. The rules are those of
// python/sglang_ft/experts/step.py, which tests compare with this in every slot, victim, order and counter.
//
// `Block` is what differs between the device and the host: who the threads are, how they meet, add and scan.
// The host's has one thread. Nothing here depends on the order in which threads run.
#pragma once

#include "sgl_ft_kernel/api.h"
#include "sglang_ft/ring.h"

#ifdef __CUDACC__
#define FT_HOST_DEVICE __host__ __device__
#else
#define FT_HOST_DEVICE
#endif

namespace ft {

// Victims are chosen among at most so many candidates: fewer than FT_CACHE_MAX_EXPERTS are older than the
// youngest victim, and one step never stamps more slots than a layer has experts.
constexpr uint32_t kMaxCandidates = 2 * FT_CACHE_MAX_EXPERTS;
constexpr uint32_t kBins = 256;

struct PlanScratch {
  uint32_t count[FT_CACHE_MAX_EXPERTS];   // rows of each local expert
  uint32_t run_of[FT_CACHE_MAX_EXPERTS];  // its run; FT_NONE: not on the GPU
  uint32_t slot[FT_CACHE_MAX_EXPERTS];    // of each run: hits, then fills
  uint16_t expert[FT_CACHE_MAX_EXPERTS];  // of each run, then of the other misses, best to fill first
  uint16_t miss[FT_CACHE_MAX_EXPERTS];    // misses, ascending
  uint32_t age[FT_CACHE_MAX_EXPERTS];     // steps since the last route of each miss
  uint32_t scan[FT_CACHE_MAX_EXPERTS];
  uint32_t bins[kBins];
  uint32_t candidate[kMaxCandidates];
  uint32_t candidate_age[kMaxCandidates];
  int16_t route[FT_CACHE_MAX_PAIRS];  // expert of each pair; -1: none
  uint32_t candidates, evictions, bin, below;
  uint32_t row_in_job[FT_CACHE_MAX_PAIRS / 32];
};

struct PlanNumbers {
  uint32_t step, live, free, hits, misses, fills, features;
};

// The queue of the oldest slots, and the entry that this thread has read.
struct LookAhead {
  uint32_t head, count, slot;
  bool valid;
};

template <class Block>
class StepPlanner {
 public:
  FT_HOST_DEVICE StepPlanner(Block& block, PlanScratch& scratch, const ft_cache& cache,
                             const ft_moe_layer& layer, const ft_step& step)
      : b(block),
        s(scratch),
        cache(cache),
        layer(layer),
        in(step),
        work(*step.work),
        pairs(step.rows * step.topk) {}

  FT_HOST_DEVICE void run() {
    n.step = cache.control->step + 1;
    n.live = cache.control->live_slots;
    n.free = cache.control->free_slots;
    count_routes();
    find_hits();
    decide();
    if (n.fills > n.free) look_ahead();
    rank_misses();
    ring_job();
    touch();
    if (n.fills) {
      choose_victims();
      apply_fills();
      if (in.transient) recycle();
    }
    list_runs();
    finish();
  }

 private:
  FT_HOST_DEVICE const int32_t* routes() const {
    if (!in.trace) return in.routes;
    return in.trace + cache.control->replay % in.trace_steps * in.trace_stride;
  }

  FT_HOST_DEVICE void count_routes() {
    for (uint32_t e = b.tid(); e < layer.num_experts; e += b.size()) s.count[e] = 0;
    for (uint32_t i = b.tid(); i < FT_CACHE_MAX_PAIRS / 32; i += b.size()) s.row_in_job[i] = 0;
    b.sync();
    uint32_t rows = in.num_valid ? uint32_t(*in.num_valid) : in.rows;
    const int32_t* from = routes();
    for (uint32_t p = b.tid(); p < pairs; p += b.size()) {
      int32_t e = from[p];
      if (uint32_t(e) >= layer.num_experts || p / in.topk >= rows) e = -1;
      s.route[p] = int16_t(e);
      if (e >= 0) b.add(&s.count[e], 1);
    }
    b.sync();
  }

  // Hits become runs in ascending order of experts; misses are listed the same way.
  FT_HOST_DEVICE void find_hits() {
    for (uint32_t e = b.tid(); e < layer.num_experts; e += b.size()) {
      uint32_t slot = s.count[e] ? cache.slot_of[layer.first_expert_id + e] : FT_NONE;
      s.run_of[e] = slot;
      s.scan[e] = !s.count[e] ? 0 : slot != FT_NONE ? 1 : 1u << 16;
    }
    uint32_t total = b.scan(s.scan, layer.num_experts);
    n.hits = total & 0xffff;
    n.misses = total >> 16;
    for (uint32_t e = b.tid(); e < layer.num_experts; e += b.size()) {
      uint32_t slot = s.run_of[e], rows = s.count[e];
      s.run_of[e] = FT_NONE;
      if (!rows) continue;
      uint32_t hit = s.scan[e] & 0xffff, miss = s.scan[e] >> 16;
      if (slot == FT_NONE) {
        s.miss[miss] = uint16_t(e);
        s.age[miss] = n.step - cache.seen[layer.first_expert_id + e];
      } else {
        s.run_of[e] = hit;
        s.slot[hit] = slot;
        s.expert[hit] = uint16_t(e);
        cache.used[slot] = n.step;
      }
    }
    b.sync();
  }

  FT_HOST_DEVICE void decide() {
    ft_split wanted = cache.split[n.misses];
    uint32_t fills = min(n.misses, n.free);
    if (fills < wanted.fills) fills = wanted.fills;
    n.fills = layer.uncached ? 0 : min(min(fills, n.misses), n.live - n.hits);
    n.features = n.fills == wanted.fills && n.fills ? wanted.features : 0;
  }

  // More rows first, then routed more recently, then the lower expert.
  FT_HOST_DEVICE void rank_misses() {
    for (uint32_t i = b.tid(); i < n.misses; i += b.size()) {
      uint32_t e = s.miss[i], rows = s.count[e], age = s.age[i], rank = 0;
      for (uint32_t j = 0; j < n.misses; j++) {
        uint32_t other = s.count[s.miss[j]];
        rank += other > rows || (other == rows && (s.age[j] < age || (s.age[j] == age && j < i)));
      }
      s.expert[n.hits + rank] = uint16_t(e);
      if (rank < n.fills) s.run_of[e] = n.hits + rank;
    }
    b.sync();
  }

  FT_HOST_DEVICE uint32_t shared_expert() const {
    return n.features ? s.expert[n.hits + n.fills - 1] : FT_NONE;
  }
  FT_HOST_DEVICE uint32_t job_experts() const { return n.misses - n.fills + (n.features ? 1 : 0); }

  // As early as possible: the worker starts while the rest is planned.
  FT_HOST_DEVICE void ring_job() {
    const ft_ring_view& ring = in.ring;
    bool job = job_experts() > 0 && ring.blocks;
    uint64_t sequence = cache.control->sequence + 1;
    uint8_t* block = ring.blocks + (job ? (sequence - 1) % ring.num_blocks * ring.block_stride : 0);
    int32_t* ring_routes = reinterpret_cast<int32_t*>(block + ring.routes_offset);
    float* ring_weights = reinterpret_cast<float*>(block + ring.weights_offset);
    uint32_t shared = shared_expert();
    for (uint32_t p = b.tid(); p < pairs; p += b.size()) {
      int32_t e = s.route[p];
      bool runs_there = e >= 0 && (s.run_of[e] == FT_NONE || uint32_t(e) == shared);
      work.job_routes[p] = runs_there ? e : -1;
      if (!job) continue;
      ring_routes[p] = runs_there ? e : -1;
      ring_weights[p] = in.weights[p];
      if (runs_there) b.set_bit(s.row_in_job, p / in.topk);
    }
    if (job) {
      b.sync();
      copy_rows(block + ring.rows_offset);
      if (b.tid() == 0) {
        ft_block& head = *reinterpret_cast<ft_block*>(block);
        head.layer = layer.index;
        head.rows = in.rows;
        head.topk = in.topk;
        head.row_dtype = in.row_dtype;
        head.rung_ns = 0;
        head.shared_expert = int32_t(shared);
        head.shared_begin = n.features;
      }
      b.sync();
      if (b.tid() == 0) {
        b.ring(&reinterpret_cast<ft_block*>(block)->doorbell, sequence);
        cache.control->sequence = sequence;
      }
    }
    if (b.tid() == 0) {
      if (in.stamps && in.stamps[FT_STAMP_ON]) {
        in.stamps[FT_STAMP_RUNG] = b.now();
        in.stamps[FT_STAMP_MISSES] = n.misses;
      }
      work.sequence = job ? sequence : 0;
      work.first_job_row = job ? first_job_row() : 0;
      if (job_experts() && !job) {
        *cache.failure = FT_FAILED_NO_WORKER;
        cache.counters->failed_jobs += 1;
      }
    }
  }

  FT_HOST_DEVICE uint32_t first_job_row() const {
    uint32_t row = 0;
    while (row < in.rows && !(s.row_in_job[row / 32] >> (row % 32) & 1)) row++;
    return row;
  }

  FT_HOST_DEVICE void copy_rows(uint8_t* to) {
    struct alignas(16) Piece {
      uint32_t word[4];
    };
    uint32_t pieces = layer.hidden / 8;  // rows are 16-bit
    const Piece* from = static_cast<const Piece*>(in.x);
    for (uint32_t i = b.tid(); i < in.rows * pieces; i += b.size())
      if (s.row_in_job[i / pieces / 32] >> (i / pieces % 32) & 1) reinterpret_cast<Piece*>(to)[i] = from[i];
  }

  FT_HOST_DEVICE void touch() {
    for (uint32_t e = b.tid(); e < layer.num_experts; e += b.size())
      if (s.count[e]) cache.seen[layer.first_expert_id + e] = n.step;
  }

  FT_HOST_DEVICE uint32_t age_of(uint32_t slot) const { return n.step - cache.used[slot]; }

  // Slots of the fills' runs. Free ones first, in order; then the least recently used.
  FT_HOST_DEVICE void choose_victims() {
    uint32_t from_free = min(n.fills, n.free);
    if (b.tid() == 0) s.evictions = 0;
    if (from_free) take_free(from_free);
    if (from_free < n.fills) take_oldest(n.hits + from_free, n.fills - from_free);
    b.sync();
  }

  // From the queue of the oldest slots. Slots used since it was made have another stamp and are passed over;
  // the others are still the oldest, in order. When it runs out it is made anew, which happens once in
  // hundreds of steps.
  FT_HOST_DEVICE void take_oldest(uint32_t first, uint32_t count) {
    if (take_queued(first, count)) return;
    make_queue(min(FT_CACHE_QUEUE, n.live - n.free - n.hits));
    look_ahead();
    take_queued(first, count);
  }

  // Reads the first entries, early: the loads come back while the job is rung.
  FT_HOST_DEVICE void look_ahead() {
    ahead.head = cache.control->queue_head;
    ahead.count = cache.control->queue_count;
    read_queue(ahead.head);
  }

  FT_HOST_DEVICE void read_queue(uint32_t base) {
    uint32_t i = base + b.tid();
    ahead.valid = i < ahead.count;
    if (!ahead.valid) return;
    ft_queued entry = cache.queue[i];
    ahead.slot = entry.slot;
    ahead.valid = cache.used[entry.slot] == entry.used;
  }

  FT_HOST_DEVICE bool take_queued(uint32_t first, uint32_t count) {
    uint32_t queued = ahead.count, taken = 0;
    for (uint32_t base = ahead.head; base < queued && taken < count; base += b.size()) {
      if (base != ahead.head) read_queue(base);
      s.scan[b.tid()] = ahead.valid;
      uint32_t found = b.scan(s.scan, b.size());
      uint32_t place = taken + s.scan[b.tid()];
      if (ahead.valid && place < count) s.slot[first + place] = ahead.slot;
      if (ahead.valid && place == count - 1) s.bin = base + b.tid() + 1;
      taken += found;
      b.sync();
    }
    if (b.tid() == 0) cache.control->queue_head = taken < count ? queued : s.bin;
    b.sync();
    return taken >= count;
  }

  FT_HOST_DEVICE void take_free(uint32_t count) {
    uint32_t threads = min(b.size(), uint32_t(FT_CACHE_MAX_EXPERTS));
    uint32_t each = (n.live + threads - 1) / threads, mine = 0;
    uint32_t begin = min(b.tid() * each, n.live), end = b.tid() < threads ? min(begin + each, n.live) : begin;
    for (uint32_t slot = begin; slot < end; slot++) mine += cache.expert_of[slot] == FT_NONE;
    if (b.tid() < threads) s.scan[b.tid()] = mine;
    b.scan(s.scan, threads);
    uint32_t place = b.tid() < threads ? s.scan[b.tid()] : count;
    for (uint32_t slot = begin; slot < end && place < count; slot++)
      if (cache.expert_of[slot] == FT_NONE) s.slot[n.hits + place++] = slot;
  }

  // The `count` oldest of the occupied slots, the oldest first; none that this step uses. Narrows down the
  // lowest age that one of them can have, a digit at a time, until few enough candidates are left to rank
  // them all.
  FT_HOST_DEVICE void make_queue(uint32_t count) {
    uint32_t oldest = 0;
    for (uint32_t slot = b.tid(); slot < n.live; slot += b.size())
      if (cache.expert_of[slot] != FT_NONE) oldest = max(oldest, age_of(slot));
    oldest = b.maximum(oldest);
    uint32_t low = 0, shift = 0, above = 0;  // above: slots older than the range in view
    while (oldest >> shift >= kBins) shift += 8;
    while (true) {
      uint32_t in_bin = narrow(low, shift, count - above);
      low += s.bin << shift;
      above += s.below;
      if (shift == 0 || above + in_bin <= kMaxCandidates) break;
      shift -= 8;
    }
    if (b.tid() == 0) s.candidates = 0;
    b.sync();
    for (uint32_t slot = b.tid(); slot < n.live; slot += b.size()) {
      if (cache.expert_of[slot] == FT_NONE || age_of(slot) < low) continue;
      uint32_t i = b.add(&s.candidates, 1);
      s.candidate[i] = slot;
      s.candidate_age[i] = age_of(slot);
    }
    b.sync();
    uint32_t candidates = s.candidates;
    for (uint32_t i = b.tid(); i < candidates; i += b.size()) {
      uint32_t slot = s.candidate[i], age = s.candidate_age[i], rank = 0;
      for (uint32_t j = 0; j < candidates; j++)
        rank += s.candidate_age[j] > age || (s.candidate_age[j] == age && s.candidate[j] < slot);
      if (rank < count) cache.queue[rank] = {slot, cache.used[slot]};
    }
    if (b.tid() == 0) {
      cache.control->queue_head = 0;
      cache.control->queue_count = count;
    }
    b.sync();
  }

  // Of the ages in [low, low + kBins << shift): s.bin is the highest digit at which at least `count` slots
  // are as old, s.below how many are older than that digit's; returns how many are within it.
  FT_HOST_DEVICE uint32_t narrow(uint32_t low, uint32_t shift, uint32_t count) {
    for (uint32_t i = b.tid(); i < kBins; i += b.size()) s.bins[i] = 0;
    b.sync();
    for (uint32_t slot = b.tid(); slot < n.live; slot += b.size()) {
      uint32_t age = age_of(slot);
      if (cache.expert_of[slot] == FT_NONE || age < low) continue;
      uint32_t digit = (age - low) >> shift;
      if (digit < kBins) b.add(&s.bins[kBins - 1 - digit], 1);  // the oldest first
    }
    b.sync();
    for (uint32_t i = b.tid(); i < kBins; i += b.size()) s.scan[i] = s.bins[i];
    b.scan(s.scan, kBins);
    for (uint32_t i = b.tid(); i < kBins; i += b.size())
      if (s.scan[i] < count && s.scan[i] + s.bins[i] >= count) {
        s.bin = kBins - 1 - i;
        s.below = s.scan[i];
      }
    b.sync();
    return s.bins[kBins - 1 - s.bin];
  }

  // The victims of a transient step become the first of the queue, in the order of their slots; those that an
  // earlier one left there stay before them.
  FT_HOST_DEVICE void recycle() {
    uint32_t from_free = min(n.fills, n.free), count = n.fills - from_free;
    if (count == 0) return;
    uint32_t head = cache.control->queue_head, end = cache.control->queue_count;
    if (b.tid() == 0) s.candidates = 0;
    b.sync();
    for (uint32_t i = head + b.tid(); i < end; i += b.size())
      if (n.step - cache.queue[i].used >= FT_TRANSIENT_AGE) b.add(&s.candidates, 1);
    b.sync();
    uint32_t older = s.candidates;
    for (uint32_t i = b.tid(); i < older; i += b.size()) {
      s.candidate[i] = cache.queue[head + i].slot;
      s.candidate_age[i] = cache.queue[head + i].used;
    }
    const uint32_t* slots = s.slot + n.hits + from_free;
    for (uint32_t i = b.tid(); i < count; i += b.size()) {
      uint32_t rank = older;
      for (uint32_t j = 0; j < count; j++) rank += slots[j] < slots[i];
      s.candidate[rank] = slots[i];
      s.candidate_age[rank] = n.step - FT_TRANSIENT_AGE;
    }
    b.sync();
    for (uint32_t i = b.tid(); i < older + count; i += b.size())
      cache.queue[head - count + i] = {s.candidate[i], s.candidate_age[i]};
    if (b.tid() == 0) cache.control->queue_head = head - count;
  }

  FT_HOST_DEVICE void apply_fills() {
    for (uint32_t i = b.tid(); i < n.fills; i += b.size()) {
      uint32_t e = s.expert[n.hits + i], slot = s.slot[n.hits + i], old = cache.expert_of[slot];
      if (old != FT_NONE) {
        cache.slot_of[old] = FT_NONE;
        b.add(&s.evictions, 1);
      }
      cache.expert_of[slot] = layer.first_expert_id + e;
      cache.slot_of[layer.first_expert_id + e] = slot;
      cache.used[slot] = in.transient && old != FT_NONE ? n.step - FT_TRANSIENT_AGE : n.step;
    }
  }

  FT_HOST_DEVICE void list_runs() {
    uint32_t runs = n.hits + n.fills;
    b.sync();
    for (uint32_t r = b.tid(); r < runs; r += b.size()) s.scan[r] = s.count[s.expert[r]];
    b.scan(s.scan, runs);
    for (uint32_t r = b.tid(); r < runs; r += b.size()) {
      uint32_t e = s.expert[r], features = e == shared_expert() ? n.features : layer.intermediate;
      work.runs[r] = {s.slot[r], s.scan[r], s.count[e], features, e, {}};
    }
    for (uint32_t p = b.tid(); p < pairs; p += b.size()) {
      int32_t e = s.route[p];
      uint32_t run = e >= 0 ? s.run_of[e] : FT_NONE;
      work.slots[p] = run == FT_NONE ? -1 : int32_t(s.slot[run]);
      if (run == FT_NONE) continue;
      uint32_t place = s.scan[run];
      for (uint32_t q = 0; q < p; q++) place += s.route[q] == e;
      work.pairs[place] = p;
    }
  }

  FT_HOST_DEVICE void finish() {
    if (b.tid() != 0) return;
    uint32_t evictions = n.fills ? s.evictions : 0;
    work.hits = n.hits;
    work.fills = n.fills;
    work.features = n.features;
    work.job_experts = job_experts();
    cache.control->step = n.step;
    cache.control->free_slots = n.free - (n.fills - evictions);
    cache.control->replay += in.trace && in.trace_last;
    ft_cache_counters& c = *cache.counters;
    b.count(&c.steps, 1);
    b.count(&c.rows, in.rows);
    b.count(&c.hits, n.hits);
    if (n.misses == 0) return;
    uint64_t expert_bytes = 0;
    for (int r = 0; r < FT_CACHE_ROLES; r++) expert_bytes += layer.role[r].stride;
    b.count(&c.misses, n.misses);
    b.count(&c.fills, n.fills);
    b.count(&c.evictions, evictions);
    b.count(&c.jobs, job_experts() > 0);
    b.count(&c.job_experts, job_experts());
    b.count(&c.shared, n.features > 0);
    b.count(&c.fill_bytes, n.fills * expert_bytes);
  }

  FT_HOST_DEVICE static uint32_t min(uint32_t x, uint32_t y) { return x < y ? x : y; }
  FT_HOST_DEVICE static uint32_t max(uint32_t x, uint32_t y) { return x > y ? x : y; }

  Block& b;
  PlanScratch& s;
  const ft_cache& cache;
  const ft_moe_layer& layer;
  const ft_step& in;
  ft_work& work;
  uint32_t pairs;
  PlanNumbers n{};
  LookAhead ahead{};
};

}  // namespace ft
