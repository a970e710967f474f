"""The wake of a cluster that sleeps for want of requests, by the request that comes.

The controller puts the cluster to sleep (`cluster.sleep_after_s`) and wakes it when a router asks. Here requests wait
meanwhile: `router.wake_queue` at most, each for `router.wake_timeout_s`; what is beyond gets 503 at once, with a time
to come back. A cluster that an operator has put to sleep isn't woken so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.json_logs import log
from twinpool.contracts.messages.pool_changes import SleepCluster
from twinpool.router.core.router_core import RouterCore
from twinpool.router.links.controller_port import WorkerDirectory
from twinpool.router.openai.api_errors import Asleep, ClientGone, ReaderFailed

RETRY_S = 1.0
"""Seconds until a controller is asked again that didn't answer."""
OnGone = Callable[[Callable[[], object]], None]


class DemandWake:
    """The wakes of one router's cluster; on its event loop. `observe` is called at each change of the workers."""

    def __init__(self, core: RouterCore, directory: WorkerDirectory, config: RouterConfig, clock: Clock) -> None:
        self._core, self._directory, self._config, self._clock = core, directory, config, clock
        self._waiters: dict[asyncio.Future[None], None] = {}
        """In the order in which they came, in which they go on."""
        self._call: asyncio.Task[None] | None = None
        self._slept = False
        """Whether the cluster sleeps for want of requests, or was woken from that and doesn't serve yet."""
        self._began: float | None = None
        """When the wake began that is under way, in seconds of the clock."""
        self.wakes = 0
        self.latest_s = 0.0
        """Seconds from the request that began the latest wake until workers of all roles served."""

    @property
    def needed(self) -> bool:
        """Whether requests have to wait, or can't be taken: the cluster sleeps, or wakes."""
        return self._slept or bool(self._core.workers.served.asleep)

    @property
    def by_demand(self) -> bool:
        """Whether a request wakes the cluster that sleeps, or has."""
        served = self._core.workers.served
        return served.by_demand if served.asleep else self._slept

    @property
    def waiting(self) -> int:
        """Requests that wait for a wake."""
        return len(self._waiters)

    def check_room(self) -> None:
        """Raise `Asleep` where a request can't wait for the cluster to wake. Books nothing."""
        if not self.by_demand:
            raise Asleep
        if self.waiting >= self._config.wake_queue:
            raise Asleep(
                f"the cluster wakes, and {self.waiting} requests wait for that, as many as may; try again later"
            )

    async def awake(self, on_gone: OnGone | None = None) -> None:
        """Wake the cluster, and wait until it serves. `on_gone`: has a function called when the client leaves. Raises
        `Asleep` where it can't wait, or has for `router.wake_timeout_s`, `ClientGone`, and `ReaderFailed` at the
        router's end."""
        if not self.needed:
            return
        self.check_room()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        if on_gone is not None:
            on_gone(lambda: _fail(waiter, ClientGone("the client left while the cluster woke")))
        self._begin()
        try:
            async with asyncio.timeout(self._config.wake_timeout_s):
                await waiter
        except TimeoutError:
            raise Asleep(
                f"the cluster was woken and doesn't serve after {self._config.wake_timeout_s:g} s "
                "(router.wake_timeout_s); try again later"
            ) from None
        finally:
            self._waiters.pop(waiter, None)

    def observe(self) -> None:
        """Note what the cluster does now: let requests go on where it serves, and wake it where some were let in before
        it fell asleep."""
        workers = self._core.workers
        served = workers.served
        if served.asleep:
            self._slept = served.by_demand
            if not served.by_demand:
                self._end(Asleep())
            elif self._core.requests.waiting:
                self._begin()
        elif self._slept and all(self._core.serving(role) for role in workers.needed):
            self._slept = False
            if self._began is not None:
                self.wakes, self.latest_s = self.wakes + 1, self._clock.now() - self._began
                log("woken by a request", seconds=round(self.latest_s, 3))
            self._end(None)

    def close(self, reason: str) -> None:
        """Let nobody wait any more. Idempotent."""
        self._end(ReaderFailed(reason))

    def families(self) -> Iterator[Metric]:
        """The metrics of wakes."""
        yield GaugeMetricFamily("twinpool_wake_waiting", "Requests that wait for a wake", value=self.waiting)
        yield CounterMetricFamily("twinpool_wakes", "Wakes by a request", value=self.wakes)
        yield GaugeMetricFamily("twinpool_wake_seconds", "That the latest of them took", value=self.latest_s)

    def _begin(self) -> None:
        if self._call is None and self._core.workers.served.asleep:
            self._began = self._clock.now()
            self._call = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        """Ask the controller, again and again, until the cluster is told to be awake, or nobody needs it."""
        try:
            while self._core.workers.served.asleep and (self._waiters or self._core.requests.waiting):
                try:
                    await self._directory.change_pools(SleepCluster(0, demand=True))
                except (RequestError, ConnectionError, OSError) as error:
                    log("the cluster can't be woken yet", reason=str(error))
                await asyncio.sleep(RETRY_S)
        finally:
            self._call = None
            if self._core.workers.served.asleep:  # It was given up: the next request begins another one.
                self._began = None

    def _end(self, failure: Exception | None) -> None:
        """Let all who wait go on, or fail."""
        self._began = None
        if self._call is not None and failure is not None:
            self._call.cancel()
        for waiter in self._waiters:
            if failure is not None:
                _fail(waiter, failure)
            elif not waiter.done():
                waiter.set_result(None)


def _fail(waiter: asyncio.Future[None], failure: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(failure)
