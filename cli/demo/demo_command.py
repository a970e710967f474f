"""The command `twinpool demo`: a cluster of the built-in model, load for it, and with ``--chaos`` trouble.

It serves with two prefill and two decode workers and has every finished answer computed again (`audit.fraction=1`).
First each question is asked once, undisturbed; then clients ask on, and every answer must be that one, to the letter.
The dashboard shows the same from inside.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from twinpool.cli.admin_client import AdminClient, ClusterNotFound, CommandRefused
from twinpool.cli.demo.demo_load import TIMEOUT_S, Answers, DemoLoad, questions
from twinpool.cli.demo.demo_strikes import DemoStrikes
from twinpool.cli.early_end import EndAsked
from twinpool.cli.own_cluster import own_cluster
from twinpool.cluster.serve.shutdown_signal import ONE_REQUEST_S
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
