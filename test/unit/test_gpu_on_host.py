"""The tests of the expert cache on a GPU, on a device that is the host: everything but the CUDA kernels themselves."""

from __future__ import annotations

import gpu_stack
import kernels_once
import pytest
import test_cache as cache_cases
import test_prefill as prefill_cases
from host_device import install

from sglang_ft import kernels


@pytest.fixture(autouse=True)
def host_device(monkeypatch):
    try:
        kernels.host_library()
    except kernels.KernelError as e:
        pytest.skip(str(e))
    return install(monkeypatch, gpu_stack, cache_cases, prefill_cases, kernels_once)


stack = cache_cases.stack


@pytest.mark.parametrize("split", cache_cases.SPLITS)
def test_sums_are_the_reference_s(stack, split):
    cache_cases.test_sums_are_the_reference_s(stack, split, 40)


@pytest.mark.parametrize("shape", cache_cases.SHAPES)
def test_kinds_of_experts(stack, shape):
    cache_cases.test_kinds_of_experts(stack, shape)


def test_layers_that_are_not_pinned_run_in_the_worker(stack):
    cache_cases.test_layers_that_are_not_pinned_run_in_the_worker(stack)


def test_padding_and_foreign_experts_are_left_out(stack):
    cache_cases.test_padding_and_foreign_experts_are_left_out(stack)


def test_resident_experts(stack):
    cache_cases.test_resident_experts(stack)


def test_routes_of_a_trace(stack):
    cache_cases.test_routes_of_a_trace(stack)


def test_recorded_routes_are_those_that_ran(stack):
    cache_cases.test_recorded_routes_are_those_that_ran(stack)


@pytest.fixture
def prompt_stack():
    yield from prefill_cases.stack.__wrapped__()


@pytest.mark.parametrize("slots, group", [(64, 32), (150, 32), (60, 7)])
def test_every_group_is_what_the_pool_holds(prompt_stack, slots, group):
    prefill_cases.test_every_group_is_what_the_pool_holds(prompt_stack, slots, group, {})


@pytest.mark.parametrize("live", [0, 33, 79])
def test_a_smaller_cache_keeps_what_it_says_and_grows_again(prompt_stack, live):
    prefill_cases.test_a_smaller_cache_keeps_what_it_says_and_grows_again(prompt_stack, live)


def test_steps_of_prompts(prompt_stack):
    prefill_cases.test_steps_of_prompts(prompt_stack, 40, prefill_cases.HALF)


def test_a_prompt_leaves_the_cache_of_decode_steps_alone(prompt_stack):
    prefill_cases.test_a_prompt_leaves_the_cache_of_decode_steps_alone(prompt_stack)


def test_every_kernel_once():
    kernels_once.main()
