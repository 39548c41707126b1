"""Heat list: the experts that lay in a server's slots, most recently used first, to fill the slots of its next start.

A file of a few kilobytes a model, in the user's cache folder, brought up to date while the server runs, so that a
killed one leaves it too. It decides how fast the first answers come and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_FORMAT = "sglang_ft heat list"
_VERSION = 1
_WORD = 1 << 32  # stamps count steps modulo this


def order_of(expert_of: torch.Tensor, used: torch.Tensor, step: int) -> list[int]:
    """Experts in slots, the one used last first. expert_of, used int32 [slots] of CacheState; `step`: the last."""
    slots = (expert_of >= 0).nonzero().flatten()
    ages = (step - used[slots].long()) % _WORD
    order: list[int] = expert_of[slots][ages.argsort(stable=True)].tolist()
    return order


def stamps_for(count: int) -> torch.Tensor:
    """int32 [count]: stamps of experts in that order, as of before the first step."""
    return -torch.arange(1, count + 1, dtype=torch.int32)


class HeatList:
    """The file of one model."""

    def __init__(self, model: str, experts: int) -> None:
        """`model` names the weights, whatever folder they are in; `experts` of all layers."""
        self._model, self._experts = model, experts
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(cache) / "sglang-ft" / "heat" / f"{model[:32]}.json"

    def load(self) -> list[int]:
        """Experts, hottest first. Empty when there is no list, and, with a warning, when it cannot be used."""
        try:
            content = json.loads(self.path.read_text())
            why = self._what_is_wrong(content)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            why = f"damaged: {e!r}"
        if why:
            logger.warning("%s is not used, the cache starts empty: %s", self.path, why)
            return []
        experts: list[int] = content["experts"]
        return experts

    def _what_is_wrong(self, content: dict[str, Any]) -> str:
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            return f"version {content.get('version')} of {content.get('format')!r}"
        if content["checksum"] != _checksum(content):
            return "damaged: the checksum is another"
        if content["model"] != self._model or content["experts_of_model"] != self._experts:
            return "made for another model"
        experts = content["experts"]
        if len(set(experts)) != len(experts) or not all(0 <= e < self._experts for e in experts):
            return "damaged: not a list of experts"
        return ""

    def save(self, experts: list[int]) -> None:
        """Replaces the list; whole or not at all. A folder that cannot be written is worth a warning only."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self._model,
            "experts_of_model": self._experts,
            "experts": experts,
        }
        content["checksum"] = _checksum(content)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(content, file)
            os.replace(file.name, self.path)
        except OSError as e:
            logger.warning("The heat list cannot be written to %s: %s", self.path, e)


def _checksum(content: dict[str, Any]) -> str:
    rest = {k: v for k, v in content.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]
