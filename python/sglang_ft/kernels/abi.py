"""Mirror of include/sgl_ft_kernel/api.h, which explains every field. A test compares sizes with the library."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint16, c_uint32, c_uint64, c_void_p
from enum import IntEnum

NONE = 0xFFFFFFFF
MAX_EXPERTS = 1024
MAX_PAIRS = 2048
ROLES = 4
FAILED_NO_WORKER = 101
FAILED_ABORTED = 102


class Split(ctypes.Structure):
    _fields_ = [("fills", c_uint16), ("features", c_uint16)]


class Control(ctypes.Structure):
    _fields_ = [
        ("live_slots", c_uint32),
        ("free_slots", c_uint32),
        ("step", c_uint32),
        ("queue_head", c_uint32),
        ("queue_count", c_uint32),
        ("reserved", c_uint32),
        ("sequence", c_uint64),
        ("replay", c_uint64),
    ]


COUNTERS: tuple[str, ...] = ("steps", "hits", "misses", "fills", "evictions", "jobs", "job_experts", "shared")
COUNTERS += ("rows", "fill_bytes", "wait_ns", "failed_jobs")


class Counters(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in COUNTERS]


QUEUE = 1024


class Cache(ctypes.Structure):
    _fields_ = [
        ("slot_of", c_void_p),
        ("seen", c_void_p),
        ("expert_of", c_void_p),
        ("used", c_void_p),
        ("queue", c_void_p),
        ("control", c_void_p),
        ("counters", c_void_p),
        ("split", c_void_p),
        ("failure", c_void_p),
    ]


class RoleMemory(ctypes.Structure):
    _fields_ = [("pool", c_void_p), ("slots", c_void_p), ("stride", c_uint64)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("index", c_uint32),
        ("first_expert_id", c_uint32),
        ("num_experts", c_uint32),
        ("hidden", c_uint32),
        ("intermediate", c_uint32),
        ("activation", c_uint32),
        ("flags", c_uint32),
        ("format", c_uint32),
        ("act_alpha", c_float),
        ("act_limit", c_float),
        ("output_scale", c_float),
        ("uncached", c_uint32),
        ("role", RoleMemory * ROLES),
    ]


class Run(ctypes.Structure):
    _fields_ = [
        ("slot", c_uint32),
        ("first_pair", c_uint32),
        ("rows", c_uint32),
        ("features", c_uint32),
        ("expert", c_uint32),
        ("reserved", c_uint32 * 3),
    ]


class Work(ctypes.Structure):
    _fields_ = [
        ("hits", c_uint32),
        ("fills", c_uint32),
        ("job_experts", c_uint32),
        ("features", c_uint32),
        ("sequence", c_uint64),
        ("first_job_row", c_uint32),
        ("reserved", c_uint32),
        ("runs", Run * MAX_EXPERTS),
        ("pairs", c_uint32 * MAX_PAIRS),
        ("slots", c_int32 * MAX_PAIRS),
        ("job_routes", c_int32 * MAX_PAIRS),
    ]


class RingView(ctypes.Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("abort", c_void_p),
        ("block_stride", c_uint64),
        ("routes_offset", c_uint64),
        ("weights_offset", c_uint64),
        ("rows_offset", c_uint64),
        ("results_offset", c_uint64),
        ("num_blocks", c_uint64),
    ]


STAMPS = 16
"""Of a layer's last step; see ft_stamp."""


class Stamp(IntEnum):
    PLAN_BEGIN = 0
    RUNG = 1
    PLAN_END = 2
    FILL_BEGIN = 3
    FILL_END = 4
    TAIL_BEGIN = 5
    TAIL_END = 6
    HITS_BEGIN = 7
    HITS_END = 8
    FILLED_BEGIN = 9
    FILLED_END = 10
    COMBINE_BEGIN = 11
    JOB_DONE = 12
    COMBINE_END = 13
    MISSES = 14
    ON = 15


class Step(ctypes.Structure):
    _fields_ = [
        ("routes", c_void_p),
        ("weights", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("num_valid", c_void_p),
        ("rows", c_uint32),
        ("topk", c_uint32),
        ("row_dtype", c_uint32),
        ("trace_last", c_uint32),
        ("transient", c_uint32),
        ("reserved", c_uint32),
        ("stamps", c_void_p),
        ("h", c_void_p),
        ("partial", c_void_p),
        ("work", c_void_p),
        ("ring", RingView),
        ("trace", c_void_p),
        ("trace_steps", c_uint64),
        ("trace_stride", c_uint64),
    ]


class Gathering(ctypes.Structure):
    _fields_ = [("experts", c_void_p), ("count", c_uint32), ("first", c_uint32), ("to", c_void_p * ROLES)]


class Copy(ctypes.Structure):
    _fields_ = [("to", c_void_p), ("from_", c_void_p), ("bytes", c_uint64)]


STRUCTS = (Split, Control, Counters, Cache, RoleMemory, Layer, Run, Work, RingView, Step, Gathering, Copy)
