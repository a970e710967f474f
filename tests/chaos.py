"""Everything that can go wrong, at once, through the real cluster: `python -m tests.chaos --minutes 30 --seed 1`.

Clients ask without pause; each answer is compared, token by token, with what an undisturbed run and the oracle said
before the trouble began. Some clients leave. Meanwhile one fault after the other strikes, each of its kinds equally
often: workers and single ranks are killed and stopped, one hangs, connections between router and workers and between
workers are cut, silenced and slowed by a proxy, workers are drained and taken back and change their role, the disk of
the storage tier fills up (a small file system of its own), host memory is always full, being much too small, and all
that runs is retracted now and then.

Every request ends in its exact answer or by its own client; anything else is a failure, since one worker of each role
is always alive or on its way back. One seed decides what is asked and what strikes when. `--state FILE` keeps counts,
so that a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.proxy import Proxy, Relay, proxying
from tests.serving import Serving, complete, serving, until

ROLES = ("prefill", "decode")
PROMPTS, TOKENS, LONGEST, AT_ONCE = 40, 48, 400, 8
LEAVES = 0.15
"""Share of the clients that don't wait for their answer's end."""
DISK_MIB = 4
FEW = 4
BACK_S = 300.0
"""A worker that was struck is back within this time, on a machine with much else to do."""


@dataclass(frozen=True)
class Ask:
    """A prompt and how to ask it, and the one right answer."""

    prompt: list[int]
    body: dict[str, Any]
    tokens: list[int]


@dataclass
class Tally:
    """What has happened, across resumes."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory_mib: dict[str, list[float]] = field(default_factory=dict)
    """By process that lives through it: resident memory, at intervals."""

    def save(self, path: Path | None) -> None:
        if path is not None:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(self.__dict__))
            fresh.replace(path)

    @classmethod
    def load(cls, path: Path | None, seed: int) -> Tally:
        if path is None or not path.exists():
            return cls(seed)
        found = json.loads(path.read_text())
        if found["seed"] != seed:
            raise SystemExit(f"{path} is of a run with seed {found['seed']}, not {seed}: remove it or give that seed")
        found |= {key: Counter(found[key]) for key in ("faults", "outcomes")}
        return cls(**found)


