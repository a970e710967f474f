"""The Triton kernels compile for NVIDIA GPUs; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compiled_claims.py")
ROOT = SCRIPT.parents[2]

pytestmark = pytest.mark.slow


def compiled(script: Path, cache: Path) -> dict[str, list[str]]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, list[str]] = json.loads(done.stdout)
    return out


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return compiled(SCRIPT, tmp_path_factory.mktemp("triton"))


def test_every_kernel_compiles_for_both_dtypes(findings: dict[str, list[str]]) -> None:
    assert len(findings) == 10 + 6


def test_float32_is_never_multiplied_as_tf32(findings: dict[str, list[str]]) -> None:
    for kind in ("", "windowed "):
        assert findings[f"{kind}extend fp32"] == findings[f"{kind}decode_split fp32"] == ["fma.rn.f32"]


def test_extend_and_decode_multiply_tiles_with_one_kind_of_instruction(findings: dict[str, list[str]]) -> None:
    for kind in ("", "windowed "):
        assert "wgmma" in findings[f"{kind}extend bf16"]
        assert "wgmma" in findings[f"{kind}decode_split bf16"]


@pytest.mark.soak
def test_kernels_by_row_and_of_experts_compile_with_the_instructions_they_should_have(tmp_path: Path) -> None:
    found = compiled(SCRIPT.with_name("compiled_rows.py"), tmp_path)
    assert len(found) == 5
    assert "wgmma" in found["product bf16"]
    assert found["product fp32"] == ["fma.rn.f32"], "float32 is never multiplied as TF32"
    assert "fma.rn.f64" in found["draw"]
