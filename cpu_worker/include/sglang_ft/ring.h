// SPDX-License-Identifier: Apache-2.0
//
// The ring: the one protocol between the owner (the scheduler process, its host code or its GPU) and
// the cpu_worker process. Plain C, no pointers, fixed-width fields: both sides map the same memory
// file at different addresses. python/sglang_ft/worker/protocol.py mirrors every struct and
// test/unit/test_protocol.py compares sizes and offsets, so a change here fails there.
//
// Two memory files (memfd), both created by the owner:
//
//   pool   all expert banks. The owner fills it, then seals it; the worker maps it read-only.
//   ring   what this header describes. Both sides map it read-write.
//
//   ring file                                          one block (block_stride bytes)
//   0               +------------------------+         0                +------------------+
//                   | ft_ring_header         |                          | ft_block         |
//   layers_offset   +------------------------+         routes_offset    +------------------+
//                   | ft_layer[FT_MAX_LAYERS]|                          | i32 [rows, topk] |
//   blocks_offset   +------------------------+         weights_offset   +------------------+
//                   | block 0                |                          | f32 [rows, topk] |
//                   | block 1                |         rows_offset      +------------------+
//                   | ...                    |                          | row dtype [rows, hidden]
//                   +------------------------+         results_offset   +------------------+
//                                                                       | f32 [rows, hidden]
//                                                                       +------------------+
//   All offsets are multiples of 64. Rows are packed with the layer's hidden size, routes and weights
//   with the job's topk.
//
// Ordering
//   A job with sequence number s (1, 2, 3, ...) lives in block (s - 1) % num_blocks. Each flag has one
//   writer and its own cache line.
//
//   (1) Owner: waits until block.done == s - num_blocks (it is free), writes the descriptor, routes,
//       weights and rows with plain stores, then stores block.doorbell = s with release order.
//   (2) Worker: loads block.doorbell with acquire order; seeing s it also sees everything that (1)
//       wrote before the store. It runs the job, writes results, status and times with plain stores,
//       then stores block.done = s with release order.
//   (3) Owner: loads block.done with acquire order; seeing s it also sees everything that (2) wrote.
//
//   Between (1) and (3) the owner writes nothing in the block and the worker never writes the
//   descriptor, routes, weights or rows. A job is therefore a pure function of its block and the
//   pool: a worker that dies in the middle leaves doorbell == s and done < s, and the next worker
//   runs the same job again with the same result. A GPU owner uses system-scope release and acquire
//   on the same words.
//
// Sleeping (both directions are the store-then-load pattern, so both need a full fence)
//   Worker: stores worker_asleep = 1, full fence, checks every doorbell and the command once more, and
//     only then waits on the futex word `wake` with the value read before the check.
//   Owner: stores a doorbell, full fence, loads worker_asleep; if it is 1 it increments `wake` and calls
//     futex wake.
//   Of the two fences one comes first in the total order: either the worker's check sees the doorbell
//   or the owner's load sees worker_asleep; no wake-up is lost. The worker also wakes by itself every
//   FT_SLEEP_MAX_MS to see whether its parent is still there.
//   In the other direction owner_waiting and the low half of `done` play the same parts (little-endian
//   hosts only, as all of x86-64 and AArch64 Linux).
//
// Naps (nap_ns > 0: the owner is a GPU, which stores doorbells but cannot wake a sleeper)
//   The host calls ft_client_wake before it launches a forward pass. Activity is a job or a change of `wake`.
//   After spin_ns without activity the worker naps: it waits on `wake` for at most FT_NAP_US, polls, and naps
//   again, until nap_ns have passed since the last activity. Only then it sleeps.
//   No job waits longer than a nap, if nap_ns exceeds the time from a launch to its first job and from one
//   job to the next. The worker sleeps only on the value of `wake` with which it last looked for activity.
//   When it decides to sleep, either `wake` has changed since that look, and the wait returns at once, or the
//   next launch is still to come and wakes it. So from the launch on it is awake, and it stays so, since each
//   job comes within nap_ns of the activity before it. Awake it polls, or naps and polls within FT_NAP_US. A
//   job that comes later than nap_ns is not lost either: the sleeper looks at the doorbells every
//   FT_SLEEP_MAX_MS.
#ifndef SGLANG_FT_RING_H
#define SGLANG_FT_RING_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FT_RING_MAGIC 0x474e495254464753ull /* "SGFTRING" in memory */
#define FT_RING_VERSION 2u
#define FT_CACHE_LINE 64
#define FT_MAX_LAYERS 512
#define FT_MAX_ROLES 8
#define FT_SLEEP_MAX_MS 1000
#define FT_NAP_US 50
#define FT_SHARED_STEP 64

