"""Completions of copies on a GPU, by a stand-in of its events: which GPU is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cache.device.device_copies import CudaEvent


def test_an_event_is_asked_on_its_own_gpu_whichever_one_the_thread_began_on(monkeypatch: pytest.MonkeyPatch) -> None:
    current, asked = [0], list[tuple[str, int]]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    class Event:
        def query(self) -> bool:
            asked.append(("query", current[-1]))
            return False

        def synchronize(self) -> None:
            asked.append(("synchronize", current[-1]))

    monkeypatch.setattr(torch.cuda, "device", on)
    event = CudaEvent(Event(), torch.device("cuda", 1))  # type: ignore[arg-type]
    assert not event.done
    event.wait()
    assert asked == [("query", 1), ("synchronize", 1)]
    assert current == [0]
