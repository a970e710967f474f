"""The kernels of recurrences: in the interpreter, each claim of `interpreted_recurrence.py`; and that they compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.claims import ROOT, Verdicts, interpret, names

SCRIPT = Path(__file__).with_name("interpreted_recurrence.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return interpret(SCRIPT)


@pytest.mark.parametrize("claim", names(SCRIPT))
def test_in_the_interpreter(claim: str, verdicts: Verdicts) -> None:
    assert verdicts[claim] is None, verdicts[claim]


@pytest.mark.soak
def test_every_kernel_compiles_and_float32_is_never_multiplied_as_tf32(tmp_path: Path) -> None:
    script = SCRIPT.with_name("compiled_recurrence.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    findings: dict[str, bool] = json.loads(done.stdout)
    assert len(findings) == 4 * 2
    assert not any(findings.values())
