"""Sizes as users write them: 8GiB, 64k."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
PATTERN = r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)([iI]?[bB]?)"


def parse_size(text: str) -> int:
    """'8GiB', '8G', '32k', '64000' -> bytes or tokens; binary units. Raises ValueError."""
    match = re.fullmatch(PATTERN, text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size like 8GiB or 64k")
    return int(float(match[1]) * _UNITS[match[2].lower()])
