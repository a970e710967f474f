"""The clients of `tests.support.chaos`, and what strikes while they ask.

Faults come from a bag that holds each kind once, so that all of them happen equally often; one that finds nobody to
strike comes again soon. The last worker of a role that serves is never killed, or an error would be right.

*Drain and undrain* takes back a worker that is still busy with long answers; drains to the end are among the commands
of `tests.support.chaos_control_plane`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.changing_cluster import Detached
from tests.support.chaos_books import Counters, Tally, Watch, workers_of
from tests.support.chaos_control_plane import ControlPlaneFaults, Operators
from tests.support.fault_proxy import Proxy, Relay
from tests.support.redis_servers import LedgerServer
from tests.support.served_cluster import Answer, complete, until

ROLES = ("prefill", "decode")
AT_ONCE = 8
LEAVES = 0.15
"""Share of the clients that don't wait for their answer's end."""
FEW = 4
BACK_S = 300.0
"""A worker that was struck is back within this time, on a machine with much else to do."""
LOOK_S = 2.0
COME_BACK_S = 0.2
"""How long a client waits whose connection broke, before it comes back with its key."""
FOR_GOOD = ("it was draining and is not restarted", "isn't started: its pool has enough workers")
CHANGE = "change a role"
CHANGE_BACK = 6
"""After so many other strikes."""
BY_ITSELF = ("hang", "host memory full")
"""Faults that the cluster's configuration brings about."""
COUNTED = {
    "saves_left_out": "host memory full", "stores_failed": "pages that the full disk didn't take",
    "retractions": "retracted", "resumptions": "resumed from host memory", "recomputed": "retracted and recomputed",
    "arena_pages_adopted": "pages adopted from the dead", "migrated_out": "moved to another worker",
    "migrations_undone": "not moved, as the other worker couldn't",
}  # fmt: skip
"""Counters of the workers, and what the books call them."""


@dataclass(frozen=True)
class Ask:
    """A prompt and how to ask it, and the one right answer."""

    prompt: list[int]
    body: dict[str, Any]
    tokens: list[int]


@dataclass(frozen=True)
class Scene:
    """What is struck."""

    cluster: Detached
    proxy: Proxy
    server: LedgerServer | None
    """Of the ledger and of Ray's tables."""
    disk: Path | None
    """The small file system of the storage tier, if there is."""
    base: Path
    """A folder for what commands need."""


