"""The Triton kernels in the interpreter: each claim of `interpreted_claims.py` is a test here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_claims.py")
ROOT = SCRIPT.parents[2]
CLAIMS = re.findall(r"^def (claim_\w+)", SCRIPT.read_text(), re.MULTILINE)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    """Run all claims in one process of their own; triton is part of the development set-up."""
    assert importlib.util.find_spec("triton"), "triton is missing: install the development requirements"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, str | None] = json.loads(done.stdout)
    return out


@pytest.mark.parametrize("claim", CLAIMS)
def test_in_the_interpreter(claim: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[claim] is None, verdicts[claim]
