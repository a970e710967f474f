"""Everything that can go wrong, at once, through the real cluster.

`python -m tests.support.chaos --minutes 30 --seed 1`

Clients ask without pause; each answer is compared, token by token, with what an undisturbed run and the oracle said
before the trouble began. Some clients leave. Meanwhile one fault after the other strikes (`chaos_faults`), each
of its kinds equally often: workers and single ranks are killed and stopped, one hangs, connections between router and
workers and between workers are cut, silenced and slowed by a proxy, workers are drained and taken back and change their
role, the disk of the storage tier fills up (a small file system of its own), host memory is always full, being much too
small, and all that runs is retracted now and then. Controllers, routers, the supervisor, Ray's control store and the
server that has their tables are killed and stopped, and operators add, restart, drain and cordon, apply settings and
upgrade to another build and back (`tests.support.chaos_control_plane`).

Every request ends in its exact answer or by its own client; anything else is a failure, since one worker of each role
is always alive or on its way back. A client whose router died comes back with its key. After each round the operator
has the pools put right, and everything is recounted. At the end `twinpool down` must leave nothing, and memory must
have stopped growing (`tests.support.chaos_books`).

One seed decides what is asked and what strikes when. `--state FILE` keeps the counts after each round, so that a run
that was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.cache.storage.rigs import Server
from tests.support.changing_cluster import detached
from tests.support.chaos_books import Tally, Watch, report
from tests.support.chaos_faults import BACK_S, Ask, Chaos, Scene
from tests.support.fault_proxy import Proxy, proxying
from tests.support.redis_servers import LedgerServer
from tests.support.served_cluster import Serving, complete

PROMPTS, TOKENS, LONGEST = 40, 48, 400
LONG, LONG_TOKENS = 6, 240
DISK_MIB = 4
ROUND_S = 300.0


def small_disk(folder: Path) -> list[str]:
    """The start of a command that sees a small file system at `folder`; empty where this machine allows none."""
    script = f'mount -t tmpfs -o size={DISK_MIB}m none "{folder}" && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        allowed = False
    return prefix if allowed else []


def sections(proxy: Proxy, storage: Path, plane: str, server: LedgerServer | None) -> dict[str, Any]:
    kept = {"ledger": server.url, "ray_storage": server.url} if server is not None else {}
    return {
        # Copies and sends beside the steps: more can go wrong, and on a GPU it is always so.
        "engine": {"copy_threads": "on"},
        "transfer": {"plane": plane, "link_timeout_s": 2, "room_timeout_s": 20},
        "cache": {
            "device_tokens": 6000, "host_bytes": 400_000, "storage.backend": "file", "storage.path": str(storage),
            "storage.timeout_s": 2,
        },
        "prefill": {"chunk_tokens": 128, "tp": 2},
        # On a machine with much else to do a worker takes minutes to come back.
        "router": {"worker_wait_s": BACK_S, "stall_s": 15},
        "cluster": {
            "lease_s": 6, "stall_s": 8, "rank_timeout_s": 6, "restart_limit": 100_000, "start_timeout_s": BACK_S,
            "leader_lease_s": 2, "standby_controllers": 1, **kept,
        },
        "faults": {"proxy": proxy.door, "hang": "decode-1:600,decode-0:1200", "retract_every": 60},
    }  # fmt: skip


def learn(cluster: Serving, oracle: Any, seed: int, count: int, long: int) -> list[Ask]:
    """Every prompt's answer, undisturbed: greedy ones are the oracle's, drawn ones are drawn from its distribution.
    The last `long` of them are long."""
    from tests.support.checkpoints import compare, compare_sampled
    from twinpool.contracts.sampling_params import SamplingParams

    rng = random.Random(seed)
    asks = []
    for number in range(count + long):
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, LONGEST))]
        body: dict[str, Any] = {"max_tokens": TOKENS if number < count else LONG_TOKENS}
        if number % 2:
            body |= {"temperature": 0.8, "top_k": 40, "seed": rng.randrange(1 << 40)}
        asks.append(Ask(prompt, body, []))
    out = []
    for ask, tokens in zip(asks, asyncio.run(_undisturbed(cluster, asks)), strict=True):
        drawn = "seed" in ask.body
        params = SamplingParams(**ask.body) if drawn else SamplingParams(ask.body["max_tokens"])
        verdict = compare_sampled(oracle, ask.prompt, tokens, params) if drawn else compare(oracle, ask.prompt, tokens)
        assert verdict.equal, (ask.body, verdict)
        out.append(Ask(ask.prompt, ask.body, tokens))
    return out


async def _undisturbed(cluster: Serving, asks: list[Ask]) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300) as client:
        answers = await asyncio.gather(*(complete(client, cluster.body(a.prompt, **a.body)) for a in asks))
    return [answer.tokens for answer in answers]


Say = Callable[[str], None]


@contextmanager
def ledger_server(folder: Path) -> Iterator[LedgerServer | None]:
    """A server for the tables of controllers and of Ray's control store; None where this machine has none."""
    if Server.binary() is None:
        yield None
        return
    folder.mkdir()
    server = LedgerServer(folder, "--appendonly", "yes", "--appendfsync", "always").start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def scene(
    base: Path, tally: Tally, pause_s: float, prompts: int = PROMPTS, long: int = LONG, say: Say = lambda line: None,
) -> Iterator[Chaos]:  # fmt: skip
    """The cluster behind its proxy, and all answers known. At its end it is taken down, and looked for."""
    from tests.support.checkpoints import Oracle, make_checkpoint

    base = base / str(tally.lives)
    folder = make_checkpoint(base / "model", "llama", seed=41)
    storage = base / "disk"
    storage.mkdir()
    prefix = small_disk(storage)
    with ExitStack() as stack:
        proxy = stack.enter_context(proxying())
        server = stack.enter_context(ledger_server(base / "server"))
        # A path as short as Ray needs it.
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        watch: Watch | None = None
        try:
            with detached(
                folder, base / "run", "--prefill", "2", "--decode", "2", "--routers", "2",
                sections=sections(proxy, storage, tally.plane, server), prefix=prefix, temporary=temporary,
                ready_within=240,
            ) as cluster:  # fmt: skip
                tally.lives += 1
                watch = Watch(cluster, tally, temporary)
                asks = learn(cluster, Oracle(folder), tally.seed, prompts, long)
                disk = Path(f"/proc/{cluster.keeper.pid}/root") / storage.relative_to("/") if prefix else None
                yield Chaos(Scene(cluster, proxy, server, disk, base), asks, tally, watch, pause_s, say)
        finally:
            if watch is not None:
                tally.failures += [f"left behind: {what}" for what in watch.left_over()]


