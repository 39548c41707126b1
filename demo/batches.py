"""Batches for training: worker processes make samples and pack them into rows of a fixed number of tokens.

Batch number b of a seed is always the same, whichever process makes it.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from demo.data import encode, training_samples
from demo.delta_rule import CHUNK

MAX_TOKENS = 2048
SAMPLES_PER_BATCH = 1 << 20


class Batch(NamedTuple):
    """Packed documents, each filled to a multiple of CHUNK: ids int64 [N], weight of predicting each float32 [N],
    starts int32 [D + 1].
    """

    ids: np.ndarray
    weights: np.ndarray
    starts: np.ndarray


def make_batch(number: int, tokens: int, seed: int, tokenizer: Any) -> Batch:
    """Batch `number`: whole documents until the next one does not fit, then padding as one last document."""
    ids: list[int] = []
    weights: list[float] = []
    starts = [0]
    index = number * SAMPLES_PER_BATCH
    while True:
        for doc, doc_weights in encode(training_samples(index, 64, seed), tokenizer):
            if len(doc) > MAX_TOKENS:
                continue
            fill = -len(doc) % CHUNK
            if len(ids) + len(doc) + fill > tokens:
                return _padded(ids, weights, starts, tokens)
            ids += doc + [0] * fill
            weights += [0.0, *doc_weights[1:]] + [0.0] * fill
            starts.append(len(ids))
        index += 64


def _padded(ids: list[int], weights: list[float], starts: list[int], tokens: int) -> Batch:
    missing = tokens - len(ids)
    if missing:
        starts = [*starts, tokens]
    return Batch(
        np.array(ids + [0] * missing, np.int64),
        np.array(weights + [0.0] * missing, np.float32),
        np.array(starts, np.int32),
    )


def _work(rank: int, workers: int, first: int, tokens: int, seed: int, model: str, out: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    number = first + rank
    while True:
        out.put(make_batch(number, tokens, seed, tokenizer))
        number += workers


def stream(workers: int, tokens: int, seed: int, model: Path, first: int = 0) -> Iterator[Batch]:
    """Batches `first`, `first` + 1, ... in order, made by `workers` processes that end with this one.

    Call it before CUDA is first used: the processes are forked.
    """
    context = get_context("fork")
    queues = [context.Queue(8) for _ in range(workers)]
    for rank, out in enumerate(queues):
        args = (rank, workers, first, tokens, seed, str(model), out)
        context.Process(target=_work, args=args, daemon=True).start()
    return _round_robin(queues)


def _round_robin(queues: list[Any]) -> Iterator[Batch]:
    rank = 0
    while True:
        try:
            yield queues[rank].get(timeout=120)
        except queue.Empty:
            raise RuntimeError(f"data worker {rank} of {len(queues)} gave no batch for 120 s") from None
        rank = (rank + 1) % len(queues)
