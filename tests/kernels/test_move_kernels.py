"""The kernels that copy pages, in the interpreter: each claim of `interpreted_moves.py` is a test here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.claims import ROOT, Verdicts, interpret, names

SCRIPT = Path(__file__).with_name("interpreted_moves.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return interpret(SCRIPT)


@pytest.mark.parametrize("claim", names(SCRIPT))
def test_in_the_interpreter(claim: str, verdicts: Verdicts) -> None:
    assert verdicts[claim] is None, verdicts[claim]


def test_the_cache_is_imported_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import cache.moves, cache.offload, cache.tags, cache.pools"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=100)


def test_compiled_for_a_gpu_it_loads_sixteen_bytes_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    script = SCRIPT.with_name("compiled_moves.py")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bits = json.loads(done.stdout)
    assert bits["i64 even"] == bits["i32 even"] == bits["i16 even"] == 128
    assert bits["i64 odd"] == 64, "where strides don't allow more, words go one by one"
