"""What hostile clients do to everybody else: eight streams run, one kind of harm after the other is done.

    python -m bench.serving.hostile_clients  # the router in front of stand-in workers, at 256 descriptors
    python -m bench.serving.hostile_clients --cluster  # a whole cluster of the demo model, every port of it
    python -m bench.serving.hostile_clients --seconds 20 --salts 100000  # so many in all, which takes some minutes

Harm: bodies of 8 MB (text, nested lists, ids), 300 idle connections, 128 choices of 100,000 tokens (stand-ins only: the
demo's context is 2,048), prompts with a salt each, garbage on every port that the processes listen on. Those who do it
are processes of their own at the server's priority, as clients on its machine are; `--nice 19` shows what is left where
they take no processor time from it, as on machines of their own. For each: `/live`'s answers on new connections, the
longest gap between two events of a stream, how long the measuring process itself stood still, from which no gap can be
told, and the server's own memory before, at its most, and after. Before the first row the router's readers are started
and the pools are filled. The router must answer `/live` within 100 ms (99 %), no stream may stand still 250 ms longer
than undisturbed and than the measuring process itself, and memory must return.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.common.bench_report import flag_parser, write_report
from bench.common.child_server import ROOT, child, first_line, free_port, serving, wait_ready
from bench.common.random_model import DEMO

STREAMS = 8
DESCRIPTORS = 256
CONNECTIONS = 300
LIVE_MS, GAP_MS, KEPT_BYTES = 100.0, 250.0, 100 * 1024**2
PROBE_S, MEMORY_S, SELF_S = 0.02, 0.5, 0.01
SETTLE_S = 3.0
ANSWER_S = 30.0
SALTERS = 8
"""Connections that salted requests come over, a process."""
FIRST_SALTS = 1500
"""They fill the demo's pools, whose memory the system gives page by page as it is first written."""


