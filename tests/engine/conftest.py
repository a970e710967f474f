"""Checkpoints and oracles are made once a session, by their options."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.harness import MakeCheckpoint, MakeOracle
from tests.support.checkpoints import Oracle, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`make_checkpoint` without the folder; the same options give the same folder, so don't change it."""
    base = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(kind: str = "llama", **options: object) -> Path:
        name = "-".join([kind, *(f"{key}={value}" for key, value in sorted(options.items()))])
        return make_checkpoint(base / name, kind, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def oracle_of() -> MakeOracle:
    """The oracle of a folder."""
    return cache(Oracle)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run on one thread unless they set another number; `load_engine` may set one too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
