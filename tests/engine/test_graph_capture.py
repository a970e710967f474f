"""What a capture of a CUDA graph keeps away: objects of earlier graphs that garbage collection would destroy."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from twinpool.engine.runner.graphs.step_graphs import CudaCapture


class Held:
    """An object in a cycle of references, as a worker that has ended and its graphs may be."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> CudaCapture:
    """A capture over stand-ins of torch's own parts."""

    @contextlib.contextmanager
    def nothing(*given: Any, **options: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "graph", nothing)
    return CudaCapture(torch.device("cuda:0"))


def churn() -> torch.Tensor:
    """Allocate what makes the collector run many times, were it on."""
    kept = [[n] for n in range(100_000)]
    return torch.tensor(len(kept))


def test_nothing_is_collected_while_a_graph_is_captured(capture: CudaCapture) -> None:
    gc.collect()
    gone = weakref.ref(Held())
    assert gone() is not None, "held by its cycle"

    def run() -> torch.Tensor:
        made = churn()
        assert gone() is not None, "it would be destroyed while a graph is captured"
        return made

    capture(run)
    assert gc.isenabled()
    gc.collect()
    assert gone() is None


def test_collection_goes_on_after_a_capture_that_fails_and_stays_off_where_it_was(capture: CudaCapture) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("capture failed")

    with pytest.raises(RuntimeError):
        capture(fails)
    assert gc.isenabled()
    gc.disable()
    try:
        capture(churn)
        assert not gc.isenabled()
    finally:
        gc.enable()