BEGINNINGS = (b"", b"\xff\x00\x00\x00\x00\x00\x00\x01\x7f", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
"""Of nothing, of ZMQ's protocol, of gRPC's."""
SENTENCE = "It was a fine morning, and the old house stood. "


# ---------------------------------------------------------------- harm, in processes of their own


def send(host: str, port: int, body: bytes, path: str = "/v1/completions") -> int:
    """Post a body; the status, 0 where the server closed the connection first."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((host, port), timeout=ANSWER_S) as client:
        with suppress(OSError):
            client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        answer = b""
        with suppress(OSError):
            while part := client.recv(1 << 20):
                answer = answer or part
        return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def bodies(host: str, port: int, context: int) -> Iterator[bytes]:
    """8 MB, and just what the router takes, of three kinds."""
    for size in (8 * 1024**2, min(8 * 1024**2, 1024**2 + 32 * context) - 64):
        yield json.dumps({"prompt": SENTENCE * ((size - 64) // len(SENTENCE)), "max_tokens": 1}).encode()
        yield b'{"prompt":"a","x":[' + b"[]," * (size // 3 - 8) + b"[]]}"
        yield json.dumps({"prompt": [300] * (size // 5 - 8), "max_tokens": 1}).encode()


def harm(kind: str, host: str, ports: Sequence[int], seconds: float, context: int, salts: int) -> dict[str, int]:
    """Do one kind of harm; returns how often what happened."""
    told: dict[str, int] = {}
    until, port = time.monotonic() + seconds, ports[0]

    def note(status: object) -> None:
        told[str(status)] = told.get(str(status), 0) + 1

    if kind == "first":
        for body in bodies(host, port, context):
            note(send(host, port, body))
        asyncio.run(salted(host, port, FIRST_SALTS))
    elif kind == "bodies":
        made = list(bodies(host, port, context))
        while time.monotonic() < until:
            note(send(host, port, random.choice(made)))
    elif kind == "connections":
        held: list[socket.socket] = []
        while time.monotonic() < until:
            with suppress(OSError):
                held.append(socket.create_connection((host, port), timeout=1.0))
                held[-1].sendall(random.choice([b"", b"", b"POST /v1/completions HTTP/1.1\r\nHo"]))
                note("opened")
            if len(held) >= CONNECTIONS:
                time.sleep(0.2)
                held.pop(0).close()
    elif kind == "choices":
        asked = {"prompt": [300] * min(100_000, context - 16), "max_tokens": 2, "n": 128}
        while time.monotonic() < until:
            for ids in (False, True):
                note(send(host, port, json.dumps({**asked, "return_token_ids": ids, "stream": ids}).encode()))
    elif kind == "salts":
        for status, times in asyncio.run(salted(host, port, salts)).items():
            told[str(status)] = times
    else:
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection((host, random.choice(ports)), timeout=0.5) as client:
                client.settimeout(0.5)
                client.sendall(random.choice(BEGINNINGS))
                client.sendall(random.randbytes(random.choice([1, 64, 65_536])))
                note("sent")
    return told


async def salted(host: str, port: int, salts: int) -> dict[int, int]:
    """Post so many short requests, each with a salt of its own, over `SALTERS` connections; how often what status."""
    numbers = iter(range(salts))
    told: dict[int, int] = {}

    async def one_connection() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for number in numbers:
            asked = {"prompt": [300 + number % 500] * 64, "max_tokens": 1, "cache_salt": f"{os.getpid()}-{number}"}
            body = json.dumps(asked).encode()
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
            await reader.readexactly(int(length.partition(":")[2]))
            status = int(head[9:12])
            told[status] = told.get(status, 0) + 1
        writer.close()

    await asyncio.gather(*(one_connection() for _ in range(SALTERS)))
    return told


# ---------------------------------------------------------------- what the others see


@dataclass
class Seen:
    """One phase. Milliseconds and bytes."""

    harm: str
    live_ms: list[float] = field(default_factory=list, repr=False)
    live_failed: int = 0
    gaps_ms: list[float] = field(default_factory=list, repr=False)
    late_ms: float = 0.0
    """The longest time that the measuring process itself stood still."""
    seconds: float = 0.0
    right: int = 0
    wrong: int = 0
    """Streams that ended in their answer, and in anything else."""
    before: int = 0
    most: int = 0
    after: int = 0
    told: dict[str, int] = field(default_factory=dict)

    @property
    def live_p99_ms(self) -> float:
        values = sorted(self.live_ms)
        return values[min(len(values) - 1, int(0.99 * len(values)))] if values else float("inf")

    @property
    def longest_ms(self) -> float:
        return max(self.gaps_ms, default=float("inf"))


async def probe_live(host: str, port: int, seen: Seen, over: asyncio.Event) -> None:
    while not over.is_set():
        began = time.perf_counter()
        try:
            async with asyncio.timeout(10.0):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer = await reader.read()
                writer.close()
            if not answer.startswith(b"HTTP/1.1 200"):
                raise OSError("not alive")
            seen.live_ms.append((time.perf_counter() - began) * 1e3)
        except (OSError, TimeoutError):
            seen.live_failed += 1
        await asyncio.sleep(PROBE_S)


async def follow(host: str, port: int, body: dict[str, Any], want: list[str], seen: Seen, over: asyncio.Event) -> None:
    """Ask for one answer again and again; its gaps, and whether it is what it was when nobody disturbed."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    while not over.is_set():
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(head.encode() + raw)
            texts: list[str] = []
            done, last = False, None
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    event = json.loads(line[6:])
                    texts += [json.dumps(c.get("token_ids")) for c in event.get("choices", [])]
                    if last is not None:
                        seen.gaps_ms.append((now - last) * 1e3)
                    last = now
                done = done or line.startswith(b"data: [DONE]")
                if over.is_set():
                    return
            answer = [token for text in texts for token in json.loads(text) or []]
            if not want:
                want += map(str, answer)
            right = done and list(map(str, answer)) == want
            seen.right, seen.wrong = seen.right + right, seen.wrong + (not right)
        except OSError:
            seen.wrong += 1
        finally:
            writer.close()


def memory(pids: Sequence[int]) -> int:
    """Anonymous bytes of these processes and all that they started: neither libraries nor what they share, as pools."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for p in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    held = p.memory_info()
                    total += held.rss - held.shared
    return total


async def watch_memory(pids: Sequence[int], seen: Seen, over: asyncio.Event) -> None:
    seen.before = seen.most = memory(pids)
    while not over.is_set():
        seen.most = max(seen.most, await asyncio.to_thread(memory, pids))
        await asyncio.sleep(MEMORY_S)


async def watch_itself(seen: Seen, over: asyncio.Event) -> None:
    """How long this process was kept from looking: no gap that it saw is known more exactly."""
    while not over.is_set():
        began = time.perf_counter()
        await asyncio.sleep(SELF_S)
        seen.late_ms = max(seen.late_ms, (time.perf_counter() - began - SELF_S) * 1e3)


async def phase(target: Target, kind: str, options: argparse.Namespace, answers: list[list[str]]) -> Seen:
    seen, over, began = Seen(kind), asyncio.Event(), time.monotonic()
    tasks = [asyncio.create_task(watch_memory(target.pids, seen, over))]
    tasks.append(asyncio.create_task(watch_itself(seen, over)))
    tasks.append(asyncio.create_task(probe_live(target.host, target.port, seen, over)))
    for number in range(STREAMS):
        body = {**target.body, "seed": number}
        tasks.append(asyncio.create_task(follow(target.host, target.port, body, answers[number], seen, over)))
    if kind == "nothing":
        await asyncio.sleep(options.seconds)
    else:
        command = ["nice", "-n", str(options.nice), sys.executable, "-m", "bench.serving.hostile_clients"]
        command += ["--do", kind, "--host", target.host]
        command += ["--ports", ",".join(map(str, target.ports)), "--seconds", str(options.seconds)]
        command += ["--context", str(target.context), "--salts", str(options.salts)]
        count = {"bodies": 3, "garbage": 2}.get(kind, 1)
        started = [
            await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(count)
        ]
        for process in started:
            said, _ = await process.communicate()
            for status, times in json.loads(said or b"{}").items():
                seen.told[status] = seen.told.get(status, 0) + times
    await asyncio.sleep(SETTLE_S)
    over.set()
    await asyncio.gather(*tasks)
    seen.after, seen.seconds = memory(target.pids), time.monotonic() - began
    return seen


# ---------------------------------------------------------------- who is harmed


@dataclass(frozen=True)
class Target:
    """A server under test. `ports`: HTTP's first, then every other one that its processes listen on."""

    host: str
    ports: tuple[int, ...]
    pids: tuple[int, ...]
    context: int
    body: dict[str, Any]

    @property
    def port(self) -> int:
        return self.ports[0]


def listening(pids: Sequence[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(psutil.Error):
            for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with suppress(psutil.Error):
                    found |= {c.laddr.port for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


def stream_body(tokens: int) -> dict[str, Any]:
    asked = {"prompt": [300, 301, 302], "max_tokens": tokens, "ignore_eos": True}
    return {**asked, "stream": True, "return_token_ids": True}


@contextmanager
def router_alone(context: int) -> Iterator[Target]:
    """The router's process at `DESCRIPTORS`, in front of stand-ins; its model says a context that they can hold."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        for path in Path(DEMO).iterdir():
            if path.name != "config.json":
                (model / path.name).symlink_to(path.absolute())
        shape = json.loads((Path(DEMO) / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": context}))
        stand_ins = [sys.executable, "-m", "tests.support.stand_in_workers", "--context", str(context)]
        with child(stand_ins) as workers:
            controller, port = first_line(workers), free_port()
            router = [sys.executable, "-m", "twinpool.router.main", "--model", str(model), "--controller", controller]
            limited = ("/bin/sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh")
            with child([*limited, *router, "--port", str(port)], stderr=subprocess.DEVNULL) as process:
                wait_ready(f"http://127.0.0.1:{port}/health", process)
                yield Target("127.0.0.1", (port,), (process.pid,), context, stream_body(150))


@contextmanager
def whole_cluster() -> Iterator[Target]:
    with serving("demo", [f"router.max_connections={DESCRIPTORS * 3 // 4 - 48}"]) as url:
        where = urlsplit(url)
        assert where.hostname
        assert where.port
        mine = [p.pid for p in psutil.Process().children(recursive=False)]
        others = sorted(listening(mine) - {where.port})
        yield Target(where.hostname, (where.port, *others), tuple(mine), 2048, stream_body(150))


def show(seen: Seen, still: Seen) -> int:
    """Print a row beside the undisturbed phase `still`; returns how many bounds were exceeded."""
    if seen is still:
        print(f"{'harm':12} {'seconds':>8} {'/live p50':>10} {'p99':>8} {'failed':>7} {'gap p50':>8} {'longest':>9} "
              f"{'beyond':>8} {'itself':>7} {'right/wrong':>6} {'MB before':>10} {'most':>7} {'after':>7}  "
              "answers")  # fmt: skip
    lives, gaps = sorted(seen.live_ms), sorted(seen.gaps_ms)
    beyond = seen.longest_ms - max(still.longest_ms, seen.late_ms)
    live = f"{lives[len(lives) // 2]:10.1f} {seen.live_p99_ms:8.1f} {seen.live_failed:7}"
    gap = f"{gaps[len(gaps) // 2]:8.1f} {seen.longest_ms:9.1f} {beyond:8.1f} {seen.late_ms:7.1f}"
    held = f"{seen.before / 1e6:10.0f} {seen.most / 1e6:7.0f} {seen.after / 1e6:7.0f}"
    print(
        f"{seen.harm:12} {seen.seconds:8.1f} {live} {gap} {seen.right:4}/{seen.wrong} {held}  {seen.told}", flush=True
    )
    kept = seen.after - seen.before > KEPT_BYTES
    return sum(
        [seen.live_p99_ms > LIVE_MS, bool(seen.live_failed), beyond > GAP_MS, kept, bool(seen.wrong), not seen.right]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--cluster", action="store_true", help="a whole cluster of the demo model")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each harm")
    parser.add_argument("--nice", type=int, default=0, help="niceness of those who do harm, beside this process's")
    parser.add_argument("--salts", type=int, default=1000, help="requests with a salt of their own, in all")
    parser.add_argument("--only", help="one kind of harm")
    parser.add_argument("--do", help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--ports", help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, default=200_000, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.do:
        ports = [int(port) for port in options.ports.split(",")]
        print(json.dumps(harm(options.do, options.host, ports, options.seconds, options.context, options.salts)))
        return 0
    kinds = ["bodies", "connections", *([] if options.cluster else ["choices"]), "salts", "garbage"]
    kinds = [kind for kind in kinds if options.only in (None, kind)]
    phases: list[Seen] = []
    exceeded = 0
    with whole_cluster() if options.cluster else router_alone(options.context) as target:
        answers: list[list[str]] = [[] for _ in range(STREAMS)]
        asyncio.run(phase(target, "first", options, answers))  # not shown: what is slow, or started, only once
        for kind in ("nothing", *kinds):
            phases.append(asyncio.run(phase(target, kind, options, answers)))
            exceeded += show(phases[-1], phases[0])
    write_report(options, phases=[asdict(p) for p in phases])
    print(f"{exceeded} of the bounds exceeded: /live p99 {LIVE_MS:g} ms, {GAP_MS:g} ms beyond undisturbed, memory")
    return 0 if not exceeded else 1


if __name__ == "__main__":
    sys.exit(main())
