"""Head slices: where they are copied. What is copied is in the tests of ranks and of the kernels that copy pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cache.memory import head_slices


@pytest.mark.parametrize(("source", "target"), [(False, False), (True, False), (False, True), (True, True)])
def test_heads_are_copied_by_a_gpu_where_either_end_lies_on_one(source: bool, target: bool) -> None:
    ends = (SimpleNamespace(is_cuda=lies_there) for lies_there in (source, target))
    assert head_slices._on_gpu(*ends) == (source or target)  # type: ignore[arg-type]