class Chaos:
    """The clients, and what strikes."""

    def __init__(
        self, cluster: Serving, proxy: Proxy, asks: list[Ask], tally: Tally, disk: Path | None, pause_s: float
    ) -> None:
        """`pause_s`: between two faults, on average. `disk`: the small file system of the storage tier, if there is."""
        self.cluster, self.proxy, self.asks, self.tally = cluster, proxy, asks, tally
        self._disk, self._pause_s = disk, pause_s
        self._random = random.Random(f"{tally.seed}:{tally.seconds:.0f}")
        self._bag: list[str] = []
        self._over = False
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
        }
        if disk is not None:
            self.faults["fill the disk"] = self.fill_the_disk
        if any("/cluster/role/" in path for path in httpx.get(f"{cluster.url}/openapi.json").json()["paths"]):
            self.faults["change a role"] = self.change_a_role

    # ------------------------------------------------------------ the run

    async def run(self, seconds: float) -> None:
        """Ask and strike for so long, then mend everything and let what runs end."""
        end, self._over = time.monotonic() + seconds, False
        limits = httpx.Limits(max_connections=4 * AT_ONCE)
        async with httpx.AsyncClient(base_url=self.cluster.url, timeout=300, limits=limits) as client:
            self._client = client
            clients = [asyncio.create_task(self._ask_on(n)) for n in range(AT_ONCE)]
            while time.monotonic() < end and not self.tally.failures:
                await asyncio.sleep(self._random.uniform(0.5, 1.5) * self._pause_s)
                await self._strike()
                self._measure()
            self._over = True
            await asyncio.gather(*clients)
        self.tally.seconds += seconds

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(f"{self.tally.seed}:{self.tally.seconds:.0f}:{number}")
        while not self._over:
            ask = rng.choice(self.asks)
            leaves_after = rng.uniform(0.0, 0.6) if rng.random() < LEAVES else None
            body = self.cluster.body(ask.prompt, **ask.body, stream=rng.random() < 0.7)
            try:
                async with asyncio.timeout(leaves_after):
                    answer = await complete(self._client, body)
            except TimeoutError:
                self.tally.outcomes["left"] += 1
                continue
            except (AssertionError, httpx.HTTPError) as error:
                self.tally.outcomes["failed"] += 1
                self.tally.failures.append(f"{type(error).__name__}: {str(error)[:500]}")
                return
            self.tally.outcomes["answered"] += 1
            self.tally.outcomes["replayed"] += answer.twinpool["attempts"] > 1
            if answer.tokens != ask.tokens:
                self.tally.outcomes["wrong"] += 1
                self.tally.failures.append(f"wrong: {ask.body} {answer.twinpool} {answer.tokens} not {ask.tokens}")

    async def _strike(self) -> None:
        """The next fault of the bag, which holds each kind once; one that finds nobody to strike comes again soon."""
        if len(self._bag) < FEW:
            fresh = sorted(self.faults)
            self._random.shuffle(fresh)
            self._bag += fresh
        name = self._bag.pop()
        if await self.faults[name]():
            self.tally.faults[name] += 1
        else:
            self._bag.insert(self._random.randrange(len(self._bag) + 1), name)

    # ------------------------------------------------------------ faults

    async def _ready(self, role: str, least: int = 2) -> list[dict[str, Any]]:
        """Workers of a role that serve, if there are so many: the last one is not killed."""
        answer = await self._client.get("/cluster/status")
        rows = [w for w in answer.json()["workers"] if w["role"] == role]
        ready = [w for w in rows if w["state"] == "ready" and not w["stalled_s"]]
        return ready if len(ready) >= least else []

    async def _victim(self, role: str | None = None, least: int = 2) -> dict[str, Any] | None:
        ready = await self._ready(role or self._random.choice(ROLES), least)
        return self._random.choice(ready) if ready else None

    async def kill(self, role: str) -> bool:
        victim = await self._victim(role)
        if victim is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGKILL)
        return True

    async def strike_rank(self, number: signal.Signals) -> bool:
        """A process of a worker that is not its leader. One that is stopped is found as soon as it is to compute."""
        leaders = {w["pid"]: w["name"] for w in await self._ready("prefill")}
        others = [p for p in _worker_processes(self.cluster) if p.pid not in leaders and _rank_of(p)]
        if not leaders or not others:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            self._random.choice(others).send_signal(number)
        return True

    async def stop_and_go_on(self) -> bool:
        """Shorter or longer than a lease."""
        victim = await self._victim()
        if victim is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(0.2, 5.0))
            os.kill(victim["pid"], signal.SIGCONT)
        return True

    async def stop_for_good(self) -> bool:
        victim = await self._victim()
        if victim is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim["pid"], signal.SIGSTOP)
        return True

    def slowed(self, relay: Relay) -> None:
        self.proxy.slow(relay, delay_s=self._random.uniform(0.01, 0.3), bytes_per_s=self._random.choice([0, 2e5]))

    async def link(self, kind: str, trouble: Callable[[Relay], None]) -> bool:
        victim = await self._victim({"control": "prefill", "data": "decode"}.get(kind), least=1)
        if victim is None:
            return False
        name = str(victim["pid"]) if kind == "data" else victim["name"]
        found = [r for r in self.proxy.find(kind, name) if r.open]
        if not found:
            return False
        trouble(found[-1])
        await asyncio.sleep(self._random.uniform(0.1, 4.0))
        self.proxy.mend(found[-1])
        return True

    async def drain_and_undrain(self) -> bool:
        """Taken back while it still has work; where it had none, it is not drained: it would leave for good."""
        victim = await self._victim()
        if victim is None or not victim["running"]:
            return False
        drained = await self._client.post(f"/cluster/drain/{victim['name']}")
        undrained = await self._client.post(f"/cluster/undrain/{victim['name']}")
        return drained.status_code == undrained.status_code == 200

    async def change_a_role(self) -> bool:
        """Of a worker of the larger pool: what it runs is handed on, and it comes back in the other one."""
        ready = {role: await self._ready(role) for role in ROLES}
        role = max(ROLES, key=lambda role: len(ready[role]))
        if not ready[role]:
            return False
        victim, other = self._random.choice(ready[role]), ROLES[role == ROLES[0]]
        answer = await self._client.post(f"/cluster/role/{victim['name']}", params={"role": other})
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

    def _measure(self) -> None:
        """Memory of what lives through everything: the command itself and its router."""
        root = psutil.Process(self.cluster.process.pid)
        routers = [("router", p) for p in root.children() if "router.main" in " ".join(_command(p))]
        for name, process in [("serve", root), *routers]:
            self.tally.memory_mib.setdefault(name, []).append(round(process.memory_info().rss / 2**20, 1))

    def finish(self) -> None:
        """Mend, wait until all are back, and recount everything."""
        for relay in self.proxy.relays:
            self.proxy.mend(relay)
        if self._disk is not None:
            (self._disk / "filler").unlink(missing_ok=True)
        until(self._all_back, "all workers to be back", BACK_S)
        self.cluster.settle()
        metrics = self.cluster.metrics()
        tiers = {'tier="host",what="left_out"': "host memory full", 'tier="storage",what="failed"': "disk full"}
        for labels, name in tiers.items():
            marks = labels.split(",")
            value = sum(v for k, v in metrics.items() if "moved_pages_total" in k and all(m in k for m in marks))
            self.tally.outcomes[name] += int(value) - self._seen[name]
            self._seen[name] = int(value)
        hung = sum("hung: " in line for line in self.cluster.lines)
        self.tally.faults["hang"] += hung - self._seen["hang"]
        self._seen["hang"] = hung

    def _all_back(self) -> bool:
        return all(w["state"] in ("ready", "left") for w in self.cluster.status().values())


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _worker_processes(cluster: Serving) -> list[psutil.Process]:
    found = psutil.Process(cluster.process.pid).children(recursive=True)
    return [p for p in found if any("WorkerActor" in part for part in _command(p))]


