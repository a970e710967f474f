"""Completions of copies on a GPU, by a stand-in of its events: which GPU is asked, and what a
failed copy leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from twinpool.cache.device.device_copies import CudaEvent, device_copies


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


def test_a6_what_was_begun_of_a_copy_that_fails_is_over_before_anybody_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = list[str]()

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def synchronize(self) -> None:
            events.append("over")

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda of: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    copies = device_copies(torch.device("cuda", 0))

    def fails_in_the_middle() -> None:
        events.append("begun")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        copies.begin(fails_in_the_middle)
    assert events == ["begun", "over"]
