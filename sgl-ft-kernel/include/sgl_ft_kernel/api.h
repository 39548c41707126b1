// SPDX-License-Identifier: Apache-2.0
//
// The expert cache on the GPU: state in device memory, and the kernels of one step of one MoE layer. Plain C,
// so that Python calls it through ctypes, whatever its version and torch's. python/sgl_ft_kernel/abi.py
// mirrors every struct and a test compares sizes and offsets.
//
// One step of one layer with T rows and k routes each, nothing of it decided on the host:
//
//   ft_plan              one block: finds hits and misses, picks slots, lists the work, rings the doorbell
//   ft_fill              copies the fills from the mapped pool into their slots; on a side stream
//   ft_gate_up, ft_down  h = act(x W_gate_up), then W_down h, over the hits' slots; again over the fills
//   ft_combine           waits for the job; weighs and sums everything into the layer's output
//
// All launches are asynchronous and fit a CUDA graph. Functions return 0 or a cudaError_t, see ft_error_text.
#ifndef SGL_FT_KERNEL_API_H
#define SGL_FT_KERNEL_API_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FT_NONE 0xffffffffu
#define FT_CACHE_MAX_EXPERTS 1024u /* of one layer */
#define FT_CACHE_MAX_PAIRS 2048u   /* (row, route) pairs of one step */
#define FT_FAILED_NO_WORKER 101u   /* ft_cache.failure: a job without a worker to run it */
#define FT_FAILED_ABORTED 102u     /* ft_cache.failure: a wait ended by the abort flag of the ring */
#define FT_CACHE_ROLES 4           /* gate_up, down and their biases: ft_role 0 .. 3 of ring.h */

/* Of m misses, `fills` take the link. features: of the last fill so many intermediate features are computed
 * on the GPU in this step and the worker computes the others; 0: all of them on the GPU. */
struct ft_split {
  uint16_t fills;
  uint16_t features;
};

#define FT_TRANSIENT_AGE 0x80000000u /* in steps, of a transient fill in its own step */

#define FT_CACHE_QUEUE 1024u /* slots that are looked up ahead as victims; at least FT_CACHE_MAX_EXPERTS */

/* A slot among the oldest when the queue was made, and its stamp then; with another stamp it has been used
 * since. */
struct ft_queued {
  uint32_t slot;
  uint32_t used;
};

/* Written by the kernels; the host sets live_slots and free_slots at a safe point. */
struct ft_cache_control {
  uint32_t live_slots;
  uint32_t free_slots;
  uint32_t step;
  uint32_t queue_head;
  uint32_t queue_count; /* the host sets it to 0 whenever it changes slots */
  uint32_t reserved;
  uint64_t sequence; /* of the last job rung */
  uint64_t replay;   /* steps taken from a route trace */
};

/* Sums over steps, as in experts/step.py, and the kernels' own. */
struct ft_cache_counters {
  uint64_t steps;
  uint64_t hits;
  uint64_t misses;
  uint64_t fills;
  uint64_t evictions;
  uint64_t jobs;
  uint64_t job_experts;
  uint64_t shared;
  uint64_t rows;
  uint64_t fill_bytes;
  uint64_t wait_ns; /* in ft_combine, for the worker */
  uint64_t failed_jobs;
};

/* Device memory of the cache; one for all layers. */
struct ft_cache {
  uint32_t* slot_of;       /* [experts of all layers] slot or FT_NONE */
  uint32_t* seen;          /* [experts of all layers] step of the last route */
  uint32_t* expert_of;     /* [slots] expert id or FT_NONE */
  uint32_t* used;          /* [slots] step of the last use */
  struct ft_queued* queue; /* [FT_CACHE_QUEUE] */
  struct ft_cache_control* control;
  struct ft_cache_counters* counters;
  const struct ft_split* split; /* [FT_CACHE_MAX_EXPERTS + 1], by the number of misses */
  uint32_t* failure;            /* host memory: set to a status of the ring when a job failed */
};

/* One role of a layer: where its experts lie in the mapped pool and in the slots. Strides in bytes. */
struct ft_role_memory {
  const uint8_t* pool; /* expert 0 of the layer */
  uint8_t* slots;      /* slot 0 */
  uint64_t stride;     /* of an expert, the same in both */
};