/* Weight formats. One file each in cpu_worker/src/formats and python/sglang_ft/experts/formats. */
enum ft_format { FT_FORMAT_NONE = 0, FT_FORMAT_BF16 = 1, FT_FORMAT_FP16 = 2, FT_FORMAT_FP32 = 3 };

/* Roles of a bank. Weights are [out, in], row-major, one contiguous row for each output feature. */
enum ft_role {
  FT_ROLE_GATE_UP = 0,      /* [2I, H] gated: gate rows, then up rows (or interleaved); [I, H] not gated */
  FT_ROLE_DOWN = 1,         /* [H, I] */
  FT_ROLE_GATE_UP_BIAS = 2, /* f32 [2I] or [I] */
  FT_ROLE_DOWN_BIAS = 3,    /* f32 [H] */
  FT_ROLE_GATE_UP_SCALE = 4,
  FT_ROLE_DOWN_SCALE = 5,
  FT_ROLE_GATE_UP_SCALE2 = 6,
  FT_ROLE_DOWN_SCALE2 = 7
};

/* h = act(gate) * up, or act(x) when the layer is not gated. */
enum ft_activation {
  FT_ACT_SILU = 0, /* with limit > 0 (DeepSeek-V4): gate = min(gate, limit), up = clamp(up, -limit, limit) */
  FT_ACT_GELU = 1, /* erf */
  FT_ACT_GELU_TANH = 2, /* tanh approximation */
  FT_ACT_RELU2 = 3,     /* max(x, 0)^2 */
  FT_ACT_SWIGLU_OAI = 4 /* gpt-oss: clamped as above, h = gate * sigmoid(alpha * gate) * (up + 1) */
};

enum ft_dtype { FT_DTYPE_BF16 = 1, FT_DTYPE_FP16 = 2, FT_DTYPE_FP32 = 3 };

enum ft_layer_flags {
  FT_LAYER_GATED = 1,
  FT_LAYER_INTERLEAVED = 2,    /* gate/up rows alternate: gate row 2i, up row 2i + 1 */
  FT_LAYER_WEIGHT_ON_INPUT = 4 /* the router weight multiplies the input row, not the output */
};

enum ft_worker_state {
  FT_WORKER_ABSENT = 0,   /* written by the owner before each spawn */
  FT_WORKER_STARTING = 1, /* mapped, threads not up yet */
  FT_WORKER_READY = 2,
  FT_WORKER_STOPPED = 3, /* left on FT_CMD_STOP or because its parent died */
  FT_WORKER_REFUSED = 4  /* cannot serve this ring; exit status and stderr say why */
};

enum ft_isa {
  FT_ISA_AUTO = 0,
  FT_ISA_SCALAR = 1,
  FT_ISA_AVX2 = 2,
  FT_ISA_AVX512 = 3,
  FT_ISA_AVX512_BF16 = 4,
  FT_ISA_AMX = 5 /* AVX512_BF16 for few rows, AMX tiles for many */
};

