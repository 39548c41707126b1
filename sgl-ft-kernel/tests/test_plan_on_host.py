"""The plan's logic, compiled for the host, against its readable reference."""

from __future__ import annotations

from ctypes import byref

import plan_cases
import pytest

from sglang_ft import kernels
from sglang_ft.kernels import abi


def plan(cache: abi.Cache, layer: abi.Layer, step: abi.Step) -> None:
    assert kernels.host_library().ft_plan_on_host(byref(cache), byref(layer), byref(step)) == 0


@pytest.mark.parametrize("case", plan_cases.CASES, ids=str)
def test_every_step_is_the_reference_s(case: plan_cases.Case) -> None:
    reference = plan_cases.run(case, seed=plan_cases.random.randrange(2**32), device="cpu", plan=plan)
    counters = reference.counters
    assert counters.hits + counters.misses > 0
    if case.slots == 0:
        assert counters.job_experts == counters.misses
