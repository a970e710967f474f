"""What faults see of a run, and how they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

UndoFault = Callable[[], None]


class FaultTarget(Protocol):
    """The parts of a running scenario that faults act on."""

    agenda: Any
    counts: Counter[str]
    network: Any
    control: Any
    routers: Any
    store: Any
    world: Any
    plan: Any

    @property
    def router(self) -> Any:
        """One that lives, where there is one."""

    def say(self, who: str, what: str) -> None: ...
    def restart_router(self, index: int) -> None: ...
    def lost_router(self, router: Any) -> None: ...


def nothing() -> None:
    """The end of a fault that leaves nothing to undo."""
