"""Products with weights in blocks on a GPU in the interpreter: each claim of `interpreted_blocks.py` is a test."""

from __future__ import annotations

import pytest

from tests.kernels.claims import names
from tests.kernels.forked_scripts import Said

SCRIPT = "interpreted_blocks.py"

pytestmark = [pytest.mark.slow, pytest.mark.runs(SCRIPT)]


@pytest.mark.parametrize("claim", names(SCRIPT))
def test_in_the_interpreter(claim: str, said: Said) -> None:
    assert said[claim] is None, said[claim]
