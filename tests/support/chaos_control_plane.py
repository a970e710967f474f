"""What strikes the control plane of `tests.support.chaos`, and what operators change meanwhile.

Of the processes that no request needs, and of the routers, any may be killed or stopped at any time: the next one takes
over. What operators change takes long, so that it goes on while further faults strike; it may then be refused or time
out, which is counted, and at a round's end the cluster must take the same change (`Operators.put_right`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from tests.support.changing_cluster import UPGRADE_S, Detached, another_build
from tests.support.redis_servers import LedgerServer

CONTROLLER, SUPERVISOR = "twinpool.cluster.controller.controller_process", "twinpool.cluster.serve.detached_cluster"
CHANGE_S = 300.0
SIZES = "prefill=2", "decode=2"
Strike = Callable[[], Awaitable[bool]]


class ControlPlaneFaults:
    """Kills and stops of controllers, routers, the supervisor, Ray's control store and the ledger's server."""

    def __init__(
        self, cluster: Detached, server: LedgerServer | None, rng: random.Random, say: Callable[[str], None]
    ) -> None:
        """`server`: has the tables of the controllers and of Ray's control store; None: they are in files and in
        memory."""
        self._cluster, self._server, self._random, self._say = cluster, server, rng, say
        self.faults: dict[str, Strike] = {
            "kill a controller": lambda: self._kill(CONTROLLER),
            "stop a controller and go on": self._stop_a_controller,
            "kill a router": lambda: self._kill("twinpool.router.main", least=2),
            "stop a router": lambda: self._kill("twinpool.router.main", least=2, number=signal.SIGSTOP),
            "kill the supervisor": lambda: self._kill(SUPERVISOR),
        }
        if server is not None:
            self.faults |= {
                "kill Ray's control store": self._kill_the_control_store,
                "take the ledger's server away": self._take_the_server_away,
            }

    async def _one(self, *words: str, least: int = 1) -> psutil.Process | None:
        found = await asyncio.to_thread(self._cluster.having, *words)
        return self._random.choice(found) if len(found) >= least else None

    async def _kill(self, *words: str, least: int = 1, number: signal.Signals = signal.SIGKILL) -> bool:
        victim = await self._one(*words, least=least)
        if victim is None:
            return False
        self._say(f"{number.name} to {words[0]}: pid {victim.pid}")
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
        return True

    async def _stop_a_controller(self) -> bool:
        """Shorter or longer than its lease."""
        victim = await self._one(CONTROLLER)
        if victim is None:
            return False
        self._say(f"stop and go on: controller, pid {victim.pid}")
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(0.2, 8.0))
            victim.send_signal(signal.SIGCONT)
        return True

    async def _kill_the_control_store(self) -> bool:
        return await self._kill("gcs/gcs_server")

    async def _take_the_server_away(self) -> bool:
        """Shorter or longer than a controller's lease, and a worker's."""
        assert self._server is not None
        self._say("the ledger's server is gone")
        self._server.kill()
        await asyncio.sleep(self._random.uniform(0.2, 8.0))
        self._server.start()  # By this thread, with whose end it ends.
        return True


class Operators:
    """Changes that an operator makes by command, one at a time, while other things strike."""

    def __init__(
        self, cluster: Detached, base: Path, rng: random.Random, say: Callable[[str], None], outcomes: Counter[str]
    ) -> None:
        """`base`: a folder for the other build and for settings."""
        self._cluster, self._base, self._random, self._say = cluster, base, rng, say
        self._outcomes = outcomes
        self._under_way: asyncio.Task[None] | None = None
        self._chunk = 128
        self._python = Path(sys.executable)
        """Of the build that the cluster was brought to last."""
        self.faults: dict[str, Strike] = {
            "grow and shrink": lambda: self._begin(self._grow_and_shrink),
            "restart by command": lambda: self._begin(self._restart),
            "drain to the end and take back": lambda: self._begin(self._drain_and_take_back),
            "cordon and uncordon": lambda: self._begin(self._cordon),
            "apply settings": lambda: self._begin(self._apply),
            "upgrade": lambda: self._begin(self._upgrade),
        }

    async def _begin(self, change: Callable[[], Awaitable[None]]) -> bool:
        if self._under_way is not None and not self._under_way.done():
            return False
        if self._under_way is not None:
            self._under_way.result()
        self._under_way = asyncio.create_task(change())  # type: ignore[arg-type]
        return True

    async def finish(self) -> None:
        """Wait until what is under way has ended."""
        if self._under_way is not None:
            await self._under_way

    def put_right(self) -> list[str]:
        """Once nothing strikes any more, have the pools as they were, in one build with one set of settings: an
        operator who repeats what failed must succeed. Returns what didn't."""
        node = next(row["node"] for row in self._cluster.status().values() if row["node"])
        builds = {row["build"] for row in self._cluster.status().values() if row["state"] not in ("left", "dead")}
        commands = [("uncordon", node), ("scale", *SIZES), ("apply", str(self._settings()))]
        if len(builds) > 1:
            commands.insert(1, ("upgrade", "--python", str(self._python)))
        return [failed for words in commands if (failed := self._failed(*words))]

    def _failed(self, *words: str) -> str:
        try:
            done = self._cluster.twinpool(*words, timeout=UPGRADE_S)
        except subprocess.TimeoutExpired as late:
            return f"{' '.join(words)}: no end in {UPGRADE_S:g} s: {str(late.stdout)[-500:]}"
        return "" if done.returncode == 0 else f"{' '.join(words)}: {done.stdout[-500:]} {done.stderr[-500:]}"

    async def _command(self, *words: str) -> bool:
        """Whether a command did what it was to do; while other things strike it need not."""
        try:
            done = await asyncio.to_thread(self._cluster.twinpool, *words, timeout=CHANGE_S)
        except subprocess.TimeoutExpired:
            self._say(f"{words[0]}: no end in {CHANGE_S:g} s")
            self._outcomes[f"{words[0]} that had no end"] += 1
            return False
        said = (done.stdout + done.stderr).strip().splitlines()
        self._say(f"{' '.join(words)}: {done.returncode}, {said[-1] if said else ''}")
        self._outcomes[f"{words[0]}: {'done' if done.returncode == 0 else 'refused'}"] += 1
        return done.returncode == 0

    async def _name(self, role: str = "") -> str:
        rows = await asyncio.to_thread(self._rows)
        ready = [name for name, row in rows.items() if row["state"] == "ready" and row["role"].startswith(role)]
        return str(self._random.choice(ready or ["decode-0"]))

    def _rows(self) -> dict[str, dict[str, str]]:
        done = self._cluster.twinpool("status", "--json")
        return {row["name"]: row for row in json.loads(done.stdout)["workers"]} if done.returncode == 0 else {}

    async def _grow_and_shrink(self) -> None:
        role = self._random.choice(("prefill", "decode"))
        await self._command("add", role, "--no-wait")
        await asyncio.sleep(self._random.uniform(0.0, 10.0))
        await self._command("scale", *SIZES)

    async def _restart(self) -> None:
        await self._command("restart", await self._name())

    async def _drain_and_take_back(self) -> None:
        name = await self._name()
        await self._command("drain", name, "--timeout", "60")
        await self._command("undrain", name)

    async def _cordon(self) -> None:
        rows = await asyncio.to_thread(self._rows)
        for row in [row for row in rows.values() if row["node"]][:1]:
            await self._command("cordon", row["node"])
            await asyncio.sleep(self._random.uniform(0.5, 4.0))
            await self._command("uncordon", row["node"])

    def _settings(self) -> Path:
        file = self._base / "apply.yaml"
        file.write_text(
            json.dumps({"prefill": {"chunk_tokens": self._chunk}, "router": {"write_timeout_s": self._chunk}})
        )
        return file

    async def _apply(self) -> None:
        self._chunk = 128 + 64 - self._chunk % 128  # 128 and 192 in turns
        await self._command("apply", str(self._settings()))

    async def _upgrade(self) -> None:
        """To another build, and back the next time."""
        here = Path(sys.executable)
        other = self._base / "another" / "venv" / "bin" / "python"
        self._python = other if self._python == here else here
        await asyncio.to_thread(another_build, self._base / "another")
        await self._command("upgrade", "--python", str(self._python))
