"""Everything here needs an NVIDIA GPU and the built kernels; elsewhere it is skipped, with the reason."""

import pytest
import torch

from sglang_ft import kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = None
    if not torch.cuda.is_available():
        why = "no NVIDIA GPU"
    elif not kernels.is_built():
        why = "the kernels are not built: pip install ./sgl-ft-kernel"
    if why:
        for item in items:
            item.add_marker(pytest.mark.skip(why))