struct ft_moe_layer {
  uint32_t index;           /* in the worker's layer table */
  uint32_t first_expert_id; /* of the layer's expert 0 */
  uint32_t num_experts;
  uint32_t hidden;
  uint32_t intermediate;
  uint32_t activation; /* ft_activation of ring.h */
  uint32_t flags;      /* ft_layer_flags of ring.h */
  uint32_t format;     /* ft_format of ring.h */
  float act_alpha;
  float act_limit;
  float output_scale;
  uint32_t uncached; /* 1: the link does not reach its experts; all of them go to the job */
  struct ft_role_memory role[FT_CACHE_ROLES];
};

/* Work of one step, written by ft_plan. Sized for FT_CACHE_MAX_PAIRS and FT_CACHE_MAX_EXPERTS. */
struct ft_run {
  uint32_t slot;
  uint32_t first_pair; /* into ft_work.pairs */
  uint32_t rows;
  uint32_t features; /* intermediate features to compute */
  uint32_t expert;   /* local */
  uint32_t reserved[3];
};

struct ft_work {
  uint32_t hits;  /* runs[0 .. hits) */
  uint32_t fills; /* runs[hits .. hits + fills), in order of rank */
  uint32_t job_experts;
  uint32_t features; /* of the last fill when it is shared, else 0 */
  uint64_t sequence; /* of the job; 0: there is none */
  uint32_t first_job_row;
  uint32_t reserved;
  struct ft_run runs[FT_CACHE_MAX_EXPERTS];
  uint32_t pairs[FT_CACHE_MAX_PAIRS];     /* row * k + route, by run, ascending in a run */
  int32_t slots[FT_CACHE_MAX_PAIRS];      /* of each pair; -1: not on the GPU */
  int32_t job_routes[FT_CACHE_MAX_PAIRS]; /* local expert of each pair that the worker runs, else -1 */
};

/* The ring of ring.h as the device sees it; copied here because reading the header over the link takes
 * microseconds. */
struct ft_ring_view {
  uint8_t* blocks; /* null: no worker */
  const uint32_t* abort;
  uint64_t block_stride;
  uint64_t routes_offset;
  uint64_t weights_offset;
  uint64_t rows_offset;
  uint64_t results_offset;
  uint64_t num_blocks;
};

/* When the parts of a layer's last step began and ended, in nanoseconds of the GPU's clock:
 * ft_step.stamps[FT_STAMPS]. */
enum ft_stamp {
  FT_STAMP_PLAN_BEGIN = 0,
  FT_STAMP_RUNG = 1, /* the job's doorbell; also when there is no job */
  FT_STAMP_PLAN_END = 2,
  FT_STAMP_FILL_BEGIN = 3,
  FT_STAMP_FILL_END = 4,
  FT_STAMP_TAIL_BEGIN = 5,
  FT_STAMP_TAIL_END = 6,
  FT_STAMP_HITS_BEGIN = 7,
  FT_STAMP_HITS_END = 8,
  FT_STAMP_FILLED_BEGIN = 9, /* compute of the fills */
  FT_STAMP_FILLED_END = 10,
  FT_STAMP_COMBINE_BEGIN = 11,
  FT_STAMP_JOB_DONE = 12,
  FT_STAMP_COMBINE_END = 13,
  FT_STAMP_MISSES = 14, /* not a time */
  FT_STAMP_ON = 15,     /* not a time: set by the host; 0: no stamps are taken */
  FT_STAMPS = 16
};

/* One step. Row data in device memory. */
struct ft_step {
  const int32_t* routes;    /* [rows, topk] local experts; anything else is no route */
  const float* weights;     /* [rows, topk] */
  const void* x;            /* [rows, hidden] of row_dtype */
  void* out;                /* [rows, hidden] of row_dtype */
  const int32_t* num_valid; /* rows from here on are padding; null: none are */
  uint32_t rows;
  uint32_t topk;
  uint32_t row_dtype;  /* ft_dtype of ring.h: BF16 or FP16 */
  uint32_t trace_last; /* 1: the trace goes on to its next step after this layer */
  uint32_t transient;  /* 1: what it fills in place of other experts is the first to be evicted again */
  uint32_t reserved;
  uint64_t* stamps; /* null: none are taken */
  float* h;         /* scratch [rows * topk, intermediate] */
  float* partial;   /* scratch [rows * topk, hidden] */
  struct ft_work* work;
  struct ft_ring_view ring;
  const int32_t* trace; /* routes to take instead, [trace_steps, rows, topk] of this layer; null: none */
  uint64_t trace_steps;
  uint64_t trace_stride; /* elements from one step of the trace to the next */
};

