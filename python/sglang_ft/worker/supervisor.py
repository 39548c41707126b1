"""Keeps a cpu_worker process alive over one pool and ring, and runs jobs on it.

A worker that dies or hangs is replaced on the same pool; one that merely gets no CPU time is left alone. The job
left behind is a pure function of its block and is run again. A job that outlives two workers, finds none for
RECOVER_S or is there at stop() ends with status LOST, whoever rang it: a host through run(), which raises WorkerError,
or a GPU, which calls nothing here and must never spin forever.

Threads: the caller (one) runs jobs. The watch thread alone starts, kills and reaps worker processes; it
lives as long as the supervisor because the kernel ties "die with your parent" to the thread that forked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import torch

from sglang_ft.errors import FtError, WorkerError
from sglang_ft.worker import native
from sglang_ft.worker import protocol as p
from sglang_ft.worker.liveness import cpu_seconds, is_starved
from sglang_ft.worker.ring import JobOutcome, Ring

if TYPE_CHECKING:
    from sglang_ft.experts.bank import ExpertPool

logger = logging.getLogger(__name__)

MS = 1_000_000
START_S = 30.0
"""A worker that is not ready by then counts as failed: it maps two files and starts threads."""
RECOVER_S = 4.0
"""A job is given up when no worker has been there for this long; so long may a start take while jobs wait."""
RETRY_S = 1.0
"""Pause after a worker that could not be started."""
TICK_S = 0.02
"""How often the watch thread looks for waiting jobs while there is no worker."""
STARVED_STALLS = 10
"""A worker without progress for so many stall times counts as hung, however little CPU time it got."""
MAX_RUNS = 2
"""Workers that one job may wear out."""
LOST = 100
"""Status of a job that we gave up; no worker writes it."""


@dataclass(frozen=True)
class WorkerOptions:
    """How to run the process: cores to pin to (one thread each), instruction set, times."""

    cores: tuple[int, ...]
    isa: str = "auto"
    stall_s: float = 2.0
    wait_spin_ns: int = 20_000


class Supervisor:
    """One worker process and its replacement when it fails."""

    def __init__(
        self,
        ring: Ring,
        pool: ExpertPool,
        options: WorkerOptions,
        on_state: Callable[[str, int, str], None] = lambda state, restarts, why: None,
    ) -> None:
        """`on_state(state, restarts, why)`, from the watch thread: 'ready', 'restarting', 'failed' or 'stopped'."""
        self.ring = ring
        self.pool = pool
        self.options = options
        self.restarts = 0
        self._on_state = on_state
        self._process: subprocess.Popen | None = None
        self._stderr: IO[bytes] | None = None
        self._ready = threading.Event()
        self._lost_at = time.monotonic()
        self._first_start = threading.Event()
        self._start_error: FtError | None = None
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._runs: dict[int, int] = {}
        self._thread = threading.Thread(target=self._watch, name="ft-worker-watch", daemon=True)

    # -- the caller's side ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the worker and waits until it is ready. Raises WorkerError with its own words if it is not."""
        self.ring.abort(False)
        self._thread.start()
        self._first_start.wait()
        if self._start_error:
            raise self._start_error

    def stop(self) -> None:
        """Ends the worker. Jobs in flight are lost; every wait for one, a GPU's too, ends before this returns."""
        self._stopping.set()
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():
            self._thread.join()

    def wait_ready(self) -> None:
        """Waits until there is a worker. Raises WorkerError when there has been none for RECOVER_S."""
        if not self._ready.wait(max(0.0, self._lost_at + RECOVER_S - time.monotonic())):
            why = f": {self._start_error}" if self._start_error else ""
            raise WorkerError(f"no cpu_worker process for {RECOVER_S:.0f} s{why}")

    def wake(self) -> None:
        """To be called before each launch of a forward pass on a GPU that rings jobs by itself. About a microsecond."""
        self.ring.wake()

    @property
    def pid(self) -> int:
        """Process id of the current worker, 0 while there is none."""
        process = self._process
        return process.pid if process and process.poll() is None else 0

    def run(
        self, layer: int, rows: torch.Tensor, expert_ids: torch.Tensor, router_weights: torch.Tensor
    ) -> torch.Tensor:
        """One MoE layer step: the sum of all routed experts of every row, [T, H] in the dtype of `rows`.

        rows [T, H] bfloat16, float16 or float32; expert_ids [T, k], -1: not ours; router_weights [T, k].
        Any T: more rows than a block holds become several jobs. Raises WorkerError.
        """
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        pending: list[tuple[int, int, int]] = []
        step = self.ring.size.rows
        try:
            for first in range(0, rows.shape[0], step):
                if len(pending) == self.ring.size.blocks:
                    self._collect(*pending.pop(0), out)
                last = min(first + step, rows.shape[0])
                self.wait_ready()
                sequence = self.ring.submit(
                    layer, rows[first:last], expert_ids[first:last], router_weights[first:last]
                )
                pending.append((sequence, first, last))
            while pending:
                self._collect(*pending.pop(0), out)
        except WorkerError:
            for sequence, _, _ in pending:  # their blocks must be free before the next step
                with contextlib.suppress(WorkerError):
                    self._finish(sequence)
            raise
        return out

    def measure_read(self, offset: int, nbytes: int, passes: int = 1) -> float:
        """Bytes a second of a plain streaming read of a part of the pool by all worker threads."""
        self.wait_ready()
        sequence = self.ring.command(p.Command.MEASURE, offset, nbytes, passes)
        while not self.ring.command_wait(sequence, 100 * MS):
            if not self._ready.is_set():
                raise WorkerError("the cpu_worker died while measuring")
        if self.ring.header.command_status != p.Status.OK:
            raise WorkerError(f"measuring failed: {p.Status(self.ring.header.command_status).name}")
        return self.ring.header.result[0] / (self.ring.header.result[1] * 1e-9)

    def _collect(self, sequence: int, first: int, last: int, out: torch.Tensor) -> None:
        self._finish(sequence)
        out[first:last].copy_(self.ring.results(sequence, out.shape[1]))

    def _finish(self, sequence: int) -> JobOutcome:
        while not self.ring.wait(sequence, self.options.wait_spin_ns, 100 * MS):
            if not self._thread.is_alive():  # it sees to it that every job ends
                raise WorkerError("the cpu_worker was stopped")
        outcome = self.ring.outcome(sequence)
        if outcome.status == LOST and self._stopping.is_set():
            raise WorkerError("the cpu_worker was stopped")
        if outcome.status == LOST:
            raise WorkerError(
                "the cpu_worker process died or hung twice in the same step, or could not be started again; "
                "this request is lost"
            )
        if outcome.status != p.Status.OK:
            name = p.Status(outcome.status).name
            raise WorkerError(f"the cpu_worker refused a job: {name} (argument {outcome.status_arg})")
        return outcome

    # -- the watch thread -------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._spawn()
                except FtError as e:
                    self._start_failed(e)
                    if not self._first_start.is_set():
                        return
                    self._pause(RETRY_S)
                    continue
                self._serve()
        finally:
            self._first_start.set()
            self.ring.abort(True)
            self._kill()
            self._give_up(self.ring.outstanding())
            self._on_state("stopped", self.restarts, "")

    def _spawn(self) -> None:
        self.ring.header.worker_state = p.WorkerState.ABSENT
        cores = self.options.cores
        fds = (self.ring.file.fd, self.pool.file.fd)
        command = [str(native.find(native.WORKER)), "--ring-fd", str(fds[0]), "--pool-fd", str(fds[1])]
        command += ["--parent-pid", str(os.getpid()), "--threads", str(len(cores))]
        command += ["--cores", ",".join(map(str, cores)), "--isa", self.options.isa]
        self._stderr = tempfile.TemporaryFile()  # not a pipe: nobody reads it while the worker lives
        try:
            self._process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=self._stderr
            )
        except OSError as e:
            raise WorkerError(f"cannot start {command[0]}: {e}") from e
        started = time.monotonic()
        while self.ring.header.worker_state != p.WorkerState.READY:
            if self._process.poll() is not None or self._stopping.is_set():
                self._kill()
                raise WorkerError(f"cpu_worker did not start: {self._last_words()}")
            patience = RECOVER_S if self.ring.outstanding() else START_S
            if time.monotonic() > started + patience:
                self._kill()
                raise WorkerError(f"cpu_worker was not ready after {patience:.0f} s")
            self.ring.state_wait(p.WorkerState(self.ring.header.worker_state), int(TICK_S * 1e9))
        self._start_error = None
        self._ready.set()
        self._first_start.set()
        self._on_state("ready", self.restarts, "")

    def _serve(self) -> None:
        """Returns when the worker is gone, after the bookkeeping for its unfinished jobs."""
        process = self._process
        assert process is not None
        pidfd = os.pidfd_open(process.pid)
        stalled = False
        try:
            last, moved = -1, time.monotonic()
            since, cpu = moved, 0.0
            while not self._stopping.is_set():
                if select.select([pidfd, self._wake_read], [], [], 0.1)[0]:
                    break
                progress = self.ring.header.progress
                now = time.monotonic()
                waiting = bool(self.ring.outstanding())
                if waiting:  # a GPU's job may have come after the last nap
                    self.ring.wake()
                if progress != last or not waiting:
                    last, moved = progress, now
                elif now - since <= self.options.stall_s:
                    continue
                elif now - moved > STARVED_STALLS * self.options.stall_s or not is_starved(
                    process.pid, cpu, now - since
                ):
                    stalled = True
                    break
                since, cpu = now, cpu_seconds(process.pid)
        finally:
            os.close(pidfd)
        self._lost_at = time.monotonic()
        self._ready.clear()
        self._kill()
        if self._stopping.is_set():
            return
        why = f"no progress for {self.options.stall_s:g} s" if stalled else self._exit_reason()
        self.restarts += 1
        logger.error("cpu_worker %d ended (%s); starting it again on the same pool", process.pid, why)
        self._on_state("restarting", self.restarts, why)
        self._runs = {sequence: self._runs.get(sequence, 0) + 1 for sequence in self.ring.outstanding()}
        self._give_up([sequence for sequence, runs in self._runs.items() if runs >= MAX_RUNS])

    def _start_failed(self, error: FtError) -> None:
        self._start_error = error
        self._on_state("failed", self.restarts, str(error))
        self._give_up(self.ring.outstanding())

    def _pause(self, seconds: float) -> None:
        """Waits without a worker process; jobs that a GPU still rings, one after another, must end meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopping.wait(TICK_S):
            if time.monotonic() > self._lost_at + RECOVER_S:
                self._give_up(self.ring.outstanding())

    def _give_up(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            self.ring.give_up(sequence, LOST)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _exit_reason(self) -> str:
        assert self._process is not None
        code = self._process.returncode
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit status {code}: {self._last_words()}"

    def _last_words(self) -> str:
        assert self._process is not None and self._stderr is not None
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return text or f"exit status {self._process.returncode}"