def _rank_of(process: psutil.Process) -> bool:
    """Whether it is a follower: it writes a log of its own."""
    try:
        return any(".rank" in Path(f.path).name for f in process.open_files())
    except psutil.Error:
        return False


# ---------------------------------------------------------------- the scene


def small_disk(folder: Path) -> list[str]:
    """The start of a command that sees a small file system at `folder`; empty where this machine allows none."""
    script = f'mount -t tmpfs -o size={DISK_MIB}m none "{folder}" && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        allowed = False
    return prefix if allowed else []


def sections(proxy: Proxy, storage: Path, plane: str) -> dict[str, Any]:
    return {
        "transfer": {"plane": plane, "link_timeout_s": 2, "room_timeout_s": 20},
        "cache": {
            "device_tokens": 6000, "host_bytes": 400_000, "storage.backend": "file", "storage.path": str(storage),
            "storage.timeout_s": 2,
        },
        "prefill": {"chunk_tokens": 128, "tp": 2},
        # On a machine with much else to do a worker takes minutes to come back.
        "router": {"worker_wait_s": BACK_S},
        "cluster": {
            "lease_s": 4, "stall_s": 8, "rank_timeout_s": 6, "restart_limit": 100_000, "start_timeout_s": BACK_S,
        },
        "faults": {"proxy": proxy.door, "hang": "decode-1:400", "retract_every": 60},
    }  # fmt: skip


