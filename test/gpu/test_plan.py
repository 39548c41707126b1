"""The plan kernel against experts/step.py: the cases that ctest runs on the host, and the replay of a long trace."""

from ctypes import byref

import plan_cases
import pytest
import torch

from sglang_ft import kernels
from sglang_ft.kernels import abi, check


def plan(cache: abi.Cache, layer: abi.Layer, step: abi.Step) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    check(kernels.library().ft_plan(byref(cache), byref(layer), byref(step), stream), "ft_plan")
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", plan_cases.CASES, ids=str)
def test_every_step_is_the_reference_s(case: plan_cases.Case) -> None:
    plan_cases.run(case, seed=torch.seed() % 2**32, device="cuda", plan=plan)
