"""A step in parts: the rows of one launched step that belong to different schedulers, each part a step of its own."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.cache.device.device_port import Completion
from twinpool.engine.runner.batch import RowOutput, StepHandle


def split(step: StepHandle, counts: Sequence[int]) -> list[StepHandle]:
    """Return a handle for each run of `counts` rows of `step`, in order; together they are all of its rows."""
    shared, first, parts = _SharedOutputs(step), 0, list[StepHandle]()
    for count in counts:
        parts.append(_StepPart(step, shared, first, count))
        first += count
    return parts


class _SharedOutputs:
    """The outputs of a step, fetched once for all its parts."""

    def __init__(self, step: StepHandle) -> None:
        self._step = step
        self._outputs: list[RowOutput] | None = None

    def get(self) -> list[RowOutput]:
        if self._outputs is None:
            self._outputs = self._step.outputs()
        return self._outputs


class _StepPart:
    """Implements `engine.runner.batch.StepHandle` for `count` rows from row `first` on."""

    def __init__(self, step: StepHandle, shared: _SharedOutputs, first: int, count: int) -> None:
        self._step, self._shared = step, shared
        self._rows = slice(first, first + count)

    @property
    def completion(self) -> Completion:
        return self._step.completion

    @property
    def done(self) -> bool:
        return self._step.done

    def outputs(self) -> list[RowOutput]:
        return self._shared.get()[self._rows]
