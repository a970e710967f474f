"""A cluster under load whose parts are killed and whose pools change; every answer is compared with transformers.

`Load` keeps streams running on a thread of its own and keeps all answers. The functions below are what operators and
accidents do to the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.checkpoints import Oracle, compare
from tests.support.served_cluster import (
    COMMAND,
    READY,
    ROOT,
    Access,
    Answer,
    Serving,
    complete,
    environment,
    processes_of,
    until,
)
from twinpool.cluster.serve.detached_cluster import OUTPUT
from twinpool.contracts.build_id import PACKAGES, build_of

STREAMS = 6
TOKENS = 48
WAIT_S = 120.0
LAUNCH_S = 300.0
"""Four workers and two routers import torch at once, beside what else the machine does."""
UPGRADE_S = 400.0
"""Every process of a cluster starts anew in it, from source that is compiled first."""
FILE = "cluster.yaml"
"""Of a cluster that is launched by its file, in its runtime folder."""
COME_BACK = 5
"""How often a client whose connection broke comes back for its answer."""


@dataclass
class Load:
    """Streams that never cease, of a few prompts, so that the oracle computes each answer once."""

    url: str
    model: str
    prompts: list[list[int]]
    streams: int = STREAMS
    seed: int = 0
    """Of which prompts are asked for, and of the requests' keys."""
    access: Access = field(default_factory=Access)
    tokens: int = TOKENS
    """Of each answer."""
    more_fields: Mapping[str, Any] = field(default_factory=dict)
    """Of each request's body."""
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    resumed: int = 0
    """How often a client's connection broke and it came back with its key."""
    failures: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._all(ended)), name="load")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a stream hangs"

    async def _all(self, ended: threading.Event) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S, **self.access.web()) as client:
            await asyncio.gather(*[self._one(client, number, ended) for number in range(self.streams)])

    async def _one(self, client: httpx.AsyncClient, number: int, ended: threading.Event) -> None:
        rng = random.Random(self.seed * STREAMS + number)
        while not ended.is_set():
            which = rng.randrange(len(self.prompts))
            body = {
                "model": self.model, "prompt": self.prompts[which], "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "max_tokens": self.tokens, "stream": number % 3 > 0,
                **self.more_fields,
            }  # fmt: skip
            try:
                self.answers.append((which, await self._again_and_again(client, body, f"{number}-{rng.random()}")))
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    async def _again_and_again(self, client: httpx.AsyncClient, body: dict[str, Any], key: str) -> Answer:
        """An answer, for which its client comes back with its key while its router is gone."""
        for _ in range(COME_BACK):
            try:
                return await complete(client, body, key)
            except httpx.TransportError:
                self.resumed += 1
                await asyncio.sleep(0.2)
        return await complete(client, body, key)

    def more(self, count: int = 4) -> None:
        """Wait for so many answers more."""
        have = len(self.answers)
        until(lambda: len(self.answers) >= have + count or bool(self.failures), "answers", WAIT_S)

    def verify(self, oracle: Oracle) -> None:
        """Every answer is whole and the oracle's, and none was lost."""
        assert not self.failures, self.failures[:5]
        judged: dict[tuple[int, tuple[int, ...]], bool] = {}
        for which, answer in self.answers:
            assert len(answer.tokens) == self.tokens
            key = (which, tuple(answer.tokens))
            if key not in judged:
                judged[key] = compare(oracle, self.prompts[which], answer.tokens).equal
            assert judged[key], f"a wrong answer to prompt {which}"


def some_prompts(seed: int, count: int = 10) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(rng.randint(1, 300))] for _ in range(count)]


# ---------------------------------------------------------------- a detached cluster


