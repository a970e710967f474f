"""A router's reports to a controller that may be away: one is under way at a time, and nobody's answer is said once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from twinpool.router.state.router_log import log


class ReportCalls:
    """The calls of one kind of report, on an event loop."""

    def __init__(self, away: str) -> None:
        """`away`: what the log says when a report isn't taken."""
        self._words, self._away = away, False
        self._call: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return self._call is not None

    def begin(self, report: Callable[[], Awaitable[None]]) -> None:
        """Make a call by `report`, which raises `ConnectionError` where the controller doesn't answer. None may be
        under way."""
        self._call = asyncio.get_running_loop().create_task(self._make(report))
        self._call.add_done_callback(self._done)

    def close(self) -> None:
        """Give up the call that is under way."""
        if self._call is not None:
            self._call.cancel()

    async def _make(self, report: Callable[[], Awaitable[None]]) -> None:
        try:
            await report()
        except ConnectionError as error:
            if not self._away:
                log(self._words, reason=str(error))
            self._away = True
        else:
            self._away = False

    def _done(self, call: asyncio.Task[None]) -> None:
        self._call = None
