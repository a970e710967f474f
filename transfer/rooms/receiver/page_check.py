"""The check of one write's pages at the receiver, while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.device.device_port import DONE, Completion
from transfer.rooms.room_messages import PagesWritten


@dataclass(eq=False)
class PageCheck:
    """A check of the pages that `wrote` tells of."""

    wrote: PagesWritten
    completion: Completion = DONE
    mismatches: dict[str, list[int]] = field(default_factory=dict)
    """By pool, the numbers of pages with another digest than they were sealed with, once it is done."""

    @property
    def done(self) -> bool:
        return self.completion.done
