"""Loads the experts of an FTW folder into the pool while something else goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ft.weights import manifest, reader

if TYPE_CHECKING:
    from sglang_ft.experts.bank import ExpertPool

logger = logging.getLogger(__name__)


class Loading:
    """Reads and checks the experts, and checks the other files, on threads of its own."""

    def __init__(
        self,
        folder: Path,
        pool: ExpertPool,
        experts: bool = True,
        filled: Callable[[int, int], None] = lambda offset, nbytes: None,
    ) -> None:
        """Starts at once. Raises WeightsError if the folder is damaged or of another layout.

        `experts` False: they are in the pool already. `filled` gets offset and size of what is in place.
        """
        self._folder, self._pool, self._experts, self._filled = folder, pool, experts, filled
        self._manifest = manifest.read(folder)
        self._manifest.check_layout(pool.plan, folder / manifest.NAME)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ft-load", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until everything is there. Raises WeightsError."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            reads = reader.CheckedReads(self._folder, self._manifest)
            try:
                self._read(reads)
            finally:
                reads.close()
        except BaseException as e:
            self._failure = e

    def _read(self, reads: reader.CheckedReads) -> None:
        begin = time.monotonic()
        if self._experts:
            reads.experts(self._pool.file.bytes, self._filled)
        reads.others(lambda offset, nbytes: None)
        reads.wait()
        if self._experts:
            seconds = max(time.monotonic() - begin, 1e-9)
            size = (
                self._manifest.experts.nbytes + sum(f.nbytes for f in self._manifest.others.values())
            ) / 1e9
            logger.info(
                "Experts read, all files checked: %.2f GB in %.1f s (%.2f GB/s)",
                size,
                seconds,
                size / seconds,
            )
