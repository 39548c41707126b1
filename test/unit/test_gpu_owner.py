"""Jobs of an owner that only stores into the ring, as a GPU does: they get their results, or an end."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
from worker_stack import BF16, FP32, FakeGpu, available_isas, error

from sglang_ft.experts.formats import FORMATS, LayerSpec
from sglang_ft.experts.reference import SharedExpert, moe_layer
from sglang_ft.worker import native
from sglang_ft.worker.protocol import SHARED_STEP, Activation, Status
from sglang_ft.worker.supervisor import LOST

SMALL = LayerSpec(FP32, 6, 64, 128)


@pytest.fixture
def make_gpu(stack):
    """A factory of owners whose worker naps for a minute before it sleeps."""
    return lambda *args, **kwargs: FakeGpu(stack(*args, **{"nap_ns": 60_000_000_000} | kwargs))


def check(gpu: FakeGpu, job: dict, tolerance: float = 1e-5, layer: int = 0, shared=None) -> None:
    """The last job, whose arguments were `job`, has the reference's result."""
    assert gpu.spin() == Status.OK
    spec = gpu.stack.pool.plan.layers[layer].spec
    want = moe_layer(**job, layer=spec, banks=gpu.stack.pool.banks(layer), shared=shared)
    assert error(gpu.results(spec.hidden), want) < tolerance, (spec, shared, len(job["rows"]))


@pytest.mark.parametrize("isa", available_isas())
def test_of_a_shared_expert_the_worker_computes_its_part(make_gpu, isa):
    specs = []
    for fmt in FORMATS:
        base = {"format": fmt, "num_experts": 12, "hidden": 96, "intermediate": 192}
        specs += [
            LayerSpec(**base, bias=True),
            LayerSpec(**base, activation=Activation.GELU, weight_on_input=True),
            LayerSpec(**base, activation=Activation.RELU2, gated=False, bias=True, output_scale=2.5),
            LayerSpec(**base, interleaved=True, bias=True, weight_on_input=True, act_limit=0.5),
        ]
    gpu = make_gpu(specs, isa)
    for rows in range(1, 41):
        for layer, spec in enumerate(specs):
            dtype = spec.format.dtype
            job = gpu.job(rows, layer, dtype=dtype)
            begin = random.randrange(0, spec.intermediate + 1, SHARED_STEP)
            shared = SharedExpert(job["expert_ids"][-1, 0].item(), begin)
            block = gpu.publish(**job, layer=layer, shared=shared)
            check(gpu, job, 1e-5 if spec.format is FP32 else 1e-2, layer, shared)
            bias = spec.hidden * 4 if spec.bias else 0
            part = (spec.expert_bytes - bias) * (spec.intermediate - begin) // spec.intermediate
            assert block.experts == job["expert_ids"].unique().numel()
            assert block.bytes == (block.experts - 1) * spec.expert_bytes + part


def test_an_expert_that_no_row_is_routed_to_may_be_shared(make_gpu):
    gpu = make_gpu([SMALL])
    job = gpu.job(3) | {"expert_ids": torch.tensor([[0, 1, 2, 3]] * 3)}
    block = gpu.publish(**job, shared=SharedExpert(5, 64))
    check(gpu, job)
    assert block.bytes == 4 * SMALL.expert_bytes


@pytest.mark.parametrize("expert, begin", [(6, 0), (-2, 0), (0, 32), (0, 192), (0, 2**32 - 64)])
def test_impossible_shares_are_refused(make_gpu, expert, begin):
    gpu = make_gpu([SMALL])
    gpu.publish(**gpu.job(1), shared=SharedExpert(expert, begin))
    assert gpu.spin() == Status.SHAPE


def test_a_jobs_share_does_not_stay_in_its_block(stack):
    running = stack([SMALL])
    for block in (running.ring.block(1), running.ring.block(2)):
        block.shared_expert, block.shared_begin = 0, 128
    for _ in range(4):
        assert error(*running.step(8, torch.float32)) < 1e-5


def test_a_launch_wakes_a_worker_that_sleeps_after_its_naps(make_gpu):
    gpu = make_gpu([SMALL], nap_ns=100_000_000)
    running = gpu.stack
    for _ in range(3):
        time.sleep(0.4)
        assert running.ring.header.worker_asleep == 1
        running.worker.wake()
        job = gpu.job(2)
        started = time.monotonic()
        gpu.publish(**job)
        check(gpu, job)
        assert time.monotonic() - started < 0.3
        assert running.ring.header.worker_asleep == 0


def test_a_job_that_finds_a_sleeper_does_not_wait_for_its_alarm(stack):
    gpu = FakeGpu(stack([SMALL]))
    waits = []
    for _ in range(4):
        while not gpu.ring.header.worker_asleep:
            time.sleep(0.001)
        job = gpu.job(1)
        started = time.monotonic()
        gpu.publish(**job)
        check(gpu, job)
        waits.append(time.monotonic() - started)
    assert min(waits) < 0.5, "the alarm rings every second"


def test_a_job_left_behind_is_run_again(make_gpu):
    gpu = make_gpu([SMALL])
    running = gpu.stack
    os.kill(running.worker.pid, signal.SIGSTOP)
    job = gpu.job(4)
    gpu.publish(**job)
    os.kill(running.worker.pid, signal.SIGKILL)
    check(gpu, job)
    assert running.worker.restarts == 1


def test_a_job_that_wears_out_two_workers_is_given_up(make_gpu):
    gpu = make_gpu([LayerSpec(BF16, 64, 512, 512)], rows=4096)
    running = gpu.stack
    gpu.publish(**gpu.job(4096, dtype=torch.bfloat16))
    with running.every_worker_killed():
        assert gpu.spin() == LOST


def start_that_fails(folder) -> None:
    """No program at all."""


def start_that_hangs(folder) -> None:
    (folder / native.WORKER).write_text("#!/bin/sh\nexec sleep 1000\n")
    (folder / native.WORKER).chmod(0o755)


@pytest.mark.parametrize("prepare", [start_that_fails, start_that_hangs])
def test_without_a_worker_every_job_ends_and_the_next_worker_serves(make_gpu, monkeypatch, tmp_path, prepare):
    gpu = make_gpu([SMALL])
    running = gpu.stack
    prepare(tmp_path)
    with monkeypatch.context() as broken:
        broken.setenv("SGLANG_FT_BIN_DIR", str(tmp_path))
        os.kill(running.worker.pid, signal.SIGKILL)
        while running.worker.restarts == 0:
            time.sleep(0.01)
        started = time.monotonic()
        for _ in range(40):  # the layers of a forward pass, each rung when the one before has ended
            gpu.publish(**gpu.job(1))
            assert gpu.spin() == LOST
        assert time.monotonic() - started < 12
    while True:
        job = gpu.job(2)
        gpu.publish(**job)
        if gpu.spin() == Status.OK:
            break
        assert time.monotonic() - started < 20
    check(gpu, job)


def test_stop_ends_the_job_in_flight_and_every_wait_after_it(make_gpu):
    gpu = make_gpu([SMALL], stall_s=60.0)
    running = gpu.stack
    os.kill(running.worker.pid, signal.SIGSTOP)
    block = gpu.publish(**gpu.job(1))
    waiter = threading.Thread(target=gpu.spin)
    waiter.start()
    running.worker.stop()
    waiter.join(timeout=1)
    assert not waiter.is_alive()
    assert (block.done, block.status, running.ring.header.abort) == (1, LOST, 1)
    gpu.publish(**gpu.job(1))
    assert gpu.spin() is None
