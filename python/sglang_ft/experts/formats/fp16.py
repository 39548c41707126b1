"""FP16 experts: plain torch.float16 weights."""

from __future__ import annotations

import torch

from sglang_ft.experts.formats.base import DenseFormat
from sglang_ft.worker.protocol import Format


class FP16(DenseFormat):
    name = "fp16"
    wire = Format.FP16
    dtype = torch.float16
