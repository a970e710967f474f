"""The check of one write's pages at the receiver, while it is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.cache.device.device_port import DONE, Completion
from twinpool.transfer.rooms.room_messages import PagesWritten


@dataclass(eq=False)
class PageCheck:
    """A check of the pages that `wrote` tells of."""

    wrote: PagesWritten
    completion: Completion = DONE
    digests: dict[str, Callable[[], list[int]]] = field(default_factory=dict)
    """By pool, what returns the digests of the pages that arrived; at once when the check is done."""

    @property
    def done(self) -> bool:
        return self.completion.done
