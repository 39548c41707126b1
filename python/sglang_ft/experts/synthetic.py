"""Random weights for benchmarks, made at the speed of memory: a pool without a file, a router with locality.

Speed does not depend on the values of weights, and correctness only needs experts that differ. So one block of
numbers is drawn and every expert is a stretch of it that begins elsewhere, every second one with its sign flipped.
Each expert is N(0, STD); experts are not independent of each other.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from sglang_ft.experts.bank import ExpertPool
from sglang_ft.experts.traces import router_scales

STD = 0.02
_BLOCK_ELEMENTS = 1 << 26  # 128 MiB of BF16
_ALIGN = 64  # elements
_DRAW = 1 << 22  # elements drawn at once, as float32


class NormalBlock:
    """N(0, STD) numbers of one floating point type, to be copied from by many threads.

    `elements`: about how many will be copied in all; a smaller block is drawn for few.
    """

    def __init__(self, dtype: torch.dtype, seed: int, elements: int) -> None:
        size = min(_BLOCK_ELEMENTS, 1 << max(elements - 1, _ALIGN).bit_length())
        generator = torch.Generator().manual_seed(seed)
        block = torch.empty(size, dtype=dtype)
        for part in block.split(_DRAW):
            part.copy_(torch.randn(len(part), generator=generator).mul_(STD))
        self._bits = _bits(block)
        self._sign = self._bits.dtype.type(1 << (8 * dtype.itemsize - 1))
        self._places = size // _ALIGN
        self._stride = int(self._places * (math.sqrt(5) - 1) / 2) | 1  # odd, so that it meets every place

    def copy_to(self, out: torch.Tensor, number: int) -> None:
        """Fills `out`, contiguous, with stretch `number`; stretches of different numbers differ (up to 2 million)."""
        target = _bits(out)
        begin = number * self._stride % self._places * _ALIGN
        sign = self._sign if (number + number // self._places) % 2 else self._sign.dtype.type(0)
        done = 0
        while done < len(target):
            source = self._bits[begin : begin + len(target) - done]
            np.bitwise_xor(source, sign, out=target[done : done + len(source)])
            done, begin = done + len(source), 0


def fill_pool(pool: ExpertPool, seed: int, threads: int | None = None) -> None:
    """Fills every bank with N(0, STD), each expert differently, by `threads` (default: the cores of this process).

    Raises TypeError for a bank whose elements are no plain floating point numbers.
    """
    elements: dict[torch.dtype, int] = {}
    banks = [bank for layer in range(len(pool.plan.layers)) for bank in pool.banks(layer).values()]
    for bank in banks:
        if bank.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"a bank of {bank.dtype} cannot be filled with random numbers")
        elements[bank.dtype] = elements.get(bank.dtype, 0) + bank.numel()
    blocks = {dtype: NormalBlock(dtype, seed, count) for dtype, count in elements.items()}
    experts = (expert for bank in banks for expert in bank)
    # numpy copies without the interpreter lock and, unlike torch, on the calling thread alone.
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as executor:
        copies = [executor.submit(blocks[e.dtype].copy_to, e, number) for number, e in enumerate(experts)]
    for copy in copies:
        copy.result()


def scale_router(weight: torch.Tensor, locality: float, generator: torch.Generator) -> None:
    """Multiplies the rows of a router, [experts, hidden], by `router_scales` in random order, in place.

    traces.synthetic_trace draws the routes that this gives; replay.find_locality finds the locality of a miss rate.
    """
    order = torch.randperm(len(weight), generator=generator)
    scales = router_scales(len(weight), locality)[order].unsqueeze(1)
    weight.copy_(weight.float() * scales.to(weight.device))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements as unsigned integers, sharing memory."""
    return tensor.view(-1).view({2: torch.uint16, 4: torch.uint32}[tensor.dtype.itemsize]).numpy()