enum ft_status {
  FT_OK = 0,
  FT_ERR_LAYER = 1,  /* no such layer */
  FT_ERR_SHAPE = 2,  /* rows, topk, row dtype or shared expert outside what the ring or layer allows */
  FT_ERR_ROUTE = 3,  /* an expert index >= num_experts; status_arg is its value */
  FT_ERR_FORMAT = 4, /* no kernel for this format, activation or missing role; status_arg is the layer */
  FT_ERR_BOUNDS = 5, /* a bank reaches beyond the pool; status_arg is the layer */
  FT_ERR_COMMAND = 6 /* unknown command */
};

enum ft_command_kind {
  FT_CMD_NONE = 0,
  FT_CMD_ATTACH = 1,  /* check and use layers [0, num_layers) of the layer table */
  FT_CMD_MEASURE = 2, /* plain streaming read of pool bytes [arg0, arg0 + arg1), arg2 passes (0: one), all
                         threads: result0 = bytes, result1 = nanoseconds */
  FT_CMD_STOP = 3
};

struct ft_role_view {
  uint64_t offset; /* of expert 0 of this layer, bytes from the start of the pool */
  uint64_t stride; /* bytes from one expert to the next; 0: the layer has no such role. Both are
                      multiples of the element size; multiples of 64 are faster. */
};

/* One MoE layer. Written by the owner before FT_CMD_ATTACH, never changed afterwards. */
struct ft_layer {
  uint32_t format;          /* ft_format */
  uint32_t activation;      /* ft_activation */
  uint32_t flags;           /* ft_layer_flags */
  uint32_t num_experts;     /* E */
  uint32_t hidden;          /* H, elements */
  uint32_t intermediate;    /* I, elements */
  uint32_t first_expert_id; /* layer * E: expert id of local expert 0 */
  float output_scale;       /* routed scaling factor that the worker applies; 1 when the model applies it */
  float act_alpha;
  float act_limit; /* 0: no clamp */
  uint32_t reserved[6];
  struct ft_role_view role[FT_MAX_ROLES];
};

/* Descriptor and flags of one job. */
struct ft_block {
  uint64_t doorbell; /* owner: sequence number of the job to run */
  uint8_t pad0[56];
  uint64_t done; /* worker: sequence number of the last finished job */
  uint8_t pad1[56];
  uint32_t owner_waiting; /* owner: 1 while it sleeps on the low half of `done` */
  uint8_t pad2[60];
  /* descriptor: owner */
  uint32_t layer;     /* index into the layer table */
  uint32_t rows;      /* 1 .. max_rows */
  uint32_t topk;      /* 1 .. max_topk */
  uint32_t row_dtype; /* ft_dtype */
  uint64_t rung_ns;   /* CLOCK_MONOTONIC when the doorbell was rung; 0 from a GPU */
  /* One expert of a job may be shared with the owner: the worker computes and sums only its intermediate
   * features [shared_begin, I); the owner computes the others and adds the expert's down bias. */
  int32_t shared_expert; /* local expert; -1: none */
  uint32_t shared_begin; /* a multiple of FT_SHARED_STEP, at most I */
  uint8_t pad3[32];
  /* outcome: worker */
  uint32_t status; /* ft_status */
  int32_t status_arg;
  uint64_t started_ns; /* CLOCK_MONOTONIC at the first instruction of the job */
  uint64_t finished_ns;
  uint32_t experts; /* distinct experts of the job */
  uint32_t reserved;
  uint64_t bytes; /* expert bytes read; of a shared expert only the worker's part */
  uint8_t pad4[24];
};

/* Counters since the ring was made; they survive a worker restart. Worker writes. */
struct ft_stats {
  uint64_t jobs;
  uint64_t failed_jobs;
  uint64_t rows;        /* token rows */
  uint64_t expert_rows; /* routed (row, expert) pairs */
  uint64_t experts;     /* distinct experts, summed over jobs */
  uint64_t bytes;       /* expert bytes read, summed over jobs */
  uint64_t busy_ns;     /* inside jobs */
  uint64_t handoff_ns;  /* from doorbell to first instruction, summed over host jobs */
  uint64_t sleeps;
  uint64_t wakeups;
  uint64_t reserved[6];
};

