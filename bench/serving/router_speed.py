"""What the router alone costs: processor time of a request and of a streamed token, and the time that it adds.

    python -m bench.serving.router_speed
    python -m bench.serving.router_speed --rival /path/to/python   # one that has sglang-router

Workers without a model answer at once, so that what is measured is the router's process: its processor time, user and
system, over the number of requests or tokens. With `--rival`, sglang-router does the same in front of HTTP workers
without a model, in turns; it passes on what comes, where Twinpool's router reads prompts, makes tokens of them and text
of tokens, checks their order, and picks two workers.

- short: answers of one token, some connections at a time, kept open.
- added: one connection; the time of a request, and what of it is the router's: the same request is sent to a worker
  without a router, in the worker's own protocol.
- streams: many streams, a token each so often.
- idle: streams that have their first token and wait; memory of the process before them, with them, and a while after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from bench.common.child_server import ROOT, child, first_line, free_port, wait_ready
from twinpool.contracts.ids import Incarnation, RequestId, RoomId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL, StreamOpening
from twinpool.contracts.messages.worker_events import Done, Event
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.contracts.wire.frame_connection import FrameConnection
from twinpool.contracts.wire.message_codec import EVENTS_BYTES, FrameWriter, decode_events, encode_opening

DONE = b"data: [DONE]"
LIMITS = {"router": {"max_connections": 16_000, "max_queue": 16_000, "request_timeout_s": 600.0}}


@dataclass
class RouterUnderTest:
    """A router's process."""

    name: str
    pid: int
    port: int
    model: str
    worker_ms: float = 0.0
    """Time of a request that is sent to a worker without the router, median."""

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def memory_mib(self) -> float:
        return psutil.Process(self.pid).memory_full_info().uss / 2**20

    def request(self, body: dict[str, Any]) -> bytes:
        content = json.dumps({"model": self.model, **body}, separators=(",", ":")).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


@dataclass(frozen=True)
class RouterCost:
    """What one router cost."""

    router: str
    requests_per_s: float
    request_us: float
    """Processor time of a request."""
    one_ms: float
    """Time of a request on one connection, median."""
    added_ms: float
    """What of it is not there where the worker is asked without a router."""
    token_us: float
    """Processor time of a streamed token."""


class Connection(asyncio.Protocol):
    """A connection that sends the same request again and again, or follows one stream."""

    def __init__(self, request: bytes, times: int) -> None:
        self._request, self._left = request, times
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.took_s: list[float] = []
        self.tokens = 0
        self._data, self._missing, self._began = b"", 0, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the router closed a connection"))

    def _send(self) -> None:
        self._data, self._missing = b"", 0
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if b"\r\n\r\n" not in self._data:
            return
        if not self._missing:
            head, _, _ = self._data.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                self.done.set_exception(ConnectionError(self._data.decode(errors="replace")[:500]))
                self._transport.abort()
                return
            length = next((ln for ln in head.split(b"\r\n") if ln.lower().startswith(b"content-length:")), None)
            self._missing = len(head) + 4 + int(length.split(b":")[1]) if length else -1
        if self._missing < 0:
            self._stream()
        elif len(self._data) >= self._missing:
            self._ended()

    def _stream(self) -> None:
        *lines, rest = self._data.split(b"\n")
        self._data = b"\r\n\r\n" + rest  # Of what was read nothing but that there was a head is needed.
        self.tokens += sum(line.startswith(b"data: {") for line in lines)
        if any(line.startswith(DONE) for line in lines):
            self._ended()

    def _ended(self) -> None:
        self.took_s.append(time.perf_counter() - self._began)
        self._left -= 1
        if self._left:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)

    def abort(self) -> None:
        """Leave, whatever is still to come."""
        self.done.cancel()
        self._transport.abort()


async def connect(router: RouterUnderTest, request: bytes, times: int) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(request, times), "127.0.0.1", router.port)
    return connection


async def ask(router: RouterUnderTest, body: dict[str, Any], at_once: int, times: int) -> list[Connection]:
    """Send a request `times` over on each of some connections, and wait for all answers."""
    request = router.request(body)
    connections = [await connect(router, request, times) for _ in range(at_once)]
    try:
        await asyncio.gather(*(connection.done for connection in connections))
    finally:
        for connection in connections:
            connection.abort()
    return connections


PROMPT = {"prompt": "It was a bright cold day in April, and the clocks were", "temperature": 0}


async def measure(router: RouterUnderTest, args: argparse.Namespace) -> RouterCost:
    short = {**PROMPT, "max_tokens": 1}
    await ask(router, short, args.connections, 20)
    times = args.requests // args.connections
    began, cpu = time.perf_counter(), router.cpu_s()
    await ask(router, short, args.connections, times)
    request_us = (router.cpu_s() - cpu) / (times * args.connections) * 1e6
    rate = times * args.connections / (time.perf_counter() - began)
    (one,) = await ask(router, short, 1, 500)
    stream = {**PROMPT, "max_tokens": args.tokens, "stream": True, "ignore_eos": True}
    await ask(router, stream, 8, 1)
    cpu = router.cpu_s()
    streams = await ask(router, stream, args.streams, 1)
    used = router.cpu_s() - cpu - args.streams * request_us / 1e6
    tokens = sum(connection.tokens for connection in streams)
    one_ms = statistics.median(one.took_s) * 1000
    return RouterCost(router.name, rate, request_us, one_ms, one_ms - router.worker_ms, used / tokens * 1e6)


