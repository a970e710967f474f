"""A whole model on the kernels in the interpreter: each claim of `interpreted_model.py` is a test here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.claims import Verdicts, interpret, names

SCRIPT = Path(__file__).with_name("interpreted_model.py")

pytestmark = [pytest.mark.slow, pytest.mark.soak]


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    return interpret(SCRIPT)


@pytest.mark.parametrize("claim", names(SCRIPT))
def test_in_the_interpreter(claim: str, verdicts: Verdicts) -> None:
    assert verdicts[claim] is None, verdicts[claim]
