"""On the path of a test's server: pinned memory is plain memory.

The strategy that SGLang uses on a GPU (--mamba-radix-cache-strategy extra_buffer) pins small tensors in every decode
step, which needs a driver. With this its whole logic runs on the CPU platform.
"""

import torch

_make = torch.tensor


def _tensor(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
    del pin_memory
    return _make(*args, **kwargs)


torch.tensor = _tensor
torch.Tensor.pin_memory = lambda self, *args: self
