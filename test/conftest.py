"""Fixtures that several tests use."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random checkpoint of a family (see tiny_models), written once a run."""
    import tiny_models

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tiny_models.write(family, tmp_path_factory.mktemp("checkpoint") / family)
        return folders[family]

    return folder
