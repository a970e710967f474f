"""The command `twinpool demo`: a cluster of the built-in model, load for it, and with ``--chaos`` trouble.

It serves with two prefill and two decode workers and has every finished answer computed again (`audit.fraction=1`).
First each question is asked once, undisturbed; then clients ask on, and every answer must be that one, to the letter.
The dashboard shows the same from inside.

The load is clients that ask without pause; the trouble is kills, stops, drains and changes of pools.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from twinpool.cli.admin_client import AdminClient, ClusterNotFound, CommandRefused
from twinpool.cli.launch_commands import own_cluster
from twinpool.cluster.serve.shutdown_signal import ONE_REQUEST_S, EndAsked
from twinpool.contracts.compact_json import DONE, SseReader
from twinpool.contracts.errors import TwinpoolError

SETTLE_S = 120.0
"""How long the pools may take to be whole again in the end."""
SERVE = (
    "--model", "demo", "--prefill", "2", "--decode", "2",
    "--set", "audit.fraction=1", "--set", "cluster.lease_s=4", "--set", "router.stall_s=10",
)  # fmt: skip
QUESTIONS, CLIENTS = 24, 6
SIGNALS = (signal.SIGINT, signal.SIGTERM)
EVERY_S = 6.0
"""Seconds between two strikes, where the pools are whole."""


class DemoFailed(TwinpoolError):
    """Raised where answers aren't exact, or the books don't agree; the text says which."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The flags of the command."""

    chaos: bool
    minutes: float
    """How long; 0: until Ctrl-C."""
    port: int
    seed: int


class DemoCommand:
    """One run against a cluster that serves."""

    def __init__(self, url: str, options: DemoOptions, say: Callable[[str], None]) -> None:
        self._url, self._options, self._say = url, options, say
        self._operator = AdminClient(url)
        self._strikes = DemoStrikes(self._operator, random.Random(options.seed))

    async def run(self) -> dict[str, Any]:
        """Ask and strike until the time is over, or until cancelled; returns what it came to. Raises `DemoFailed` where
        an answer wasn't exact, or the books don't agree."""
        limits = httpx.Limits(max_connections=2 * CLIENTS)
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, trust_env=False, limits=limits) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            asked = questions(model, QUESTIONS, self._options.seed)
            load = DemoLoad(client, asked, CLIENTS, self._options.seed)
            self._say(f"asking {len(asked)} questions, undisturbed")
            await load.learn()
            self._say(f"{CLIENTS} clients ask on" + ("; now for some trouble" if self._options.chaos else ""))
            began = time.monotonic()
            asking = asyncio.create_task(load.run())
            try:
                await self._trouble(load)
            except asyncio.CancelledError:
                self._say("ending")
            load.stop()
            await asking
        seconds = time.monotonic() - began
        if self._options.chaos:
            await self._whole_again()
        books = await asyncio.to_thread(self._operator.check)
        return self._judged(load, seconds, books)

    async def _trouble(self, load: DemoLoad) -> None:
        end = time.monotonic() + 60 * self._options.minutes if self._options.minutes else None
        told = time.monotonic()
        while end is None or time.monotonic() < end:
            await asyncio.sleep(EVERY_S if end is None else min(EVERY_S, max(0.0, end - time.monotonic())))
            over = end is not None and time.monotonic() >= end
            if self._options.chaos and not over and (line := await self._strike()):
                self._say(line)
            if time.monotonic() - told >= EVERY_S:
                told = time.monotonic()
                self._say(_so_far(load.answers))

    async def _strike(self) -> str:
        try:
            return await asyncio.to_thread(self._strikes.strike)
        except CommandRefused as error:
            return f"refused: {str(error)[:100]}"
        except (ClusterNotFound, ProcessLookupError):
            return ""  # The router is asked again; a process that has ended by itself is none to kill.

    async def _whole_again(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            rows = await asyncio.to_thread(self._operator.rows)
            if all(row["state"] in ("ready", "left") for row in rows):
                return
            await asyncio.sleep(0.5)
        raise DemoFailed(f"the pools are not whole {SETTLE_S:g} s after the last strike")

    def _judged(self, load: DemoLoad, seconds: float, books: dict[str, Any]) -> dict[str, Any]:
        answers = load.answers
        found = {
            "answers": answers.asked,
            "exact": answers.exact,
            "of them after a worker was lost or drained": answers.replayed,
            "wrong": len(answers.wrong),
            "failed": len(answers.failed),
            "strikes": self._strikes.done,
            "tokens a second": round(answers.tokens / max(seconds, 1e-9)),
        }
        for words in (answers.wrong + answers.failed)[:5]:
            self._say(f"NOT EXACT: {words}")
        for worker in books["workers"]:
            for violation in worker["violations"]:
                self._say(f"{worker['name']}: {violation}")
        if answers.wrong or answers.failed or not books["ok"]:
            raise DemoFailed(f"{len(answers.wrong)} answers were wrong, {len(answers.failed)} failed: {found}")
        return found


def _so_far(answers: Answers) -> str:
    if answers.wrong or answers.failed:
        return f"{answers.exact} answers exact, {len(answers.wrong)} WRONG, {len(answers.failed)} FAILED"
    return f"{answers.exact} answers, all exact"


def demo(options: DemoOptions) -> int:
    """Serve, ask, strike, judge; returns the exit code. Ctrl-C and SIGTERM end it in order, with the verdict."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    say("starting two prefill and two decode workers")
    with own_cluster([*SERVE, "--port", str(options.port)]) as url:
        say(f"serves at {url}; look at {url}/dashboard")
        found = _until_interrupted(DemoCommand(url, options, say))
        for name, value in found.items():
            print(f"{name:>45}  {value}")
        print("every answer was exact, nothing was lost, and all pages, leases and rooms are accounted for")
    return 0


def _until_interrupted(command: DemoCommand) -> dict[str, Any]:
    """Run it; a signal has it end, with its verdict, and another one a second later without. Raises `EndAsked` where
    there is nothing to judge."""

    async def run() -> dict[str, Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        asked_at: list[float] = []

        def asked() -> None:
            if not asked_at or loop.time() - asked_at[0] >= ONE_REQUEST_S:
                asked_at.append(loop.time())
                task.cancel()

        for number in SIGNALS:
            loop.add_signal_handler(number, asked)
        return await command.run()

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise EndAsked from None
    finally:
        for number in SIGNALS:  # What is left has an end of its own, and the verdict's exit code.
            signal.signal(number, lambda number, frame: None)


BEGINNINGS = (
    "It was a fine morning, and", "The captain looked at the sea", "She opened the letter and read", "In the old house",
    "Nobody in the village knew", "He had walked for three days", "When the rain began", "The king said to his son",
)  # fmt: skip
"""What prompts begin with; the demo model has read old stories."""
TOKENS = 200
"""Of an answer: so long that a strike finds some under way."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request and the answer to it, known from before the trouble."""

    body: dict[str, Any]
    answer: str = ""


@dataclass
class Answers:
    """What became of the requests."""

    exact: int = 0
    replayed: int = 0
    """Exact ones that a worker had to begin anew, or to take over."""
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0

    @property
    def asked(self) -> int:
        return self.exact + len(self.wrong) + len(self.failed)


def questions(model: str, count: int, seed: int) -> list[Question]:
    """Greedy and drawn answers in turn, to prompts of unlike length that share their beginnings."""
    rng, out = random.Random(seed), []
    for number in range(count):
        prompt = " ".join(rng.choice(BEGINNINGS) for _ in range(rng.randint(1, 12)))
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"temperature": 0.8, "seed": rng.randrange(1 << 30)} if number % 2 else {"temperature": 0}
        out.append(Question(body))
    return out


