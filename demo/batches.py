"""Batches for training: processes make samples and pack them into rows of a fixed number of tokens.

Batch number b of a seed is always the same, whichever process makes it. A process that gives nothing for too long
is replaced once, and its batch is left out if the second one fails too: a training run never waits for ever.
"""

from __future__ import annotations

import argparse
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from demo.data import CHUNK, encode, training_samples

MAX_TOKENS = 4096
SAMPLES_PER_BATCH = 1 << 20
PATIENCE_S = (90.0, 20.0)


class Batch(NamedTuple):
    """Packed documents, each filled up to a multiple of CHUNK.

    Token `ids` int64 [N], the weight of predicting each token float32 [N], and where documents start int32 [D + 1].
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
            fill = -len(doc) % CHUNK
            if len(doc) > MAX_TOKENS:
                continue
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


class Maker:
    """One process that makes every `step`-th batch, and the thread that reads from it."""

    def __init__(self, number: int, step: int, tokens: int, seed: int, model: Path) -> None:
        self.args = ["--step", str(step), "--tokens", str(tokens), "--seed", str(seed), "--model", str(model)]
        self.number, self.step, self.patience = number, step, PATIENCE_S[0]
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "demo.batches", "--first", str(self.number), *self.args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.ready: queue.Queue[Batch] = queue.Queue(8)
        threading.Thread(target=self._read, args=(self.process, self.ready), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen, ready: queue.Queue[Batch]) -> None:
        assert process.stdout is not None
        while True:
            try:
                ready.put(Batch(*pickle.load(process.stdout)))
            except (EOFError, pickle.UnpicklingError):
                return

    def take(self) -> Batch | None:
        """The next batch, or None when two processes in a row failed to make it."""
        for _ in range(2):
            try:
                batch = self.ready.get(timeout=self.patience)
                self.number, self.patience = self.number + self.step, PATIENCE_S[1]
                return batch
            except queue.Empty:
                print(f"no batch {self.number} within {self.patience:.0f} s: new process", flush=True)
                self.process.kill()
                self._start()
        self.process.kill()
        self.number += self.step
        self._start()
        return None


def stream(workers: int, tokens: int, seed: int, model: Path, first: int = 0) -> Iterator[Batch]:
    """Batches `first`, `first` + 1, ... in order, made by `workers` processes that end with this one."""
    makers = [Maker(first + rank, workers, tokens, seed, model) for rank in range(workers)]

    def in_turn() -> Iterator[Batch]:
        try:
            while True:
                for maker in makers:
                    batch = maker.take()
                    if batch is not None:
                        yield batch
        finally:
            for maker in makers:
                maker.process.kill()

    return in_turn()


def main() -> None:
    """One maker: pickled batches on standard output until the reader is gone."""
    parser = argparse.ArgumentParser(description="Makes batches for demo.train.")
    parser.add_argument("--first", type=int, required=True, help="number of the first batch")
    parser.add_argument("--step", type=int, required=True, help="distance to the next number")
    parser.add_argument("--tokens", type=int, required=True, help="tokens of a batch")
    parser.add_argument("--seed", type=int, required=True, help="seed of the training stream")
    parser.add_argument("--model", type=Path, required=True, help="folder of the tokenizer")
    args = parser.parse_args()
    os.nice(5)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    number = args.first
    try:
        while True:
            batch = make_batch(number, args.tokens, args.seed, tokenizer)
            pickle.dump(tuple(batch), sys.stdout.buffer, protocol=5)
            sys.stdout.buffer.flush()
            number += args.step
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
