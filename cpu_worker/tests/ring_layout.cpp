// SPDX-License-Identifier: Apache-2.0
//
// One line for each struct ("struct NAME SIZE") and field ("field STRUCT.NAME OFFSET SIZE") of ring.h.
#include <cstdio>

#include "sglang_ft/ring.h"

#define STRUCT(type) printf("struct %s %zu\n", #type, sizeof(type))
#define FIELD(type, name) \
  printf("field %s.%s %zu %zu\n", #type, #name, offsetof(type, name), sizeof(type::name))

static void print_views_and_layers() {
  STRUCT(ft_role_view);
  FIELD(ft_role_view, offset);
  FIELD(ft_role_view, stride);
  STRUCT(ft_layer);
  FIELD(ft_layer, format);
  FIELD(ft_layer, activation);
  FIELD(ft_layer, flags);
  FIELD(ft_layer, num_experts);
  FIELD(ft_layer, hidden);
  FIELD(ft_layer, intermediate);
  FIELD(ft_layer, first_expert_id);
  FIELD(ft_layer, output_scale);
  FIELD(ft_layer, act_alpha);
  FIELD(ft_layer, act_limit);
  FIELD(ft_layer, role);
}

static void print_block() {
  STRUCT(ft_block);
  FIELD(ft_block, doorbell);
  FIELD(ft_block, done);
  FIELD(ft_block, owner_waiting);
  FIELD(ft_block, layer);
  FIELD(ft_block, rows);
  FIELD(ft_block, topk);
  FIELD(ft_block, row_dtype);
  FIELD(ft_block, rung_ns);
  FIELD(ft_block, shared_expert);
  FIELD(ft_block, shared_begin);
  FIELD(ft_block, status);
  FIELD(ft_block, status_arg);
  FIELD(ft_block, started_ns);
  FIELD(ft_block, finished_ns);
  FIELD(ft_block, experts);
  FIELD(ft_block, bytes);
}

static void print_stats() {
  STRUCT(ft_stats);
  FIELD(ft_stats, jobs);
  FIELD(ft_stats, failed_jobs);
  FIELD(ft_stats, rows);
  FIELD(ft_stats, expert_rows);
  FIELD(ft_stats, experts);
  FIELD(ft_stats, bytes);
  FIELD(ft_stats, busy_ns);
  FIELD(ft_stats, handoff_ns);
  FIELD(ft_stats, sleeps);
  FIELD(ft_stats, wakeups);
}

static void print_header() {
  STRUCT(ft_ring_header);
  FIELD(ft_ring_header, magic);
  FIELD(ft_ring_header, version);
  FIELD(ft_ring_header, num_blocks);
  FIELD(ft_ring_header, ring_bytes);
  FIELD(ft_ring_header, pool_bytes);
  FIELD(ft_ring_header, layers_offset);
  FIELD(ft_ring_header, blocks_offset);
  FIELD(ft_ring_header, block_stride);
  FIELD(ft_ring_header, routes_offset);
  FIELD(ft_ring_header, weights_offset);
  FIELD(ft_ring_header, rows_offset);
  FIELD(ft_ring_header, results_offset);
  FIELD(ft_ring_header, max_rows);
  FIELD(ft_ring_header, max_topk);
  FIELD(ft_ring_header, max_hidden);
  FIELD(ft_ring_header, num_layers);
  FIELD(ft_ring_header, spin_ns);
  FIELD(ft_ring_header, nap_ns);
  FIELD(ft_ring_header, wake);
  FIELD(ft_ring_header, abort);
  FIELD(ft_ring_header, command_doorbell);
  FIELD(ft_ring_header, command);
  FIELD(ft_ring_header, arg);
  FIELD(ft_ring_header, worker_asleep);
  FIELD(ft_ring_header, command_done);
  FIELD(ft_ring_header, command_status);
  FIELD(ft_ring_header, command_status_arg);
  FIELD(ft_ring_header, result);
  FIELD(ft_ring_header, progress);
  FIELD(ft_ring_header, worker_state);
  FIELD(ft_ring_header, worker_pid);
  FIELD(ft_ring_header, worker_threads);
  FIELD(ft_ring_header, worker_isa);
  FIELD(ft_ring_header, worker_isa_detected);
  FIELD(ft_ring_header, stats);
}

int main() {
  print_views_and_layers();
  print_block();
  print_stats();
  print_header();
}
