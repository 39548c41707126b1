"""Fixtures of several unit tests."""

from __future__ import annotations

import pytest
from worker_stack import Stack


@pytest.fixture
def stack():
    """A factory of stacks that are stopped at the end."""
    made = []

    def make(*args, **kwargs) -> Stack:
        made.append(Stack(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.worker.stop()