class Chaos:
    """The clients, and what strikes."""

    def __init__(
        self, scene: Scene, asks: list[Ask], tally: Tally, watch: Watch, pause_s: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        """`pause_s`: between two faults, on average. `say` gets a line about each fault."""
        self.cluster, self.proxy, self.asks, self.tally = scene.cluster, scene.proxy, asks, tally
        self._watch, self._disk, self._pause_s, self._say = watch, scene.disk, pause_s, say
        longest = max(ask.body["max_tokens"] for ask in asks)
        self._long = [ask for ask in asks if ask.body["max_tokens"] == longest]
        self._random = random.Random(f"{tally.seed}:{tally.seconds:.0f}")
        self._bag: list[str] = []
        self._since_change = 0
        self._over = False
        self._counters = Counters()
        self._seen: Counter[str] = Counter()
        """What has been counted of this cluster already."""
        self.faults: dict[str, Callable[[], Awaitable[bool]]] = {
            "kill a prefill": lambda: self.kill("prefill"),
            "kill a decode": lambda: self.kill("decode"),
            "kill a rank": lambda: self.strike_rank(signal.SIGKILL),
            "stop a rank": lambda: self.strike_rank(signal.SIGSTOP),
            "stop and go on": self.stop_and_go_on,
            "stop for good": self.stop_for_good,
            "cut a stream": lambda: self.link("serve", self.proxy.cut),
            "silence a stream": lambda: self.link("serve", self.proxy.silence),
            "slow a stream": lambda: self.link("serve", self.slowed),
            "cut a hand-over": lambda: self.link("data", self.proxy.cut),
            "silence a hand-over": lambda: self.link("data", self.proxy.silence),
            "slow a hand-over": lambda: self.link("data", self.slowed),
            "cut a control line": lambda: self.link("control", self.proxy.cut),
            "silence a control line": lambda: self.link("control", self.proxy.silence),
            "drain and undrain": self.drain_and_undrain,
            CHANGE: self.change_a_role,
        }
        if tally.plane in {"zmq", "staged"}:
            self.faults["cut pages"] = lambda: self.link("pages", self.proxy.cut)
            self.faults["silence pages"] = lambda: self.link("pages", self.proxy.silence)
            self.faults["slow pages"] = lambda: self.link("pages", self.slowed)
        if scene.disk is not None:
            self.faults["fill the disk"] = self.fill_the_disk
        self.faults |= ControlPlaneFaults(self.cluster, scene.server, self._random, say).faults
        self._operators = Operators(self.cluster, scene.base, self._random, say, tally.outcomes)
        self.faults |= self._operators.faults

    def missing(self) -> list[str]:
        """Kinds of faults that have not happened yet, in all of the run."""
        return [name for name in (*self.faults, *BY_ITSELF) if not self.tally.faults[name]]

    # ------------------------------------------------------------ the run

    async def run(self, seconds: float) -> None:
        """Ask and strike for so long, then let what runs end."""
        end, self._over = time.monotonic() + seconds, False
        limits = httpx.Limits(max_connections=8 * AT_ONCE)
        async with httpx.AsyncClient(base_url=self.cluster.url, timeout=300, limits=limits) as client:
            self._client = client
            clients = [asyncio.create_task(self._ask_on(n)) for n in range(AT_ONCE)]
            looking = asyncio.create_task(self._look_on())
            while time.monotonic() < end and not self.tally.failures:
                await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._pause_s)
                await self._strike()
            await self._operators.finish()
            self._over = True
            await asyncio.gather(*clients, looking)
        self.tally.seconds += seconds

    async def _look_on(self) -> None:
        while not self._over:
            self._watch.look()
            self._counters.take(await self._rows(), COUNTED)
            await asyncio.sleep(LOOK_S)

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(f"{self.tally.seed}:{self.tally.seconds:.0f}:{number}")
        while not self._over and not self.tally.failures:
            leaves_after = rng.uniform(0.0, 0.6) if rng.random() < LEAVES else None
            await self._ask(rng.choice(self.asks), rng.random() < 0.7, leaves_after)

    async def _ask(self, ask: Ask, stream: bool, leaves_after: float | None = None) -> None:
        body = self.cluster.body(ask.prompt, **ask.body, stream=stream)
        try:
            async with asyncio.timeout(leaves_after):
                answer = await self._answer(body)
        except TimeoutError:
            self.tally.outcomes["left"] += 1
            return
        except (AssertionError, httpx.HTTPError) as error:
            self.tally.outcomes["failed"] += 1
            self.tally.failures.append(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {str(error)[:800]}")
            return
        self.tally.outcomes["answered"] += 1
        self.tally.outcomes["answered after replays"] += answer.twinpool["attempts"] > 1
        if answer.tokens != ask.tokens:
            self.tally.outcomes["wrong"] += 1
            where = next((n for n, (a, b) in enumerate(zip(answer.tokens, ask.tokens, strict=False)) if a != b), None)
            self.tally.failures.append(
                f"{time.strftime('%H:%M:%S')} wrong at token {where}, {len(answer.tokens)} of {len(ask.tokens)}: "
                f"{ask.body}, prompt of {len(ask.prompt)}, {answer.twinpool}, {answer.tokens} not {ask.tokens}"
            )

    async def _answer(self, body: dict[str, Any]) -> Answer:
        """An answer, for which its client comes back with its key while its router is gone."""
        key, deadline = f"{self._random.getrandbits(64):x}", time.monotonic() + BACK_S
        while True:
            try:
                return await complete(self._client, body, key)
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
                self.tally.outcomes["came back with a key"] += 1
                await asyncio.sleep(COME_BACK_S)

    async def _strike(self) -> None:
        if len(self._bag) < FEW:
            fresh = sorted(self.faults)
            self._random.shuffle(fresh)
            self._bag += fresh
        # Half of the kinds need two workers of a role, so the pools don't stay of different sizes for long.
        name = CHANGE if self._since_change >= CHANGE_BACK and await self._uneven() else self._bag.pop()
        self._since_change = 0 if name == CHANGE else self._since_change + 1
        if await self.faults[name]():
            self.tally.faults[name] += 1
        else:
            self._bag.insert(self._random.randrange(len(self._bag) + 1), name)
            self._say(f"nobody to {name}")

    async def _uneven(self) -> bool:
        wanted = [row["role"] for row in await self._rows() if row["state"] not in ("left", "dead")]
        return abs(wanted.count(ROLES[0]) - wanted.count(ROLES[1])) > 1

    # ------------------------------------------------------------ faults

    async def _rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self._call("GET", "/cluster/status")).json().get("workers", [])
        return rows

    async def _call(self, method: str, path: str, **query: str) -> httpx.Response:
        """One call of an operator, who calls again where a router was killed under it."""
        while True:
            try:
                return await self._client.request(method, path, params=query)
            except httpx.TransportError:
                await asyncio.sleep(COME_BACK_S)

    async def _ready(self, role: str, least: int = 2) -> list[dict[str, Any]]:
        """Workers of a role that serve, if there are so many: the last one is not killed."""
        ready = [w for w in await self._rows() if w["role"] == role and w["state"] == "ready" and not w["stalled_s"]]
        return ready if len(ready) >= least else []

    async def _victim(self, what: str, role: str | None = None, least: int = 2) -> dict[str, Any] | None:
        ready = await self._ready(role or self._random.choice(ROLES), least)
        if not ready:
            return None
        victim = self._random.choice(ready)
        self._say(f"{what}: {victim['name']}, incarnation {victim['incarnation']}, pid {victim['pid']}")
        return victim

    async def kill(self, role: str) -> bool:
        victim = await self._victim("kill", role)
        if victim is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGKILL)
        return True

    async def strike_rank(self, number: signal.Signals) -> bool:
        """A process of a worker that is not its leader. One that is stopped is found as soon as it is to compute."""
        leaders = {w["pid"]: w["name"] for w in await self._ready("prefill")}
        everybody = await asyncio.to_thread(self.cluster.processes)
        others = [p for p in workers_of(everybody) if p.pid not in leaders and _rank_of(p)]
        if not leaders or not others:
            return False
        victim = self._random.choice(others)
        self._say(f"{number.name} to a rank: pid {victim.pid}")
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
        return True

    async def stop_and_go_on(self) -> bool:
        """Shorter or longer than a lease."""
        victim = await self._victim("stop and go on")
        if victim is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(0.2, 5.0))
            os.kill(victim["pid"], signal.SIGCONT)
        return True

    async def stop_for_good(self) -> bool:
        victim = await self._victim("stop for good")
        if victim is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGSTOP)
        return True

    def slowed(self, relay: Relay) -> None:
        self.proxy.slow(relay, delay_s=self._random.uniform(0.01, 0.3), bytes_per_s=self._random.choice([0, 2e5]))

    async def link(self, kind: str, trouble: Callable[[Relay], None]) -> bool:
        what = f"{getattr(trouble, '__name__', 'trouble')} {kind}"
        victim = await self._victim(
            what, {"control": "prefill", "data": "decode", "pages": "decode"}.get(kind), least=1
        )
        if victim is None:
            return False
        name = str(victim["pid"]) if kind in ("data", "pages") else victim["name"]
        found = [r for r in self.proxy.find(kind, name) if r.open]
        if not found:
            return False
        trouble(found[-1])
        await asyncio.sleep(self._random.uniform(0.1, 4.0))
        self.proxy.mend(found[-1])
        return True

    async def drain_and_undrain(self) -> bool:
        """A decode worker in the middle of long answers, some of which it hands on before it is taken back."""
        if not await self._ready("decode"):
            return False
        long = [asyncio.create_task(self._ask(self._random.choice(self._long), True)) for _ in range(AT_ONCE)]
        try:
            return await self._drain_a_busy_one()
        finally:
            await asyncio.gather(*long)

    async def _drain_a_busy_one(self) -> bool:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            busy = [w for w in await self._ready("decode") if w["running"] >= AT_ONCE / 2]
            if not busy:
                await asyncio.sleep(0.05)
                continue
            victim = self._random.choice(busy)
            drained = await self._call("POST", f"/cluster/drain/{victim['name']}")
            ran = drained.json().get("running", 0)
            undrained = await self._call("POST", f"/cluster/undrain/{victim['name']}")
            how = "taken back" if undrained.status_code == 200 else undrained.text
            self._say(f"drain {victim['name']}, which runs {ran}: {drained.status_code}, {how}")
            return drained.status_code == undrained.status_code == 200
        return False

    async def change_a_role(self) -> bool:
        """Of a worker of the larger pool: what it runs is handed on, and it comes back in the other one."""
        ready = {role: await self._ready(role) for role in ROLES}
        role = max(ROLES, key=lambda role: len(ready[role]))
        if not ready[role]:
            return False
        victim, other = self._random.choice(ready[role]), ROLES[role == ROLES[0]]
        answer = await self._call("POST", f"/cluster/role/{victim['name']}", role=other)
        self._say(f"{victim['name']}, incarnation {victim['incarnation']}, is to {other}: {answer.status_code}")
        return answer.status_code == 200

    async def fill_the_disk(self) -> bool:
        assert self._disk is not None
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(64 * 1024))
                file.flush()
        await asyncio.sleep(self._random.uniform(1.0, 4.0))
        filler.unlink(missing_ok=True)
        return True

    # ------------------------------------------------------------ the books

    def finish(self) -> None:
        """Mend, have the pools put right, wait until all are back, and recount everything."""
        for relay in self.proxy.relays:
            self.proxy.mend(relay)
        if self._disk is not None:
            (self._disk / "filler").unlink(missing_ok=True)
        until(self._answers, "a router to answer", BACK_S)
        until(self._all_back, "all workers to be back", BACK_S)
        self.tally.failures += self._operators.put_right()
        until(self._all_back, "all workers to be back", BACK_S)
        self.cluster.settle()
        rows = httpx.get(f"{self.cluster.url}/cluster/status", timeout=30).json()["workers"]
        self._counters.take(rows, COUNTED)
        for counter, name in COUNTED.items():
            books = self.tally.faults if name in BY_ITSELF else self.tally.outcomes
            books[name] += self._counters.fresh(counter)
        totals = {"hang": sum("died (hung: " in line for line in self.cluster.said())}
        totals["workers started again"] = sum(row["incarnation"] - 1 for row in rows)
        for name, total in totals.items():
            books = self.tally.faults if name in BY_ITSELF else self.tally.outcomes
            books[name] += total - self._seen[name]
            self._seen[name] = total
        # Whatever is killed, cut or full: bytes change only where memory or a disk changes them, and here none does.
        self.tally.failures += [f"damaged state: {what}" for what in self._counters.damage()]

    def _answers(self) -> bool:
        return self.cluster.twinpool("status", "--json").returncode == 0

    def _all_back(self) -> bool:
        """Nobody is on the way, however it ends: one that died while it drained, or whose start was taken back, stays
        dead."""
        rows = self.cluster.status().values()
        gone = [line.split()[0] for line in self.cluster.said() if any(words in line for words in FOR_GOOD)]
        return all(w["state"] in ("ready", "left") or w["name"] in gone for w in rows)


def _rank_of(process: psutil.Process) -> bool:
    """Whether it is a follower: it writes a log of its own."""
    try:
        return any(".rank" in Path(f.path).name for f in process.open_files())
    except psutil.Error:
        return False
