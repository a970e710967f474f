"""The controller's gRPC server, with an event loop and thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc
import uvloop

from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_service import ControllerService
from twinpool.cluster.controller.lease_streams import LeaseStreams
from twinpool.cluster.worker_process.asyncio_thread import AsyncioThread
from twinpool.cluster.worker_process.grpc_service import ServiceServer
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.wire.controller_turns import NOT_LEADING
from twinpool.contracts.wire.grpc_calls import Admission, Admit, CallRefused

T = TypeVar("T")
CALL_TIMEOUT_S = 10.0


def admit_while(leads: Callable[[], bool]) -> Admit:
    """Refuse all calls as UNAVAILABLE while this controller doesn't lead: callers then try the next one."""

    def admit(call: Admission) -> None:
        if not leads():
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, NOT_LEADING)

    return admit


class ControllerServer:
    """The gRPC server of a controller, with its event loop and thread; `endpoint` is its ``host:port``."""

    def __init__(
        self,
        core: Controller,
        address: str = "127.0.0.1",
        secret: str = "",
        certificate: CertificateFiles | None = None,
        port: int = 0,
        autoscaler: Autoscaler | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """Serve on `port` of `address`, 0 for a free one; with a `secret`, calls must carry its token, and with this
        node's `certificate` come from nodes of the cluster. While it doesn't lead (`leads`) nobody is answered, and
        nothing is decided. Raises `OSError`."""
        self._core = core
        self._loop = AsyncioThread("controller", uvloop.new_event_loop)
        self._service = ControllerService(core, autoscaler, leads)
        self._server = ServiceServer(
            self._loop, f"{address}:{port}", secret, certificate=certificate, admit=[admit_while(leads)]
        )
        self._streams = LeaseStreams(self._service.renewal, secret, certificate)
        try:
            streams = self._loop.run(self._streams.start(address), CALL_TIMEOUT_S)
            self._service.stream = f"{address}:{streams}"
            port = self._server.start(self._service.handlers())
        except BaseException:
            self._loop.stop()
            raise
        self.endpoint = f"{address}:{port}"

    def call(self, run: Callable[[Controller], T]) -> T:
        """Run `run(core)` on the controller's loop and return its result. Any thread but the loop's.

        Raises what `run` raises, and `TimeoutError` after `CALL_TIMEOUT_S`.
        """

        async def on_loop() -> T:
            return run(self._core)

        return self._loop.run(on_loop(), CALL_TIMEOUT_S)

    def tick(self) -> str:
        """Let the controller take the time and its supervisor have its orders; returns why the controller must end,
        which is that its ledger has failed, else nothing. Any thread but the loop's."""

        async def on_loop() -> str:
            self._service.tick()
            return self._core.table.failed

        return self._loop.run(on_loop(), CALL_TIMEOUT_S)

    def tell(self, leader: str, term: int, standbys: tuple[str, ...]) -> None:
        """Have routers told who leads the controllers and who stands by. Any thread but the loop's."""

        async def on_loop() -> None:
            self._service.tell(leader, term, standbys)

        self._loop.run(on_loop(), CALL_TIMEOUT_S)

    def close(self) -> None:
        """End the server. Idempotent."""
        if self._loop.loop.is_closed():
            return
        self._server.stop(0.1)
        self._loop.run(self._streams.stop(), CALL_TIMEOUT_S)
        self._loop.stop()
