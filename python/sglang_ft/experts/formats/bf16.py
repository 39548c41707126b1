"""BF16 experts: plain torch.bfloat16 weights."""

from __future__ import annotations

import torch

from sglang_ft.experts.formats.base import DenseFormat
from sglang_ft.worker.protocol import Format


class BF16(DenseFormat):
    name = "bf16"
    wire = Format.BF16
    dtype = torch.bfloat16