def learn(cluster: Serving, oracle: Any, seed: int, count: int) -> list[Ask]:
    """Every prompt's answer, undisturbed: greedy ones are the oracle's, drawn ones are drawn from its distribution."""
    from contracts.sampling import SamplingParams
    from tests.checkpoints import compare, compare_sampled

    rng = random.Random(seed)
    asks = []
    for number in range(count):
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, LONGEST))]
        body: dict[str, Any] = {"max_tokens": TOKENS}
        if number % 2:
            body |= {"temperature": 0.8, "top_k": 40, "seed": rng.randrange(1 << 40)}
        asks.append(Ask(prompt, body, []))
    out = []
    for ask, tokens in zip(asks, asyncio.run(_undisturbed(cluster, asks)), strict=True):
        drawn = "seed" in ask.body
        params = SamplingParams(**ask.body) if drawn else SamplingParams(TOKENS)
        verdict = compare_sampled(oracle, ask.prompt, tokens, params) if drawn else compare(oracle, ask.prompt, tokens)
        assert verdict.equal, (ask.body, verdict)
        out.append(Ask(ask.prompt, ask.body, tokens))
    return out


async def _undisturbed(cluster: Serving, asks: list[Ask]) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
        answers = await asyncio.gather(*(complete(client, cluster.body(a.prompt, **a.body)) for a in asks))
    return [answer.tokens for answer in answers]


@contextmanager
def scene(base: Path, tally: Tally, plane: str, pause_s: float, prompts: int = PROMPTS) -> Iterator[Chaos]:
    """The cluster behind its proxy, and all answers known."""
    from tests.checkpoints import Oracle, make_checkpoint

    folder = make_checkpoint(base / "model", "llama", seed=41)
    storage = base / "disk"
    storage.mkdir(exist_ok=True)
    prefix = small_disk(storage)
    with proxying() as proxy:
        settings = sections(proxy, storage, plane)
        flags = ("--prefill", "2", "--decode", "2")
        started = serving(
            folder, base / "run", *flags, sections=settings, ready_within=240, prefix=prefix, orderly=False
        )
        with started as cluster:
            asks = learn(cluster, Oracle(folder), tally.seed, prompts)
            disk = Path(f"/proc/{cluster.process.pid}/root") / storage.relative_to("/") if prefix else None
            yield Chaos(cluster, proxy, asks, tally, disk, pause_s)


def report(tally: Tally) -> str:
    lines = [f"seed {tally.seed}, {tally.seconds / 60:.1f} minutes"]
    lines += ["faults:", *(f"  {count:5d} {name}" for name, count in sorted(tally.faults.items()))]
    lines += ["outcomes:", *(f"  {count:5d} {name}" for name, count in sorted(tally.outcomes.items()))]
    lines += ["memory, MiB, first and last quarter:"]
    for name, values in tally.memory_mib.items():
        quarter = max(1, len(values) // 4)
        first, last = sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter
        lines.append(f"  {name}: {first:.1f} -> {last:.1f}")
    return "\n".join([*lines, *(f"FAILED {failure}" for failure in tally.failures)])


def flat(values: list[float]) -> bool:
    """Whether resident memory stopped growing: its last quarter is no more than a tenth above its second."""
    quarter = len(values) // 4
    if quarter < 2:
        return True
    second, last = values[quarter : 2 * quarter], values[-quarter:]
    return sum(last) / quarter <= 1.1 * sum(second) / quarter + 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="in all, those of earlier runs of --state included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plane", choices=("shm", "zmq"), default="zmq")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two faults, on average")
    parser.add_argument("--round", type=float, default=120.0, help="seconds between two recounts of everything")
    parser.add_argument("--state", type=Path, help="file that keeps the counts, to go on after a break")
    args = parser.parse_args()
    tally = Tally.load(args.state, args.seed)
    with tempfile.TemporaryDirectory() as base, scene(Path(base), tally, args.plane, args.pause) as chaos:
        while tally.seconds < 60 * args.minutes and not tally.failures:
            asyncio.run(chaos.run(min(args.round, 60 * args.minutes - tally.seconds)))
            chaos.finish()
            tally.save(args.state)
            print(report(tally), flush=True)
    missing = [name for name in chaos.faults if not tally.faults[name]]
    grown = [name for name, values in tally.memory_mib.items() if not flat(values)]
    if missing or grown:
        print(f"never happened: {missing}; memory grew: {grown}", flush=True)
    return 1 if tally.failures or missing or grown else 0


if __name__ == "__main__":
    sys.exit(main())
