"""A graph capture without a GPU: what a run does is written down operation by operation, and done again by replays.

As in a CUDA graph nothing of Python runs again: every operation has the very tensors and numbers that it was captured
with, and results go to where they were. So whatever of a step doesn't come through the inputs of its graph is as old
as the capture, and the answer shows it. Kernels of ours run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from twinpool.engine.runner.graphs.step_graphs import Run

_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down torch's operations, but for those inside a kernel."""

    def __init__(self, done: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._done = done
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.inside:
            name = func.overloadpacket.__name__
            assert name not in _WAITS, f"{name} makes the host wait, and can't be captured"
            self._done.append(lambda: _again(func, args, kwargs or {}, out))
        return out


def _again(func: Any, args: Any, kwargs: Any, before: Any) -> None:
    given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
    after = func(*args, **kwargs)
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
            old.copy_(new)


@contextmanager
def _kernels(mode: _Written, done: list[Callable[[], None]]) -> Iterator[None]:
    launch = GridExecutor.__call__

    def written(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        done.append(lambda: launch(self, *args, **kwargs))
        mode.inside = True
        try:
            launch(self, *args, **kwargs)
        finally:
            mode.inside = False

    GridExecutor.__call__ = written
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


class RecordedRun:
    """Implements `CapturedRun`."""

    def __init__(self, run: Run) -> None:
        self._done: list[Callable[[], None]] = []
        mode = _Written(self._done)
        with _kernels(mode, self._done), mode:
            self.output = run()

    def __len__(self) -> int:
        return len(self._done)

    def replay(self) -> None:
        for one in self._done:
            one()


def capture(run: Run) -> RecordedRun:
    """Implements `Capture`."""
    return RecordedRun(run)
