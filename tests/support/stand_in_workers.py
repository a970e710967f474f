"""A controller, a prefill and a decode worker without a model, for benches of the router: a token every so often.

    python -m tests.support.stand_in_workers --context 200000 --token-ms 20

It prints the controller's address and that of the prefill worker's streams, and serves until its standard input ends.
What the router does for a request is the same as in front of real workers; prompts of any length cost nothing here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Union, get_args

import grpc.aio
import msgspec

from bench.common.bench_report import flag_parser
from twinpool.contracts.ids import PAIR, Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.message_types import Message
from twinpool.contracts.messages.calls import WATCH, WORKER_STATUS, Empty
from twinpool.contracts.messages.cluster_view import ClusterView, WatchRequest
from twinpool.contracts.messages.router_commands import Cancel, Command, Submit
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, RouterFrame
from twinpool.contracts.messages.worker_events import Done, Event, LegReport, Tokens
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.contracts.wire.frame_connection import FrameConnection, FrameListener
from twinpool.contracts.wire.grpc_calls import CallHandlers, Handler, handle_call, handle_subscription, server_options
from twinpool.contracts.wire.message_codec import COMMANDS_BYTES, encode_events

INCARNATION = Incarnation(1)
FIRST_TOKEN = 300
TOKENS = 500
PAGES = 10**6
SILENCE_S = 10.0
OPTIONS = server_options(SILENCE_S)


def drawn(position: int) -> int:
    """The token at a position: the same for all requests."""
    return FIRST_TOKEN + position % TOKENS


class Asked(Message, frozen=True, tag="submit"):
    """A `Submit` whose tokens aren't decoded: a stand-in needs none, and a hundred long prompts would be what is
    measured."""

    request_id: RequestId
    attempt: int
    room: RoomId
    tokens: msgspec.Raw
    prompt_len: int
    sampling: SamplingParams


KINDS: Any = Union[tuple(Asked if kind is Submit else kind for kind in get_args(Command))]  # noqa: UP007
COMMANDS: msgspec.msgpack.Decoder[RouterFrame[Any]] = msgspec.msgpack.Decoder(RouterFrame[KINDS])


@dataclass
class Leg:
    """What a stand-in knows of a request."""

    request_id: RequestId
    attempt: int
    position: int
    """Prefill's: of the first token. Decode's: of the last one."""
    end: int

    @classmethod
    def of(cls, m: Asked) -> Leg:
        return cls(m.request_id, m.attempt, m.prompt_len, m.prompt_len + m.sampling.max_tokens)


class StandIn:
    """Prefill answers with the first token at once; decode sends one more of every request each `token_s`."""

    def __init__(self, role: Role, token_s: float) -> None:
        self.name = WorkerName(f"{role}-0")
        self.role = role
        self._token_s = token_s
        self.endpoint = self.stream = ""
        self._running: dict[RequestId, Leg] = {}
        self._connection: FrameConnection | None = None
        self._woken = asyncio.Event()

    def status(self) -> WorkerStatus:
        return WorkerStatus(self.name, self.role, "ready", os.getpid(), "here", INCARNATION, 0, 0, PAGES, PAGES)

    async def answer(self, request: Empty) -> WorkerStatus:
        return self.status()

    def take(self, connection: FrameConnection) -> None:
        """Take the connection of the only router."""
        self._connection, self._running = connection, {}
        connection.on_frame = self._open

    def _open(self, frame: bytes) -> None:
        self._send([])
        assert self._connection is not None
        self._connection.max_bytes, self._connection.on_frame = COMMANDS_BYTES, self._hear

    def _send(self, events: list[Event]) -> None:
        assert self._connection is not None
        self._connection.send(encode_events(INCARNATION, events))

    def _hear(self, frame: bytes) -> None:
        for command in COMMANDS.decode(frame).commands:
            if isinstance(command, Asked):
                self._running[command.request_id] = Leg.of(command)
            elif isinstance(command, Cancel):
                self._running.pop(command.request_id, None)
        self._woken.set()

    async def work(self) -> None:
        """Answer what comes, for ever."""
        while True:
            if self.role is Role.PREFILL:
                await self._woken.wait()
                self._woken.clear()
                events = [event for leg in self._running.values() for event in self._first(leg)]
                self._running.clear()
            else:
                await asyncio.sleep(self._token_s)
                events = self._step(self._running)
            if events:
                self._send(events)

    def _first(self, leg: Leg) -> list[Event]:
        key, at = (leg.request_id, leg.attempt), leg.position
        events: list[Event] = [Tokens(*key, at, (drawn(at),))]
        events.append(LegReport(*key, Role.PREFILL, self.name, {"prefill": 0.001}, 0, at))
        if at + 1 >= leg.end:
            events.append(Done(*key, "length"))
        return events

    def _step(self, running: dict[RequestId, Leg]) -> list[Event]:
        events: list[Event] = []
        for leg in list(running.values()):
            key = (leg.request_id, leg.attempt)
            leg.position += 1
            if leg.position < leg.end:
                events.append(Tokens(*key, leg.position, (drawn(leg.position),)))
            if leg.position + 1 >= leg.end:
                events += (LegReport(*key, Role.DECODE, self.name, {}), Done(*key, "length"))
                del running[leg.request_id]
        return events


class Table:
    """The controller's table, which never changes."""

    def __init__(self, workers: list[StandIn], context: int) -> None:
        self._workers, self._context = workers, context

    async def watch(self, request: WatchRequest) -> AsyncGenerator[ClusterView]:
        fits = WorkerLimits(self._context, self._context)
        records = [
            WorkerRecord(
                w.name, w.role, INCARNATION, os.getpid(), "here", w.endpoint, "tcp://127.0.0.1:9", fits,
                stream=w.stream, stream_protocol=STREAM_PROTOCOL,
            )
            for w in self._workers
        ]  # fmt: skip
        yield ClusterView(1, tuple(WorkerView(r, w.status()) for r, w in zip(records, self._workers, strict=True)))
        await asyncio.Event().wait()


def server_of(handler: Handler) -> tuple[grpc.aio.Server, int]:
    """A gRPC server of one call, and its port."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((CallHandlers([handler]),))
    return server, server.add_insecure_port("127.0.0.1:0")


async def serve(context: int, token_s: float) -> None:
    workers = [StandIn(role, token_s) for role in PAIR]
    servers: list[object] = []  # one that nobody refers to is closed
    for worker in workers:
        server, port = server_of(handle_call(WORKER_STATUS, worker.answer))
        worker.endpoint = f"127.0.0.1:{port}"
        await server.start()
        bound = socket.create_server(("127.0.0.1", 0))
        worker.stream = f"127.0.0.1:{bound.getsockname()[1]}"
        servers += server, FrameListener(bound, worker.take, SILENCE_S, None), asyncio.create_task(worker.work())
    controller, port = server_of(handle_subscription(WATCH, Table(workers, context).watch))
    await controller.start()
    print(f"127.0.0.1:{port}", flush=True)
    print(workers[0].stream, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


def main() -> None:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("--context", type=int, default=200_000, help="positions that a worker holds")
    parser.add_argument("--token-ms", type=float, default=20.0, help="between two tokens of a stream")
    options = parser.parse_args()
    asyncio.run(serve(options.context, options.token_ms / 1000))


if __name__ == "__main__":
    main()
