"""The kernels that copy pages, in the interpreter: each claim of `interpreted_moves.py` is a test here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels.claims import names
from tests.kernels.forked_scripts import ROOT, Said

SCRIPT = "interpreted_moves.py"

pytestmark = [pytest.mark.slow, pytest.mark.runs(SCRIPT)]


@pytest.mark.parametrize("claim", names(SCRIPT))
def test_in_the_interpreter(claim: str, said: Said) -> None:
    assert said[claim] is None, said[claim]


def test_the_cache_is_imported_without_triton() -> None:
    modules = (
        "twinpool.cache.memory.page_moves",
        "twinpool.cache.swap.offload",
        "twinpool.cache.memory.page_digest",
        "twinpool.cache.pool.pool_set",
    )
    code = f"import sys; sys.modules['triton'] = None; import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=100)


@pytest.mark.runs("compiled_moves.py")
def test_compiled_for_a_gpu_it_loads_sixteen_bytes_at_once(said: Said) -> None:
    assert said["i64 even"] == said["i32 even"] == said["i16 even"] == 128
    assert said["i64 odd"] == 64, "where strides don't allow more, words go one by one"
