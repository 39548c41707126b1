"""FP32 experts: plain torch.float32 weights."""

from __future__ import annotations

import torch

from sglang_ft.experts.formats.base import DenseFormat
from sglang_ft.worker.protocol import Format


class FP32(DenseFormat):
    name = "fp32"
    wire = Format.FP32
    dtype = torch.float32
