"""The worker's gRPC service, by which routers ask for its status and drain it; requests come by `router_streams`.

The service runs on its own event loop, beside the engine thread. Every call may carry `twinpool-incarnation` in its
metadata; a call for another incarnation of this worker is refused with both numbers, so that no client survives a
restart.

`AsyncioThread` is that loop, on a thread of its own: other threads of the process must not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
import grpc.aio

from twinpool.cluster.processes.priority import set_niceness
from twinpool.cluster.worker_process.worker_thread import WorkerClosed, WorkerThread
from twinpool.contracts.cluster_secret import admits
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.credentials.certificate_files import CertificateFiles
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.messages.calls import (
    CHECK_WORKER,
    DRAIN_WORKER,
    UNDRAIN_WORKER,
    WORKER_STATUS,
    Empty,
)
from twinpool.contracts.wire.grpc_calls import (
    Admit,
    CallHandlers,
    CallRefused,
    Handler,
    IncomingCall,
    add_port,
    handle_call,
    server_options,
)

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


log = logging.getLogger("twinpool.service")

INCARNATION_KEY = "twinpool-incarnation"
CALL_TIMEOUT_S = 30.0
LINK_TIMEOUT_S = TransferConfig().link_timeout_s


class WorkerService:
    """The calls of one worker, answered by its thread."""

    def __init__(self, host: WorkerThread, incarnation: int) -> None:
        self._host = host
        self._incarnation = incarnation

    def handlers(self) -> list[Handler]:
        def answered(submit: Callable[[], Future[T]]) -> Callable[[Empty], Awaitable[T]]:
            return lambda request: self._answer(submit)

        return [
            handle_call(WORKER_STATUS, answered(self._host.status)),
            handle_call(CHECK_WORKER, answered(self._host.check)),
            handle_call(DRAIN_WORKER, answered(self._host.drain)),
            handle_call(UNDRAIN_WORKER, answered(self._host.undrain)),
        ]

    def admit(self, call: IncomingCall) -> None:
        """Refuse calls that are for another incarnation of this worker."""
        meant = call.metadata.get(INCARNATION_KEY, str(self._incarnation))
        if meant != str(self._incarnation):
            text = f"this is incarnation {self._incarnation}, the call is for incarnation {meant}"
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, text)

    @staticmethod
    async def _answer(submit: Callable[[], Future[T]]) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(submit()), CALL_TIMEOUT_S)
        except WorkerClosed as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        except TimeoutError:
            text = f"the worker did not answer in {CALL_TIMEOUT_S} s"
            raise CallRefused(grpc.StatusCode.DEADLINE_EXCEEDED, text) from None
        except TwinpoolError as error:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None


def admit_by_token(secret: str) -> Admit:
    """Refuse calls without the cluster's token."""

    def admit(call: IncomingCall) -> None:
        if not admits(secret, call.metadata.items()):
            log.warning("a call without the cluster's token was refused", extra={"method": call.path})
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "this call lacks the cluster's token")

    return admit


class ServiceServer:
    """A gRPC server with the handlers of one service, on a loop thread."""

    def __init__(
        self,
        loop: AsyncioThread,
        bind: str,
        secret: str = "",
        link_timeout_s: float = LINK_TIMEOUT_S,
        certificate: CertificateFiles | None = None,
        admit: Sequence[Admit] = (),
    ) -> None:
        """`bind`: ``host:port``, port 0 for a free one. With a `secret`, calls must carry its token
        (`contracts.cluster_secret`). A client that is silent for `link_timeout_s` counts as gone. `certificate`: this
        node's; with it only nodes of the cluster are served, None: without TLS. `admit` are asked about each call that
        has passed."""
        self._certificate = certificate
        self._admit = (admit_by_token(secret), *admit)
        self._link_timeout_s = link_timeout_s
        self._loop = loop
        self._bind = bind
        self._server: grpc.aio.Server | None = None

    def start(self, handlers: Sequence[Handler], timeout_s: float = 10.0) -> int:
        """Serve; returns the port that was bound.

        Raises `OSError` when the address can't be bound, `ConfigError` when the certificate can't be read.
        """
        return self._loop.run(self._start(handlers), timeout_s)

    async def _start(self, handlers: Sequence[Handler]) -> int:
        server = grpc.aio.server(options=server_options(self._link_timeout_s))
        server.add_generic_rpc_handlers((CallHandlers(handlers, self._admit),))
        try:
            port = add_port(server, self._bind, self._certificate)
        except RuntimeError as error:
            raise OSError(f"cannot bind {self._bind}: {error}") from None
        await server.start()
        self._server = server
        return port

    def stop(self, grace_s: float) -> None:
        """Let open streams flush for `grace_s`, then end them. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            self._loop.run(_stop(server, grace_s), grace_s + 2.0)


async def _stop(server: grpc.aio.Server, grace_s: float) -> None:
    await server.stop(grace_s)
