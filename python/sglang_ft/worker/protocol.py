"""Mirror of cpu_worker/include/sglang_ft/ring.h, which explains the protocol and its ordering.

Only layout lives here. test/unit/test_protocol.py compares every size and offset with the compiled header.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint8, c_uint32, c_uint64
from enum import IntEnum, IntFlag

MAGIC = 0x474E495254464753
VERSION = 2
LINE = 64
MAX_LAYERS = 512
MAX_ROLES = 8
SHARED_STEP = 64


class Format(IntEnum):
    BF16 = 1
    FP16 = 2
    FP32 = 3


class Role(IntEnum):
    GATE_UP = 0
    DOWN = 1
    GATE_UP_BIAS = 2
    DOWN_BIAS = 3
    GATE_UP_SCALE = 4
    DOWN_SCALE = 5
    GATE_UP_SCALE2 = 6
    DOWN_SCALE2 = 7


class Activation(IntEnum):
    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU2 = 3
    SWIGLU_OAI = 4


class DType(IntEnum):
    BF16 = 1
    FP16 = 2
    FP32 = 3


class LayerFlag(IntFlag):
    GATED = 1
    INTERLEAVED = 2
    WEIGHT_ON_INPUT = 4


class WorkerState(IntEnum):
    ABSENT = 0
    STARTING = 1
    READY = 2
    STOPPED = 3
    REFUSED = 4


class Isa(IntEnum):
    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_BF16 = 4
    AMX = 5


class Status(IntEnum):
    OK = 0
    LAYER = 1
    SHAPE = 2
    ROUTE = 3
    FORMAT = 4
    BOUNDS = 5
    COMMAND = 6


class Command(IntEnum):
    NONE = 0
    ATTACH = 1
    MEASURE = 2
    STOP = 3


class RoleView(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("stride", c_uint64)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("format", c_uint32),
        ("activation", c_uint32),
        ("flags", c_uint32),
        ("num_experts", c_uint32),
        ("hidden", c_uint32),
        ("intermediate", c_uint32),
        ("first_expert_id", c_uint32),
        ("output_scale", c_float),
        ("act_alpha", c_float),
        ("act_limit", c_float),
        ("reserved", c_uint32 * 6),
        ("role", RoleView * MAX_ROLES),
    ]


class Block(ctypes.Structure):
    _fields_ = [
        ("doorbell", c_uint64),
        ("pad0", c_uint8 * 56),
        ("done", c_uint64),
        ("pad1", c_uint8 * 56),
        ("owner_waiting", c_uint32),
        ("pad2", c_uint8 * 60),
        ("layer", c_uint32),
        ("rows", c_uint32),
        ("topk", c_uint32),
        ("row_dtype", c_uint32),
        ("rung_ns", c_uint64),
        ("shared_expert", c_int32),
        ("shared_begin", c_uint32),
        ("pad3", c_uint8 * 32),
        ("status", c_uint32),
        ("status_arg", c_int32),
        ("started_ns", c_uint64),
        ("finished_ns", c_uint64),
        ("experts", c_uint32),
        ("reserved", c_uint32),
        ("bytes", c_uint64),
        ("pad4", c_uint8 * 24),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        ("jobs", c_uint64),
        ("failed_jobs", c_uint64),
        ("rows", c_uint64),
        ("expert_rows", c_uint64),
        ("experts", c_uint64),
        ("bytes", c_uint64),
        ("busy_ns", c_uint64),
        ("handoff_ns", c_uint64),
        ("sleeps", c_uint64),
        ("wakeups", c_uint64),
        ("reserved", c_uint64 * 6),
    ]


class RingHeader(ctypes.Structure):
    _fields_ = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("num_blocks", c_uint32),
        ("ring_bytes", c_uint64),
        ("pool_bytes", c_uint64),
        ("layers_offset", c_uint64),
        ("blocks_offset", c_uint64),
        ("block_stride", c_uint64),
        ("routes_offset", c_uint64),
        ("weights_offset", c_uint64),
        ("rows_offset", c_uint64),
        ("results_offset", c_uint64),
        ("max_rows", c_uint32),
        ("max_topk", c_uint32),
        ("max_hidden", c_uint32),
        ("num_layers", c_uint32),
        ("spin_ns", c_uint64),
        ("nap_ns", c_uint64),
        ("pad0", c_uint8 * 8),
        ("wake", c_uint32),
        ("pad1", c_uint8 * 60),
        ("abort", c_uint32),
        ("pad2", c_uint8 * 60),
        ("command_doorbell", c_uint64),
        ("command", c_uint32),
        ("reserved0", c_uint32),
        ("arg", c_uint64 * 3),
        ("pad3", c_uint8 * 24),
        ("worker_asleep", c_uint32),
        ("pad4", c_uint8 * 60),
        ("command_done", c_uint64),
        ("command_status", c_uint32),
        ("command_status_arg", c_int32),
        ("result", c_uint64 * 2),
        ("pad5", c_uint8 * 32),
        ("progress", c_uint64),
        ("pad6", c_uint8 * 56),
        ("worker_state", c_uint32),
        ("worker_pid", c_uint32),
        ("worker_threads", c_uint32),
        ("worker_isa", c_uint32),
        ("worker_isa_detected", c_uint32),
        ("pad7", c_uint8 * 44),
        ("stats", Stats),
    ]


STRUCTS = {
    "ft_role_view": RoleView,
    "ft_layer": Layer,
    "ft_block": Block,
    "ft_stats": Stats,
    "ft_ring_header": RingHeader,
}
