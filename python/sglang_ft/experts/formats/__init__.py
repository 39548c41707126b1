"""Weight formats of routed experts, one file each. A new format is a new file and one line here."""

from __future__ import annotations

from sglang_ft.experts.formats.base import ExpertFormat, LayerSpec, RoleSpec
from sglang_ft.experts.formats.bf16 import BF16
from sglang_ft.experts.formats.fp16 import FP16
from sglang_ft.experts.formats.fp32 import FP32

FORMATS: tuple[ExpertFormat, ...] = (BF16(), FP16(), FP32())


def find_format(quantization: str | None, dtype: str) -> ExpertFormat | None:
    """The format of experts with this quantization method (None: plain weights) and torch dtype name."""
    for fmt in FORMATS:
        if fmt.matches(quantization, dtype):
            return fmt
    return None


__all__ = ["FORMATS", "ExpertFormat", "LayerSpec", "RoleSpec", "find_format"]
