"""When which piece of host memory is pinned: each as soon as it is full, beside the loading of later ones.

Pinning gigabytes takes seconds, of which the kernel needs most for itself; several threads and pieces of some GiB are
fastest. What pins is given, so that the order of things is tested without CUDA.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from sglang_ft.worker.memory import GIB

if TYPE_CHECKING:
    from sglang_ft.experts.bank import BankPlan

PIECE = 4 * GIB
"""Registering one large range is ten times slower than registering it in pieces of this size."""
THREADS = 4
_PAGE = 4096


def even_borders(nbytes: int, piece: int = PIECE) -> list[int]:
    """0, the ends of pieces of `piece` bytes, and `nbytes`."""
    return [*range(0, nbytes, piece), nbytes]


def expert_borders(plan: BankPlan, nbytes: int, piece: int = PIECE) -> list[int]:
    """As `even_borders`, but an expert is never cut where any page border between two of them is near enough.

    Where experts are no whole number of pages, pieces end where a layer's or a bank's experts do.
    """
    starts = {0, nbytes}
    for layer in plan.layers:
        for view in layer.roles.values():
            ends = range(view.offset, view.offset + view.stride * layer.spec.num_experts + 1, view.stride)
            starts.update(at for at in ends if at % _PAGE == 0)
    ordered = sorted(starts)
    borders = [0]
    while borders[-1] < nbytes:
        at = bisect_right(ordered, borders[-1] + piece) - 1
        if ordered[at] == borders[-1]:  # one expert is larger than a piece
            at += 1
        borders.append(min(ordered[at], nbytes))
    return borders


class Registration:
    """Pins the pieces of one memory file. All methods from any thread; `finish` once."""

    def __init__(
        self,
        borders: Sequence[int],
        padding: int,
        pin: Callable[[int, int], str],
        unpin: Callable[[int, int], None],
        threads: int = THREADS,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """`pin(begin, end)` returns why it failed, or nothing. `padding`: bytes of a piece that nobody may fill.

        `prepare` is called once in each of the threads.
        """
        self.borders, self._padding = list(borders), padding
        self._pin, self._unpin = pin, unpin
        self._missing = [end - begin for begin, end in self._pieces]
        self._started: dict[int, Future[str]] = {}
        self._failed = False
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(threads, "ft-pin", prepare)

    @property
    def _pieces(self) -> list[tuple[int, int]]:
        return list(zip(self.borders, self.borders[1:], strict=False))

    def filled(self, offset: int, nbytes: int) -> None:
        """Says that these bytes, none of them told before, are in place; a piece that is full is pinned from now on."""
        with self._lock:
            piece = bisect_right(self.borders, offset) - 1
            while nbytes > 0 and piece < len(self._missing):
                count = min(nbytes, self.borders[piece + 1] - offset)
                self._missing[piece] -= count
                if self._missing[piece] <= self._padding and not self._failed:
                    self._start(piece)
                offset, nbytes, piece = offset + count, nbytes - count, piece + 1

    def _start(self, piece: int) -> None:
        if piece not in self._started:
            self._started[piece] = self._executor.submit(self._run, *self._pieces[piece])

    def _run(self, begin: int, end: int) -> str:
        if self._failed:  # the limit is reached; only what comes before can still matter
            return "not tried"
        why = self._pin(begin, end)
        self._failed = self._failed or bool(why)
        return why

    def finish(self) -> tuple[int, str]:
        """Pins what is left, in order. Returns how many pieces from the first on are pinned, and why no more.

        Later pieces that were pinned before an earlier one failed are given back, and it is tried once more.
        """
        with self._lock:
            for piece in range(len(self._missing)):
                if not self._failed:
                    self._start(piece)
        whys = {piece: future.result() for piece, future in self._started.items()}
        self._executor.shutdown()
        good = next((p for p in range(len(self._missing)) if whys.get(p, "not tried")), len(self._missing))
        reasons = [why for why in whys.values() if why and why != "not tried"]
        later = [piece for piece, why in whys.items() if piece > good and not why]
        for piece in later:
            self._unpin(*self._pieces[piece])
        while later and good < len(self._missing) and not self._pin(*self._pieces[good]):
            good += 1
        return good, reasons[0] if reasons else ""
