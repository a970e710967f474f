"""The latent kernels compile for NVIDIA GPUs at the shapes of the published models; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.claims import ROOT

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a program may have on a GPU of compute capability 9.0."""

pytestmark = [pytest.mark.slow, pytest.mark.soak]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compiled_latent.py"))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def test_every_kernel_compiles_and_fits_into_shared_memory(found: dict[str, Any]) -> None:
    assert len(found) == 8
    assert all(kernel["shared"] <= SHARED_LIMIT for kernel in found.values()), found


def test_float32_is_never_multiplied_as_tf32_and_nothing_is_added_in_racing_order(found: dict[str, Any]) -> None:
    for kernel in found.values():
        assert "tf32" not in kernel["words"]
        assert "atom." not in kernel["words"]


def test_extend_and_decode_multiply_tiles_with_one_kind_of_instruction(found: dict[str, Any]) -> None:
    assert "wgmma" in found["latent_extend bf16"]["words"]
    assert "wgmma" in found["latent_split bf16"]["words"]