class DemoLoad:
    """The clients."""

    def __init__(self, client: httpx.AsyncClient, asked: list[Question], clients: int, seed: int) -> None:
        """`client` has the endpoint's address; `asked` are questions without answers."""
        self._client, self._asked, self._clients, self._seed = client, asked, clients, seed
        self.answers = Answers()
        self._over = False

    async def learn(self) -> None:
        """Ask everything once, while nothing disturbs it. Raises `httpx.HTTPError` and `ValueError`."""
        found = []
        for question in self._asked:
            text, _ = await self._ask(question.body)
            found.append(Question(question.body, text))
        self._asked = found

    async def run(self) -> None:
        """Ask until `stop`, then finish what is under way."""
        self._over = False
        await asyncio.gather(*(self._ask_on(number) for number in range(self._clients)))

    def stop(self) -> None:
        self._over = True

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(f"{self._seed}:{number}")
        while not self._over:
            question = rng.choice(self._asked)
            try:
                text, again = await self._ask(question.body)
            except (httpx.HTTPError, ValueError) as error:
                self.answers.failed.append(str(error) or type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            if text == question.answer:
                self.answers.exact += 1
                self.answers.replayed += again
                self.answers.tokens += TOKENS
            else:
                self.answers.wrong.append(f"{question.body['prompt'][:40]}: {text[:60]!r} not {question.answer[:60]!r}")

    async def _ask(self, body: dict[str, Any]) -> tuple[str, bool]:
        """The whole text of a streamed answer, and whether workers had to change for it. Raises `ValueError` where the
        stream says an error or breaks off."""
        text, again, events, data = "", False, SseReader(), b""
        headers = {"X-Twinpool-Timeline": "1"}
        async with self._client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as got:
            if got.status_code != 200:
                raise ValueError(f"status {got.status_code}: {(await got.aread())[:200]!r}")
            async for received in got.aiter_bytes():
                for data in events.feed(received):
                    event = {} if data == DONE else json.loads(data)
                    if "error" in event:
                        raise ValueError(str(event["error"])[:200])
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
                    timeline = event.get("twinpool") or {}
                    again |= timeline.get("attempts", 1) > 1 or bool(timeline.get("migrations"))
        if data != DONE:
            raise ValueError("the answer broke off")
        return text, again


Row = Mapping[str, Any]
Ready = Mapping[str, Sequence[Row]]
"""The workers that serve, by role."""
LOOKS, LOOK_S = 15, 0.2
"""How often, and at which distance in seconds, workers are looked at until one of them runs something."""


class DemoStrikes:
    """Strikes one after the other. The last worker of a role that serves is left alone: its pool would have to wait.

    A strike is to hit requests. So its victim is drawn by how many each worker runs, and where none runs any (prompts
    of the demo take milliseconds) the workers are looked at for a while; one that idles is struck only after that.
    """

    def __init__(
        self,
        operator: AdminClient,
        rng: random.Random,
        kill: Callable[[int, int], None] = os.kill,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`pause` waits for so many seconds."""
        self._operator, self._random, self._kill, self._pause = operator, rng, kill, pause
        self._next = 0
        self.done = 0

    def strike(self) -> str:
        """Strike once, where the pools are whole; returns what was done, in words. Raises `CommandRefused` and what
        `AdminClient` raises."""
        rows = self._operator.rows()
        if any(row["state"] not in ("ready", "left") for row in rows):
            return ""
        ready = {
            role: [row for row in rows if row["role"] == role and row["state"] == "ready"]
            for role in ("prefill", "decode")
        }
        strikes = (
            self._kill_decode, self._drain, self._kill_prefill, self._stop, self._change_role, self._scale,
        )  # fmt: skip
        said = strikes[self._next % len(strikes)](ready)
        self._next += 1
        self.done += bool(said)
        return said

    def _victim(self, rows: Sequence[Row]) -> Row | None:
        """One of several workers of a role on this host, drawn by how many requests each runs."""
        here: Sequence[Row] = ()
        for look in range(LOOKS):
            if look:
                self._pause(LOOK_S)
                kind = rows[0]["role"], "ready"
                rows = [row for row in self._operator.rows() if (row["role"], row["state"]) == kind]
            here = [row for row in rows if row["node"] == socket.gethostname() and row["pid"]]
            if len(rows) < 2 or not here:
                return None
            if busy := [row for row in here if row["running"]]:
                return self._random.choices(busy, [row["running"] for row in busy])[0]
        return self._random.choice(here)

    def _signal(self, rows: Sequence[Row], number: int, what: str) -> str:
        row = self._victim(rows)
        if row is None:
            return ""
        self._kill(row["pid"], number)
        return f"{row['name']} {what} while it ran {row['running']} requests"

    def _kill_decode(self, ready: Ready) -> str:
        return self._signal(ready["decode"], signal.SIGKILL, "was killed (SIGKILL)")

    def _kill_prefill(self, ready: Ready) -> str:
        return self._signal(ready["prefill"], signal.SIGKILL, "was killed (SIGKILL)")

    def _stop(self, ready: Ready) -> str:
        return self._signal(ready["decode"], signal.SIGSTOP, "was stopped for good (SIGSTOP)")

    def _drain(self, ready: Ready) -> str:
        row = self._victim(ready["decode"])
        if row is None:
            return ""
        name = urllib.parse.quote(row["name"], safe="")
        self._operator.call("POST", f"/cluster/restart/{name}")
        return f"{row['name']} drains and starts again; what it ran, {row['running']} requests, moves"

    def _change_role(self, ready: Ready) -> str:
        """Of the larger pool, so that the next one takes it back."""
        role = max(ready, key=lambda role: (len(ready[role]), role == "decode"))
        other = "prefill" if role == "decode" else "decode"
        row = self._victim(ready[role])
        if row is None:
            return ""
        self._operator.call("POST", f"/cluster/role/{urllib.parse.quote(row['name'], safe='')}?role={other}")
        return f"{row['name']} becomes a {other} worker, in the same process"

    def _scale(self, ready: Ready) -> str:
        """To two of each role, or to three decode workers where there are two."""
        wanted = 3 if (len(ready["prefill"]), len(ready["decode"])) == (2, 2) else 2
        self._operator.call("POST", f"/cluster/scale?prefill=2&decode={wanted}")
        return f"scaled to 2 prefill and {wanted} decode workers"
