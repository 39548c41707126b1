"""Where the expert pool of a server comes from: fresh memory or what an earlier start left, and what fills it.

Fresh memory is spread over nodes, put into huge pages and filled from a converted folder (by us) or from safetensors
(by SGLang's loader, whose tensors we read); CUDA pins meanwhile what is full. The heat list is of the same weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sglang_ft.config import FtConfig
from sglang_ft.engine.loader import LazyReads
from sglang_ft.errors import MemoryBudgetError
from sglang_ft.experts.heat import HeatList
from sglang_ft.weights import kept, manifest, writer
from sglang_ft.weights.loading import Loading
from sglang_ft.worker import numa
from sglang_ft.worker.memory import GIB

if TYPE_CHECKING:
    from sglang_ft.experts.bank import BankPlan, ExpertPool
    from sglang_ft.experts.registration import Registration
    from sglang_ft.worker.memory import MemoryFile

logger = logging.getLogger(__name__)


class PoolSource:
    """The memory of one model's experts, from its first byte to the pool's being full. In this order: `take_kept`,
    `begin`, `wait`, `keep`."""

    def __init__(self, config: FtConfig, on_gpu: bool, folder: Path | None, num_layers: int) -> None:
        """`folder` of the checkpoint, None without one; `num_layers` of the language model."""
        self._config, self._on_gpu = config, on_gpu
        self._folder, self._num_layers = folder, num_layers
        self.reads: LazyReads | None = None
        """Tensors of the checkpoint, for SGLang's loader, until `wait` has returned."""
        self.registration: Registration | None = None
        """With CUDA, from `begin` on."""
        self._loading: Loading | None = None
        self._identity = ""
        self._lease: kept.Lease | None = None

    def take_kept(self, plan: BankPlan) -> MemoryFile | None:
        """The pool that an earlier server of the same model left, if pools are to be kept at all."""
        if self._folder is None or not self._config.keep_pool:
            return None
        self._identity = kept.identity(self._folder, plan)
        taken = kept.take(self._identity, plan.nbytes, self._config.keep_pool * 60)
        if taken is None:
            kept.drop_idle(str(self._folder))  # of another state of the checkpoint
            return None
        file, self._lease = taken
        return file

    def begin(self, pool: ExpertPool) -> None:
        """Prepares the memory and starts to fill it. Raises MemoryBudgetError, WeightsError, KernelError."""
        fresh = self._lease is None
        if fresh:
            self._prepare(pool)
        else:
            size = pool.plan.nbytes / GIB
            logger.info("Expert pool: %.2f GiB, kept from an earlier start, nothing of it is read", size)
        filled = self._register(pool) if self._on_gpu else lambda offset, nbytes: None
        if self._folder is not None and manifest.is_converted(self._folder):
            self._loading = Loading(self._folder, pool, fresh, filled)
        if self._folder is not None and any(self._folder.glob("*.safetensors")):
            self.reads = LazyReads(self._folder, self._num_layers, fresh)
            begin, addresses = pool.file.address, range(pool.file.address, pool.file.address + pool.file.size)
            self.reads.filled = lambda at, nbytes: filled(at - begin, nbytes) if at in addresses else None

    def _prepare(self, pool: ExpertPool) -> None:
        self._check_memory(pool.plan.nbytes)
        nodes = numa.memory_nodes()
        if numa.spread(pool.file.address, pool.file.size, nodes):
            logger.info("Expert pool: spread over %d memory nodes", len(nodes))
        huge = pool.file.allocate_huge()
        logger.info(
            "Expert pool: %.2f GiB, %.0f %% of it in pages of 2 MiB",
            pool.plan.nbytes / GIB,
            100 * huge / pool.file.size,
        )

    def _check_memory(self, nbytes: int) -> None:
        reserve = int(self._config.ram_reserve_gib * GIB)
        if nbytes + reserve > psutil.virtual_memory().available and (dropped := kept.drop_idle()):
            logger.warning("%.2f GiB of kept expert pools dropped: memory is short", dropped / GIB)
        free = psutil.virtual_memory().available
        if nbytes + reserve > free:
            raise MemoryBudgetError(
                f"the expert pool needs {nbytes / GIB:.2f} GiB and must leave {reserve / GIB:.2f} GiB "
                f"(--ft-ram-reserve-gib) of host memory free; {free / GIB:.2f} GiB are available"
            )

    def _register(self, pool: ExpertPool) -> Callable[[int, int], None]:
        """CUDA pins the pool while it fills; returns what must be told of each part that is in place."""
        from sglang_ft.engine import gpu_experts

        self.registration = gpu_experts.begin_registration(pool)
        if self._lease is not None:
            self.registration.filled(0, pool.file.size)
        return self.registration.filled

    def wait(self) -> None:
        """Until the pool is full and everything else of the checkpoint is in place. Raises CheckpointError."""
        if self._loading is not None:
            self._loading.wait()
        if self.reads is not None:
            self.reads.wait()
            self.reads.close()
            logger.info("Weights read past the page cache: %.2f GiB", self.reads.nbytes / GIB)
            self.reads = None

    def keep(self, pool: ExpertPool) -> None:
        """From now on nobody changes the pool; it is handed to a keeper if it is to stay."""
        if not (self._on_gpu and self._config.keep_pool):
            pool.seal()  # CUDA pins only what may be written, so the next server could not register a sealed pool
        if not self._identity or self._lease is not None or self._folder is None:
            return
        if kept.identity(self._folder, pool.plan) != self._identity:
            logger.warning("The expert pool will not be kept: %s was changed while it was read", self._folder)
            return
        seconds = self._config.keep_pool * 60
        self._lease = kept.hand_over(pool.file, self._identity, str(self._folder), pool.plan.nbytes, seconds)

    def heat_list(self, experts: int) -> HeatList | None:
        """Of these weights, if it is to be used; `experts` of all layers."""
        if not self._config.heat_list or self._folder is None:
            return None
        return HeatList(writer.identity_of_weights(self._folder), experts)
