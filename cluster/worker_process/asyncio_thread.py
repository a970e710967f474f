"""An asyncio loop on a thread of its own, for gRPC in processes whose other threads must not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from twinpool.cluster.processes.priority import set_niceness

T = TypeVar("T")


class AsyncioThread:
    """Runs coroutines on one event loop in one daemon thread."""

    def __init__(
        self,
        name: str,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        niceness: int | None = None,
    ) -> None:
        """`niceness` of the thread, where that is allowed; None: its starter's."""
        self._niceness = niceness
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._niceness is not None:
            set_niceness(self._niceness)
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop, without waiting for it. Any thread. Raises `RuntimeError` where the loop has
        ended."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()  # Nobody else will, and Python would warn of it.
            raise

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait up to `timeout_s` for its result; raises `TimeoutError`, and what the
        coroutine raises. Any thread but the loop's."""
        return self.start(coroutine).result(timeout_s)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Cancel all running coroutines, then end the loop and its thread. Idempotent."""
        if self.loop.is_closed() or not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            self.run(_cancel_all(), timeout_s)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    me = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not me]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