async def ask_worker(address: str, times: int) -> float:
    """Send one request after another to a prefill worker's stream; returns the median time in milliseconds."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    connection = FrameConnection(60.0)
    connection.max_bytes = EVENTS_BYTES
    heard: asyncio.Queue[Sequence[Event]] = asyncio.Queue()
    connection.on_frame = lambda frame: heard.put_nowait(decode_events(frame)[0].events)
    await loop.create_connection(lambda: connection, host, int(port))
    connection.send(encode_opening(StreamOpening(STREAM_PROTOCOL, Incarnation(1))))
    await heard.get()
    took = []
    for number in range(times):
        one = SamplingParams(max_tokens=1)
        submit = Submit(RequestId(f"r{number}"), 0, RoomId("m"), tuple(range(12)), 12, one, None)
        began = time.perf_counter()
        for frame in FrameWriter().frames([submit]):
            connection.send(frame)
        while not any(isinstance(event, Done) for event in await heard.get()):
            pass
        took.append(time.perf_counter() - began)
    connection.abort()
    return statistics.median(took) * 1000


async def idle(router: RouterUnderTest, streams: int, seconds: float) -> list[float]:
    """Memory in MiB before so many streams are open, when all wait, and some seconds later."""
    before = router.memory_mib()
    request = router.request({**PROMPT, "max_tokens": 100, "stream": True, "ignore_eos": True})
    connections = [await connect(router, request, 1) for _ in range(streams)]
    while not all(connection.tokens for connection in connections):
        await asyncio.sleep(0.1)
    with_them = router.memory_mib()
    await asyncio.sleep(seconds)
    after = router.memory_mib()
    for connection in connections:
        connection.abort()
    return [before, with_them, after]


# ---------------------------------------------------------------- processes


@contextmanager
def own_router(model: Path, token_ms: float) -> Iterator[RouterUnderTest]:
    with ExitStack() as stack:
        workers = [sys.executable, "-m", "tests.support.stand_in_workers", "--token-ms", str(token_ms)]
        with child(workers) as alone:
            first_line(alone)
            worker_ms = uvloop.run(ask_worker(first_line(alone), 500))
        controller = first_line(stack.enter_context(child(workers)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(LIMITS))
        port = free_port()
        command = [
            sys.executable, "-m", "twinpool.router.main", "--model", str(model), "--controller", controller,
            "--port", str(port), "--config-json", str(folder / "config.json"),
        ]  # fmt: skip
        process = stack.enter_context(child(command, stderr=subprocess.DEVNULL))
        wait_ready(f"http://127.0.0.1:{port}/health", process)
        yield RouterUnderTest("twinpool", process.pid, port, model.name, worker_ms)


@contextmanager
def rival_router(python: str, token_ms: float) -> Iterator[RouterUnderTest]:
    with ExitStack() as stack:
        workers = [sys.executable, "-m", "tests.support.stand_in_http", "--token-ms", str(token_ms)]
        worker = first_line(stack.enter_context(child(workers)))
        port, metrics = free_port(), free_port()
        command = [
            python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--worker-urls",
            f"http://127.0.0.1:{worker}", "--policy", "round_robin", "--prometheus-port", str(metrics), "--log-level",
            "error", "--max-concurrent-requests", "16000",
        ]  # fmt: skip
        process = stack.enter_context(child(command, stderr=subprocess.DEVNULL))
        wait_ready(f"http://127.0.0.1:{port}/readiness", process)
        (one,) = uvloop.run(ask(RouterUnderTest("worker", 0, int(worker), "m"), {**PROMPT, "max_tokens": 1}, 1, 500))
        yield RouterUnderTest("sglang-router", process.pid, port, "m", statistics.median(one.took_s) * 1000)


def table(results: Sequence[RouterCost]) -> Table:
    heads = (
        "router", "requests/s", "µs a request", "a core's requests/s", "ms at one", "added", "µs a token", "tokens/s"
    )  # fmt: skip
    rows = (
        (
            one.router, f"{one.requests_per_s:,.0f}", f"{one.request_us:.0f}", f"{1e6 / one.request_us:,.0f}",
            f"{one.one_ms:.2f}", f"{one.added_ms:.2f}", f"{one.token_us:.1f}", f"{1e6 / one.token_us:,.0f}",
        )
        for one in results
    )  # fmt: skip
    return figure_table(None, heads, rows)


def main(argv: list[str] | None = None) -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "cluster" / "demo")
    parser.add_argument("--rival", help="a Python that has sglang-router")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--token-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=int, default=0, help="streams that wait; 0: not measured")
    parser.add_argument("--idle-s", type=float, default=20.0, help="for how long they are watched")
    args = parser.parse_args(argv)
    print(headline())
    found: dict[str, list[RouterCost]] = {}
    with ExitStack() as stack:
        routers = [stack.enter_context(own_router(args.model, args.token_ms))]
        if args.rival:
            routers.append(stack.enter_context(rival_router(args.rival, args.token_ms)))
        for _ in range(args.rounds):
            for router in routers:
                found.setdefault(router.name, []).append(uvloop.run(measure(router, args)))
    results = [median(costs) for costs in found.values()]
    Console().print(table(results))
    if args.idle:
        with own_router(args.model, 60_000.0) as router:
            before, with_them, after = uvloop.run(idle(router, args.idle, args.idle_s))
        each = (with_them - before) / args.idle * 1024
        print(f"{args.idle} idle streams: {before:.0f} MiB before, {with_them:.0f} with them ({each:.1f} KiB each), "
              f"{after:.0f} after {args.idle_s:g} s")  # fmt: skip
    write_report(args, routers=[asdict(one) for one in results])
    return 0


def median(costs: Sequence[RouterCost]) -> RouterCost:
    """The median of each figure."""
    figures = [name for name in asdict(costs[0]) if name != "router"]
    return RouterCost(costs[0].router, *(statistics.median(getattr(one, name) for one in costs) for name in figures))


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