def rounds(base: Path, tally: Tally, seconds: float, pause_s: float, after: Say, say: Say) -> list[str]:
    """Go on until the tally has so many seconds; returns the kinds of faults that never happened. `after` each round
    gets a report."""
    if tally.seconds >= seconds or tally.failures:
        return []
    with scene(base, tally, pause_s, say=say) as chaos:
        while tally.seconds < seconds and not tally.failures:
            asyncio.run(chaos.run(min(ROUND_S, seconds - tally.seconds)))
            if not tally.failures:
                chaos.finish()
            after(report(tally))
        return chaos.missing()


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="in all, those of earlier runs of --state included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plane", choices=("shm", "zmq", "nixl", "staged"), default="zmq")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two faults, on average")
    parser.add_argument("--state", type=Path, help="file that keeps the counts, to go on after a break")
    args = parser.parse_args()
    # As Ctrl-C: what was started is ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tally = Tally.load(args.state, args.seed, args.plane)

    def after(text: str) -> None:
        tally.save(args.state)
        print(text, flush=True)

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    missing: list[str] = []
    with tempfile.TemporaryDirectory() as base:
        try:
            missing = rounds(Path(base), tally, 60 * args.minutes, args.pause, after, say)
        except AssertionError as error:  # Of the recount, or of the end.
            tally.failures.append(f"{time.strftime('%H:%M:%S')} {error}")
    after(f"{report(tally)}\nnever happened: {missing}; never stopped growing: {tally.grown()}")
    return 1 if tally.failures or missing or tally.grown() else 0


if __name__ == "__main__":
    sys.exit(main())
