"""The cpu_worker behind its Python client: right results, and what happens when it dies, hangs or is stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
import worker_stack
from worker_stack import BF16, FP32, available_isas, error

from sglang_ft.errors import WorkerError
from sglang_ft.experts.formats import FORMATS, LayerSpec
from sglang_ft.experts.reference import moe_layer
from sglang_ft.worker.protocol import Activation, Isa


@pytest.mark.parametrize("isa", available_isas())
def test_every_format_and_activation_matches_the_reference(stack, isa):
    specs = []
    for fmt in FORMATS:
        base = {"format": fmt, "num_experts": 12, "hidden": 96, "intermediate": 80}
        specs += [
            LayerSpec(**base),
            LayerSpec(**base, activation=Activation.GELU, weight_on_input=True),
            LayerSpec(**base, activation=Activation.RELU2, gated=False, output_scale=2.5),
            LayerSpec(**base, act_limit=0.5),
            LayerSpec(
                **base,
                activation=Activation.SWIGLU_OAI,
                interleaved=True,
                bias=True,
                act_alpha=1.702,
                act_limit=0.7,
            ),
        ]
    running = stack(specs, isa)
    assert Isa(running.ring.header.worker_isa).name.lower() == isa
    for layer, spec in enumerate(specs):
        dtype = torch.float32 if spec.format is FP32 else spec.format.dtype
        for rows in (1, 2, 7, 64, 300):
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert error(*running.step(rows, dtype, layer)) < tolerance, (spec, rows)


def test_routes_of_other_ranks_are_skipped(stack):
    running = stack([LayerSpec(FP32, 6, 32, 16)])
    x, weights = torch.randn(3, 32), torch.rand(3, 2)
    ids = torch.tensor([[0, -1], [-1, -1], [5, 3]])
    spec = running.pool.plan.layers[0].spec
    got = running.worker.run(0, x, ids, weights)
    assert error(got.double(), moe_layer(x, ids, weights, spec, running.pool.banks(0))) < 1e-5
    assert got[1].eq(0).all()


def test_a_route_outside_the_layer_is_refused_and_the_worker_lives(stack):
    running = stack([LayerSpec(FP32, 6, 32, 16)])
    pid = running.worker.pid
    with pytest.raises(WorkerError, match="ROUTE"):
        running.worker.run(0, torch.randn(1, 32), torch.tensor([[6]]), torch.ones(1, 1))
    assert error(*running.step(5, torch.float32)) < 1e-5
    assert running.worker.pid == pid


def test_jobs_in_and_outside_of_inference_mode_take_turns(stack):
    running = stack([LayerSpec(FP32, 6, 32, 16)])
    for inference in (True, False, True):
        for _ in range(3):
            with torch.inference_mode(inference):
                assert error(*running.step(5, torch.float32)) < 1e-5


def test_no_job_wakes_the_last_command_again(stack):
    """However close a doorbell rings to the moment in which the worker looks for commands."""
    running = stack([LayerSpec(FP32, 6, 32, 16)])
    running.worker.measure_read(0, 4096)
    running.ring.header.result[1] = 0
    args = (0, torch.randn(1, 32), torch.tensor([[3]]), torch.ones(1, 1))
    for _ in range(2000):
        running.worker.run(*args)
        end = time.perf_counter() + random.random() * 4e-5
        while time.perf_counter() < end:
            pass
    assert running.ring.header.result[1] == 0, "it was measured again"


def test_a_killed_worker_is_replaced_and_its_job_run_again(stack):
    running = stack([LayerSpec(BF16, 64, 512, 512)], rows=512)
    pid = running.worker.pid
    killer = threading.Timer(0.01, os.kill, (pid, signal.SIGKILL))
    killer.start()
    deadline = time.monotonic() + 10
    while running.worker.restarts == 0 and time.monotonic() < deadline:
        assert error(*running.step(512, torch.bfloat16)) < 1e-2
    assert running.worker.restarts == 1
    assert error(*running.step(512, torch.bfloat16)) < 1e-2
    assert running.worker.pid not in (0, pid)
    assert running.states[:3] == ["ready", "restarting", "ready"]


def test_a_stopped_worker_counts_as_hung_and_is_replaced_within_five_seconds(stack):
    running = stack([LayerSpec(FP32, 6, 32, 16)], stall_s=2.0)
    os.kill(running.worker.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert error(*running.step(3, torch.float32)) < 1e-5
    assert 1.5 < time.monotonic() - started < 5
    assert running.worker.restarts == 1


def test_a_step_that_outlives_two_workers_fails_within_five_seconds(stack):
    running = stack([LayerSpec(BF16, 64, 512, 512)], rows=4096)
    started = time.monotonic()
    with running.every_worker_killed():
        with pytest.raises(WorkerError):
            while time.monotonic() < started + 20:
                step_started = time.monotonic()
                running.step(4096, torch.bfloat16)
        assert time.monotonic() - step_started < 5
    while running.states[-1] != "ready":  # it may have been away for so long that steps fail at once
        time.sleep(0.05)
    assert error(*running.step(3, torch.bfloat16)) < 1e-2, "the next step works"


def test_a_forced_instruction_set_that_the_cpu_lacks_is_refused_in_words(stack, monkeypatch):
    missing = [isa for isa in ("amx", "avx512_bf16", "avx512") if isa not in available_isas()]
    if not missing:
        pytest.skip("this CPU has every instruction set")
    with pytest.raises(WorkerError, match=missing[0]):
        stack([LayerSpec(FP32, 6, 32, 16)], isa=missing[0])


def test_an_idle_worker_burns_no_core(stack):
    running = stack([LayerSpec(FP32, 6, 32, 16)])
    running.step(3, torch.float32)
    process = psutil.Process(running.worker.pid)
    time.sleep(0.2)
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(process.cpu_times()[:2]) - before <= 0.02


def test_the_pool_is_in_memory_once(stack):
    running = stack([LayerSpec(BF16, 256, 512, 256)])  # 201 MB
    for _ in range(4):
        running.step(128, torch.bfloat16, topk=8)
    size = running.pool.plan.nbytes
    ours, workers = (psutil.Process(pid).memory_full_info() for pid in (os.getpid(), running.worker.pid))
    shared = min(ours.shared, workers.shared)
    assert shared > 0.9 * size, "both map the same pages"
    assert workers.uss < 0.3 * size, "the worker has nothing of its own"
    assert workers.pss < 0.75 * size, "each of the two counts for half of the pool"


def test_the_worker_does_not_outlive_its_parent(tmp_path):
    script = textwrap.dedent(
        """
        import sys, os, time
        sys.path.insert(0, {here!r})
        from worker_stack import FP32, LayerSpec, Stack
        running = Stack([LayerSpec(FP32, 6, 32, 16)])
        print(running.worker.pid, flush=True)
        time.sleep(60)
        """
    ).format(here=os.path.dirname(worker_stack.__file__))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    worker.wait(timeout=5)


def test_more_rows_than_a_job_holds_become_several_jobs(stack):
    running = stack([LayerSpec(FP32, 6, 32, 16)], rows=16)
    before = running.ring.header.stats.jobs
    assert error(*running.step(100, torch.float32)) < 1e-5
    assert running.ring.header.stats.jobs - before == 7
