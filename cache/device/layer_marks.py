"""Layer marks: how far an operation under way has come, so that others can use the layers that it is through with.

An operation of many layers, such as a step of the engine, is given the marks of some groups of layers when it is
submitted, and says after each layer how many layers of every pool it has written. What it wrote of a group's layers may
be read by operations that come after the group's mark: pages leave for a peer while later layers are computed. A mark
says nothing about whether the operation will succeed; that is what its completion says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from twinpool.cache.device.device_port import Completion

LayerCounts = Mapping[str, int]
"""By pool, how many of its layers are written: layers 0 to count-1."""


def layer_groups(layers: LayerCounts, count: int) -> list[LayerCounts]:
    """Divide the layers of all pools into `count` groups of about equal sizes: for each group the layers that are
    written once it is. The last has all layers."""
    return [{pool: -(-most * number // count) for pool, most in layers.items()} for number in range(1, count + 1)]


class LayerMarks:
    """The marks of one operation, for devices whose operations run in threads of the host.

    The operation calls `passed`; its device calls `end` once it is over. Every mark is reached or failed then.
    """

    def __init__(self, groups: Sequence[LayerCounts]) -> None:
        """`groups`: the layers that are written with each group, which grow from group to group."""
        assert groups, "an operation without groups has no marks"
        self.groups = tuple(groups)
        self.step = 0
        """The number of the operation among those with marks, at the leader of several ranks; 0: there are none."""
        self._changed = threading.Condition()
        self._reached = 0
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, group: int) -> Completion:
        """The mark of a group, as a completion: others come after it."""
        return LayerMark(self, group)

    def __iter__(self) -> Iterator[Completion]:
        return (self[group] for group in range(len(self)))

    def passed(self, written: LayerCounts) -> None:
        """Reach the marks of all groups of whose layers `written` has all. To be called from within the operation."""
        reached = self._through(self._reached, written)
        if reached > self._reached:
            with self._changed:
                self._reached = reached
                self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """The operation is over: all marks are reached or, where it failed, those that weren't reached fail."""
        with self._changed:
            if error is None:
                self._reached = len(self.groups)
            self._error = error
            self._changed.notify_all()

    def reached(self, group: int) -> bool:
        return group < self._reached

    def settled(self, group: int) -> bool:
        """Whether a mark is reached, or never will be."""
        return self.reached(group) or self._error is not None

    def wait(self, group: int) -> None:
        """Return once a mark is reached. Raises the operation's error where it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self.settled(group))
        self._raise_unless_reached(group)

    def _through(self, count: int, written: LayerCounts) -> int:
        """How many groups, of which `count` are written already, have all their layers in `written`."""
        while count < len(self.groups) and all(written[pool] >= most for pool, most in self.groups[count].items()):
            count += 1
        return count

    def _raise_unless_reached(self, group: int) -> None:
        if not self.reached(group) and self._error is not None:
            raise self._error


class LayerMark:
    """One mark of an operation under way, as a `Completion`."""

    def __init__(self, marks: LayerMarks, group: int) -> None:
        self.marks, self.group = marks, group

    @property
    def done(self) -> bool:
        return self.marks.settled(self.group)

    def wait(self) -> None:
        self.marks.wait(self.group)

    def order(self) -> None:
        self.wait()