/* CUDA stream handles are passed as pointers. */
int ft_plan(const struct ft_cache* cache, const struct ft_moe_layer* layer, const struct ft_step* step,
            void* stream);

/* First the part of each fill that this step needs (tail 0), then the rest of a shared one (tail 1). */
int ft_fill(const struct ft_moe_layer* layer, const struct ft_step* step, int tail, uint32_t blocks,
            void* stream);

/* Runs of the hits (fills 0) or of the fills (1). Without ft_step.work all experts are resident: local expert
 * e lies in slot first_expert_id + e and every pair is a run of its own; no plan is needed. */
int ft_gate_up(const struct ft_moe_layer* layer, const struct ft_step* step, int fills, void* stream);
int ft_down(const struct ft_moe_layer* layer, const struct ft_step* step, int fills, void* stream);

/* early: nothing but the last ft_down has to end before, see csrc/launch.cuh. */
int ft_combine(const struct ft_cache* cache, const struct ft_moe_layer* layer, const struct ft_step* step,
               int early, void* stream);

/* Runs the same plan logic here on the host, all pointers being host memory: for tests and offline use. */
int ft_plan_on_host(const struct ft_cache* cache, const struct ft_moe_layer* layer,
                    const struct ft_step* step);

/* Experts of one layer that are brought together in a buffer, for a prefill. */
struct ft_gathering {
  const int32_t* experts; /* [count] local, in device memory */
  uint32_t count;
  uint32_t first;              /* expert e goes to to[role] + (e - first) * stride */
  uint8_t* to[FT_CACHE_ROLES]; /* null where the layer has no such role */
};

/* Copies each from its slot, or over the link when it has none (any more). `blocks` for each expert. */
int ft_gather(const struct ft_cache* cache, const struct ft_moe_layer* layer,
              const struct ft_gathering* gathering, uint32_t blocks, void* stream);

/* One copy between device memory and registered host memory. */
struct ft_copy {
  void* to;
  const void* from;
  uint64_t bytes;
};

/* Enqueues `count` copies for the device's copy engines. */
int ft_copy_runs(const struct ft_copy* copies, uint32_t count, void* stream);

/* Slot memory: an address range that is reserved once; physical memory is mapped into its first bytes in
 * chunks. */
int ft_range_reserve(uint64_t bytes, int device, void** range);
int ft_range_resize(void* range, uint64_t bytes); /* maps or unmaps whole chunks so that `bytes` are there */
uint64_t ft_range_address(void* range);
uint64_t ft_range_mapped(void* range);
int ft_range_free(void* range);

/* Registers host memory with CUDA so that kernels and copies reach it; chunk by chunk. *registered: bytes
 * from the start that are registered when it fails. */
int ft_host_register(void* start, uint64_t bytes, uint64_t chunk, uint64_t* registered);
int ft_host_unregister(void* start, uint64_t bytes, uint64_t chunk);
int ft_device_address(void* host, void** device);

/* Plain copy of `bytes` of mapped host memory by a kernel, for measuring the link. */
int ft_copy_from_host(void* to, const void* from, uint64_t bytes, uint32_t blocks, void* stream);

/* Transports of a doorbell, for measuring: a round trip of `count` jobs through the given one. 0: kernels, 1:
 * stream memory operations, 2: host functions. */
int ft_handoff_probe(const struct ft_ring_view* ring, uint64_t first_sequence, uint32_t count, int transport,
                     void* stream);

const char* ft_error_text(int error);

/* sizeof of each struct in the order of this file, for the mirror's test. Returns how many there are. */
int ft_abi_sizes(uint64_t* sizes, int capacity);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* SGL_FT_KERNEL_API_H */