struct ft_ring_header {
  /* identity and layout: owner, before the first worker starts */
  uint64_t magic;
  uint32_t version;
  uint32_t num_blocks;
  uint64_t ring_bytes;
  uint64_t pool_bytes;
  uint64_t layers_offset;
  uint64_t blocks_offset;
  uint64_t block_stride;
  uint64_t routes_offset; /* these four: from the start of a block */
  uint64_t weights_offset;
  uint64_t rows_offset;
  uint64_t results_offset;
  uint32_t max_rows;
  uint32_t max_topk;
  uint32_t max_hidden;
  uint32_t num_layers; /* owner, before FT_CMD_ATTACH; a restarted worker attaches them by itself */
  uint64_t spin_ns;    /* how long the worker polls after its last job before it naps or sleeps */
  uint64_t nap_ns;     /* GPU owner: how long after its last job it naps before it sleeps; 0: no naps */
  uint8_t pad0[8];
  /* owner */
  uint32_t wake; /* futex word of the worker */
  uint8_t pad1[60];
  uint32_t abort; /* 1: every wait for a job ends with an error */
  uint8_t pad2[60];
  uint64_t command_doorbell; /* command sequence number, release after the words below */
  uint32_t command;          /* ft_command_kind */
  uint32_t reserved0;
  uint64_t arg[3];
  uint8_t pad3[24];
  /* worker */
  uint32_t worker_asleep;
  uint8_t pad4[60];
  uint64_t command_done; /* sequence number, release after the words below */
  uint32_t command_status;
  int32_t command_status_arg;
  uint64_t result[2];
  uint8_t pad5[32];
  uint64_t progress; /* grows with every tile: a running job whose progress stands still is stalled */
  uint8_t pad6[56];
  uint32_t worker_state; /* futex word for the owner */
  uint32_t worker_pid;
  uint32_t worker_threads;
  uint32_t worker_isa;          /* ft_isa in use */
  uint32_t worker_isa_detected; /* best that this CPU and kernel offer */
  uint8_t pad7[44];
  struct ft_stats stats;
};

/* Client library (libsglang_ft_client): the owner's half, for callers without atomics of their own. `ring`
 * is the mapped ring file. Sequence numbers are the caller's; blocks are taken in order. */

/* Rings job `seq` whose block is already filled. */
void ft_client_ring(void* ring, uint64_t seq);

/* Waits until job `seq` is done: spins for spin_ns, then sleeps. Returns 0 when done, 1 on timeout (call
 * again: nothing is lost), 2 when `abort` is set. */
int ft_client_wait(void* ring, uint64_t seq, uint64_t spin_ns, uint64_t timeout_ns);

/* Issues command `seq` and returns at once; the arguments are already in the header. */
void ft_client_command(void* ring, uint64_t seq);

/* Waits for command `seq`. Same return values as ft_client_wait. */
int ft_client_command_wait(void* ring, uint64_t seq, uint64_t timeout_ns);

/* Ends job `seq` with `status` in the worker's place. Only while no worker process exists. */
void ft_client_give_up(void* ring, uint64_t seq, uint32_t status);

/* Wakes the worker without a job, for an owner (GPU) that rings doorbells by itself. */
void ft_client_wake(void* ring);

/* Sets `abort` to value with release order and wakes every waiter. */
void ft_client_abort(void* ring, uint32_t value);

/* Waits until worker_state != state. 0: it changed; 1: timeout. */
int ft_client_state_wait(void* ring, uint32_t state, uint64_t timeout_ns);

/* CRC-32C of `bytes` at `data`, going on from `crc`, 0 at first: for weight files. */
uint32_t ft_client_crc32c(uint32_t crc, const void* data, uint64_t bytes);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* SGLANG_FT_RING_H */
