"""The kernels of recurrences: in the interpreter, each claim of `interpreted_recurrence.py`; and that they compile."""

from __future__ import annotations

import pytest

from tests.kernels.claims import Said, names

SCRIPT = "interpreted_recurrence.py"

pytestmark = [pytest.mark.slow, pytest.mark.runs(SCRIPT)]


@pytest.mark.parametrize("claim", names(SCRIPT))
def test_in_the_interpreter(claim: str, said: Said) -> None:
    assert said[claim] is None, said[claim]


@pytest.mark.soak
@pytest.mark.runs("compiled_recurrence.py")
def test_every_kernel_compiles_and_float32_is_never_multiplied_as_tf32(said: Said) -> None:
    assert len(said) == 4 * 2
    assert not any(said.values())