class Detached(Serving):
    """A detached cluster, and its processes by what they are."""

    def __init__(self, launched: subprocess.CompletedProcess[str], runtime: Path) -> None:
        (url,) = [line.split(READY)[1].strip() for line in launched.stdout.splitlines() if READY in line]
        super().__init__(launched, runtime, launched.stdout.splitlines(), url)  # type: ignore[arg-type]
        (path,) = (runtime / "twinpool").glob("run-*.json")
        run = json.loads(path.read_text())
        self.keeper, self.logs = psutil.Process(run["pid"]), Path(run["logs"])
        self.folder = Path(self.keeper.cmdline()[5])
        self.mark = self.folder.name

    def processes(self) -> list[psutil.Process]:
        """All processes of the cluster, the keeper's included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                run = process.environ().get("TWINPOOL_RUN", "")  # Of several models, each has one below that of all.
                if run.split(".")[0] == self.mark or any(str(self.folder) in word for word in process.cmdline()):
                    found.append(process)
        return found

    def said(self) -> list[str]:
        """What `serve` would have shown in a terminal."""
        return (self.logs / OUTPUT).read_text().splitlines()

    def having(self, *words: str) -> list[psutil.Process]:
        """The processes whose command line has all these words, or whose program's path ends so; without the keeper."""

        def has(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                return bool(line) and all(word in line or line[0].endswith(f"/{word}") for word in words)
            return False

        return [process for process in self.processes() if process.pid != self.keeper.pid and has(process)]

    def one(self, *words: str) -> psutil.Process:
        """The one process whose command line has all these words."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = self.having(*words)
            return len(found) == 1

        try:
            until(look, f"one process of {' '.join(words)}", WAIT_S)
        except AssertionError as error:
            said = "\n".join(self.said()[-20:])
            raise AssertionError(f"{error}; there are {found}; the cluster said\n{said}") from None
        return found[0]


@contextlib.contextmanager
def detached(
    model: Path,
    runtime: Path,
    *flags: str,
    sections: dict[str, dict[str, Any]],
    prefix: Sequence[str] = (),
    temporary: Path | None = None,
    ready_within: float = LAUNCH_S,
    by_file: Mapping[str, Any] | None = None,
) -> Iterator[Detached]:
    """`twinpool serve --detach`, ended by `twinpool down`, after which nothing of it is there. `prefix`: a command that
    becomes it. `temporary`: where its temporary files go. `by_file`: what the section `launch` has, with which it is
    `twinpool up FILE` instead of flags."""
    runtime.mkdir(parents=True, exist_ok=True)
    if by_file:
        (runtime / FILE).write_text(json.dumps({"launch": {"model": str(model), "port": 0, **by_file}, **sections}))
        command = [*prefix, *COMMAND, "up", FILE]
    else:
        settings = [f"{s}.{key}={value}" for s, keys in sections.items() for key, value in keys.items()]
        command = [*prefix, *COMMAND, "serve", "--detach", "--model", str(model), "--port", "0", *flags]
        command += [part for setting in settings for part in ("--set", setting)]
    try:
        launched = subprocess.run(
            command,
            env=environment(runtime) | ({"TMPDIR": str(temporary)} if temporary is not None else {}),
            cwd=runtime,
            text=True,
            capture_output=True,
            timeout=ready_within,
            check=False,
        )
        assert launched.returncode == 0, launched.stdout + launched.stderr
    except BaseException:  # What a launch that came to nothing has started would run beside all tests after it.
        for process in processes_of(runtime):
            with contextlib.suppress(psutil.Error):
                process.kill()
        raise
    cluster = Detached(launched, runtime)
    try:
        yield cluster
    finally:
        everything = cluster.processes()
        down = cluster.twinpool("down", timeout=WAIT_S)
        _, alive = psutil.wait_procs(everything, timeout=60)
        for process in alive:
            process.kill()
        assert down.returncode == 0, down.stderr
        assert not alive, f"left behind by down: {alive}"
        assert not cluster.folder.exists()
        assert not list((runtime / "twinpool").glob("run-*.json"))


# ---------------------------------------------------------------- what is done to it


def ready(cluster: Serving, **pools: int) -> None:
    """Wait until each pool has so many workers that serve, and no other is on its way."""

    def whole() -> bool:
        done = cluster.twinpool("status", "--json")
        rows = json.loads(done.stdout)["workers"] if done.returncode == 0 else []
        there = {role: [w["state"] for w in rows if w["role"] == role and w["state"] != "left"] for role in pools}
        return all(there[role] == ["ready"] * count for role, count in pools.items())

    until(whole, f"{pools} to serve", WAIT_S)


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)


def command(cluster: Serving, *words: str, within_s: float = WAIT_S) -> None:
    done = cluster.twinpool(*words, timeout=within_s)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"


def kill_controller(cluster: Serving) -> None:
    """The controller is killed; workers keep their incarnations."""
    before = {name: row["incarnation"] for name, row in cluster.status().items()}
    controller = _controller(cluster)
    kill(controller)
    until(lambda: _controller(cluster).pid != controller.pid, "the next controller", WAIT_S)
    assert {name: row["incarnation"] for name, row in cluster.status().items()} == before


def _controller(cluster: Serving) -> psutil.Process:
    module = "twinpool.cluster.controller.controller_process"
    if isinstance(cluster, Detached):
        return cluster.one(module)
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [c for c in psutil.Process(cluster.process.pid).children() if module in c.cmdline()]
        return len(found) == 1

    until(look, "a controller", WAIT_S)
    return found[0]


def kill_supervisor(cluster: Detached) -> None:
    """The process that launches and restarts is killed, and a worker with it: the next one finds both."""
    supervisor = cluster.one("twinpool.cluster.serve.detached_cluster")
    victim = cluster.status()["decode-1"]
    kill(supervisor)
    os.kill(victim["pid"], signal.SIGKILL)
    until(
        lambda: cluster.one("twinpool.cluster.serve.detached_cluster").pid != supervisor.pid,
        "the next supervisor",
        WAIT_S,
    )
    ready(cluster, prefill=2, decode=2)
    back = cluster.status()["decode-1"]
    assert (back["incarnation"], back["settings"]) == (victim["incarnation"] + 1, victim["settings"])


def kill_router(cluster: Detached) -> None:
    """One of two routers is killed: its clients come back with their keys, to whichever is there."""
    router = cluster.one("twinpool.router.main", "router-1")
    kill(router)
    until(lambda: cluster.one("twinpool.router.main", "router-1").pid != router.pid, "the next router", WAIT_S)


def grow_and_shrink(cluster: Serving) -> None:
    command(cluster, "add", "decode")
    ready(cluster, prefill=2, decode=3)
    command(cluster, "scale", "prefill=2", "decode=2")


def _routers(cluster: Serving) -> set[int]:
    """The processes of a detached cluster's routers that aren't replaced."""
    if not isinstance(cluster, Detached):
        return set()
    state = json.loads((cluster.folder / "cluster.state").read_text())
    return {state["services"][f"router-{number}"][0] for number in range(2)}


def apply_settings(cluster: Serving) -> None:
    """A setting of each role, of routers and of controllers and the size of a pool change; every worker restarts once,
    and has the new settings, and each router is another process."""
    before = cluster.status()
    routers = _routers(cluster)
    chunk = 64 + 16 * (before["prefill-0"]["incarnation"] % 8)
    file = cluster.runtime / "apply.yaml"
    sections = {
        "pools": {"decode": 3}, "prefill": {"chunk_tokens": chunk}, "decode": {"max_batch_tokens": chunk // 2},
        "router": {"write_timeout_s": chunk}, "autoscaling": {"prefill": {"max_workers": chunk}},
    }  # fmt: skip
    file.write_text(json.dumps(sections))
    command(cluster, "apply", str(file))
    assert not routers & _routers(cluster)
    after = cluster.status()
    for name, row in before.items():
        if row["state"] == "ready":
            assert after[name]["settings"] != row["settings"]
            assert after[name]["incarnation"] == row["incarnation"] + 1, "restarted once"
    assert len({row["settings"] for row in after.values() if row["state"] == "ready"}) == 2, "one of each role"
    launched = cluster.runtime / FILE
    if not launched.exists():
        file.write_text(json.dumps({**sections, "pools": {"decode": 2}}))
        return command(cluster, "apply", str(file))
    said = launched.read_text()
    launched.write_text(json.dumps({**json.loads(said), "pools": {"prefill": 2, "decode": 2}}))
    up = cluster.twinpool("up", FILE, timeout=WAIT_S)
    assert up.returncode == 0, up.stdout + up.stderr
    assert "was launched with this file" in up.stdout
    assert "decode workers: 3 -> 2" in up.stdout
    again = cluster.twinpool("up", FILE, "--dry-run", timeout=WAIT_S)
    assert "the cluster has these settings" in again.stdout, again.stdout + again.stderr
    launched.write_text(json.dumps({**json.loads(said), "launch": {"model": "another"}}))
    refused = cluster.twinpool("up", FILE, timeout=WAIT_S)
    assert refused.returncode == 1
    assert "launch.model" in refused.stderr, refused.stderr
    launched.write_text(said)
    return None


def upgrade(cluster: Detached) -> None:
    """All of the cluster goes on in another build, and the next time back; no process of the one before serves on."""
    before = _builds(cluster)
    assert len(before) == 1
    here = build_of(ROOT)
    python = another_build(cluster.runtime / "another") if before == {here} else Path(sys.executable)
    command(cluster, "upgrade", "--python", str(python), within_s=UPGRADE_S)
    after = _builds(cluster)
    assert len(after) == 1
    assert after.isdisjoint(before)
    assert {here} in (before, after)
    for words in (
        ("twinpool.cluster.controller.controller_process",),
        ("twinpool.router.main", "router-0"),
        ("twinpool.router.main", "router-1"),
    ):
        assert cluster.one(*words).cmdline()[0] == str(python)


def upgrade_past_a_hung_router(cluster: Detached) -> None:
    """A router that is stopped can't hand its port over, and would keep the connections that the kernel gives it."""
    hung = cluster.one("twinpool.router.main", "router-0")
    hung.suspend()
    upgrade(cluster)
    assert not hung.is_running()


def _builds(cluster: Serving) -> set[str]:
    """The builds of all workers, and of the router that answers."""
    done = cluster.twinpool("status", "--json")
    assert done.returncode == 0, done.stderr
    return {row["build"] for row in json.loads(done.stdout)["workers"] if row["state"] != "left"}


@dataclass(frozen=True)
class SourceEdit:
    """A change of one file of a build."""

    path: str
    before: str
    after: str

    def make(self, source: Path) -> None:
        text = (source / self.path).read_text()
        assert text.count(self.before) == 1, f"{self.path} has other lines than it had"
        (source / self.path).write_text(text.replace(self.before, self.after))


def another_build(folder: Path, *edits: SourceEdit, at_start: str = "") -> Path:
    """An environment in `folder` with a copy of this source that differs, in a comment and by `edits`; returns its
    interpreter. `at_start`: Python that each of its processes runs first."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "twinpool", folder / "source" / "twinpool", ignore=leave, symlinks=True)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / "source" / package, ignore=leave)
        with (folder / "source" / "contracts" / "build_id.py").open("a") as file:
            file.write("\n# Another build.\n")
        for edit in edits:
            edit.make(folder / "source")
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=WAIT_S
        )
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # The libraries of this environment, but not this source.
        (packages / "twinpool.pth").write_text(f"{folder / 'source'}\n{sysconfig.get_path('purelib')}\n")
        if at_start:
            (packages / "sitecustomize.py").write_text(at_start)
    return python


def restart_one(cluster: Serving) -> None:
    command(cluster, "restart", "decode-0")
    command(cluster, "restart", "prefill-1")


def change_roles(cluster: Serving) -> None:
    command(cluster, "add", "decode")
    command(cluster, "role", "decode-2", "prefill")
    ready(cluster, prefill=3, decode=2)
    command(cluster, "role", "decode-2", "decode")
    command(cluster, "scale", "decode=2", "prefill=2")


def cordon_and_kill(cluster: Serving) -> None:
    """While its node is cordoned a dead worker waits; it starts when the node takes workers again."""
    node = next(iter(cluster.status().values()))["node"]
    command(cluster, "cordon", node)
    victim = cluster.status()["decode-1"]
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: cluster.status()["decode-1"]["state"] == "dead", "its death to be known", WAIT_S)
    command(cluster, "uncordon", node)


def once_around(cluster: Serving) -> None:
    """Every worker is drained, and comes back."""
    for name in sorted(cluster.status()):
        if cluster.status()[name]["state"] == "ready":
            command(cluster, "drain", name)
            command(cluster, "undrain", name)
            ready(cluster, prefill=2, decode=2)


Change = Callable[[Any], None]
DETACHED: tuple[Change, ...] = (kill_supervisor, kill_router, upgrade, upgrade_past_a_hung_router)
CHANGES: tuple[Change, ...] = (
    kill_controller, grow_and_shrink, apply_settings, restart_one, change_roles, cordon_and_kill, once_around
)  # fmt: skip
