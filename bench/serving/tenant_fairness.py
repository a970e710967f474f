"""Times to first token of one tenant while another floods the cluster, over two routers that share nothing.

    python -m bench.serving.tenant_fairness
    python -m bench.serving.tenant_fairness --flood 64 --rate 2 --input-tokens 64:400 --seconds 30

The flood keeps so many long prompts in flight, half at each router. The quiet tenant's prompts come at random times
(Poisson), the same in each way, by turns at both routers:

- `alone`: without the flood.
- `busy`: without it, beside a process that computes all the time as the worker does under a flood, at nobody's request:
  what a machine without a core to spare costs, which no order of prompts changes.
- `weight N`: the quiet tenant has a key of its own tenant, of that weight; the flood's is 1.
- `fcfs`: its key is of the flood's own tenant, whose requests are served first come, first served.

The second router is a process like the first, started with its arguments on another port.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, write_report
from bench.common.child_server import child_server, free_port, serving
from bench.common.load_client import TOKENS, LengthRange, LoadClient, synthetic
from twinpool.cli.load.open_loop import Ask, Content
from twinpool.cli.load.openai_client import EndpointError, Outcome
from twinpool.contracts.key_file import KeyFile, TenantLimits, mint_key, write_key_file

FLOOD = "flood"
UNFLOODED = ("alone", "busy")
COMPUTES = "import numpy; a = numpy.ones((256, 256), 'f4')\nwhile True: a @ a"


@dataclass(frozen=True)
class Wait:
    """The quiet tenant's times to first token in one way, all rounds together."""

    way: str
    sent: int
    failed: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    flood_tokens_s: float
    """Prompt tokens of the flood that were answered meanwhile, each second."""


@contextmanager
def second_router(url: str) -> Iterator[str]:
    """Another router of the cluster that answers at `url`: the same command, on a port of its own. Yields its URL."""
    port = url.rpartition(":")[2]
    first = next(
        process for process in psutil.process_iter(["cmdline"])
        if "twinpool.router.main" in (line := process.info["cmdline"] or []) and line[line.index("--port") + 1] == port
    )  # fmt: skip
    command = first.cmdline()
    ready = command.index("--ready-fd")
    del command[ready : ready + 2]
    own = free_port()
    command[command.index("--port") + 1] = str(own)
    url = f"http://127.0.0.1:{own}"
    with child_server(command, f"{url}/health", first.environ(), first.cwd()):
        yield url


@contextmanager
def computing() -> Iterator[None]:
    """A process that multiplies matrices on one core, until the end."""
    process = subprocess.Popen([sys.executable, "-c", COMPUTES], env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Clients:
    """The two tenants at the routers. `keys`: by way, and of the flood."""

    def __init__(self, urls: Sequence[str], model: str, keys: dict[str, str], args: argparse.Namespace) -> None:
        self._args = args
        self._at = {
            who: [LoadClient(url, model, [("Authorization", f"Bearer {key}")]) for url in urls]
            for who, key in keys.items()
        }
        self._contents = (Content(1_000_000 + number, *TOKENS) for number in count())
        self.flooded = 0
        """Prompt tokens of the flood that were answered."""

    async def _flood(self, router: LoadClient) -> None:
        """One long prompt after the other."""
        lengths = LengthRange.parse(self._args.flood_tokens)
        while True:
            (ask,) = synthetic(next(self._contents), 1, lengths, LengthRange(1, 1))
            outcome = await router.ask(ask.tokens, ask.output_tokens)
            if not outcome.ok:
                raise EndpointError(f"a request of the flood failed: {outcome.error}: {outcome.note}")
            self.flooded += len(ask.tokens)

    async def quiet(self, way: str, asks: Sequence[Ask]) -> list[Outcome]:
        """Ask all of them when they are due, with the flood beside them but in ways without it."""
        flooded, routers = way not in UNFLOODED, self._at[way]
        flooders = [self._at[FLOOD][n % len(routers)] for n in range(self._args.flood if flooded else 0)]
        floods = [asyncio.create_task(self._flood(router)) for router in flooders]
        await asyncio.sleep(self._args.lead_s if flooded else 0)
        self.flooded, start = 0, time.perf_counter() + 0.05
        outcomes = await asyncio.gather(
            *(routers[number % len(routers)].ask_when_due(ask, start) for number, ask in enumerate(asks))
        )
        for flood in floods:
            flood.cancel()
        ended = await asyncio.gather(*floods, return_exceptions=True)
        if failures := [end for end in ended if isinstance(end, EndpointError)]:
            raise failures[0]
        for router in routers:
            await router.settle()
        return list(outcomes)


async def measure(clients: Clients, ways: Sequence[str], args: argparse.Namespace) -> list[Wait]:
    lengths, seeds = LengthRange.parse(args.input_tokens), count(1)
    found: dict[str, list[Outcome]] = {way: [] for way in ways}
    flooded = dict.fromkeys(ways, 0.0)
    await clients.quiet("alone", synthetic(Content(0, *TOKENS), 20, lengths, LengthRange(1, 1), rate=10.0))
    for _ in range(args.rounds):
        seed = next(seeds)
        for shift, way in enumerate(ways):
            asks = synthetic(
                Content(seed, *TOKENS), int(args.rate * args.seconds), lengths, LengthRange(1, 1), rate=args.rate
            )
            asks = [Ask(ask.at_s, tuple(token + shift for token in ask.tokens), ask.output_tokens) for ask in asks]
            began = time.perf_counter()
            with computing() if way == "busy" else nullcontext():
                found[way] += await clients.quiet(way, asks)
            flooded[way] += clients.flooded / (time.perf_counter() - began) / args.rounds
    return [waits(way, outcomes, flooded[way]) for way, outcomes in found.items()]


def waits(way: str, outcomes: Sequence[Outcome], flood_tokens_s: float) -> Wait:
    answered = [one.ttft_s * 1000 for one in outcomes if one.ok]
    cuts = statistics.quantiles(answered, n=100)
    return Wait(
        way, len(outcomes), len(outcomes) - len(answered), cuts[49], cuts[89], cuts[98], flood_tokens_s
    )  # fmt: skip


def table(results: Sequence[Wait]) -> Table:
    heads = ("way", "sent", "failed", "p50 ms", "p90 ms", "p99 ms", "p99 / alone", "flood, tokens/s")
    alone = next(one.p99_ms for one in results if one.way == "alone")
    rows = (
        (
            one.way, str(one.sent), str(one.failed), f"{one.p50_ms:.0f}", f"{one.p90_ms:.0f}", f"{one.p99_ms:.0f}",
            f"{one.p99_ms / alone:.2f}", f"{one.flood_tokens_s:,.0f}",
        )
        for one in results
    )  # fmt: skip
    return figure_table(None, heads, rows)


def write_keys(path: Path, weights: Sequence[int]) -> dict[str, str]:
    """Write the key file; returns the secrets by way, and the flood's."""
    tenants = {FLOOD: FLOOD, "alone": "quiet-1", "busy": "quiet-1", "fcfs": FLOOD} | {
        f"weight {n}": f"quiet-{n}" for n in weights
    }
    made = {who: mint_key(tenant, "") for who, tenant in tenants.items()}
    limits = {f"quiet-{n}": TenantLimits(weight=n) for n in weights}
    write_key_file(path, KeyFile(tuple(key for _, key in made.values()), limits))
    return {who: secret for who, (secret, _) in made.items()}


def main(argv: list[str] | None = None) -> int:
    parser = flag_parser(__doc__, cluster=True)
    parser.add_argument("--weights", type=int, nargs="+", default=[1, 8], help="of the quiet tenant")
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="only these; by default all")
    parser.add_argument("--flood", type=int, default=32, help="long prompts in flight")
    parser.add_argument("--flood-tokens", default="1200:1800", help="of the flood's prompts: N or LOW:HIGH")
    parser.add_argument("--lead-s", type=float, default=3.0, help="seconds of flood before the quiet tenant comes")
    parser.add_argument("--rate", type=float, default=2.0, help="prompts of the quiet tenant each second")
    parser.add_argument("--input-tokens", default="64:400", help="of its prompts")
    parser.add_argument("--seconds", type=float, default=20.0, help="of its arrivals in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-router", action="store_true")
    args = parser.parse_args(argv)
    print(headline())
    known = [*UNFLOODED, *(f"weight {n}" for n in args.weights), "fcfs"]
    ways = args.ways or known
    if unknown := [way for way in ways if way not in known]:
        parser.error(f"there is no way {unknown[0]}: alone, busy, fcfs, or 'weight N' of --weights")
    if "alone" not in ways:
        parser.error("the others are compared with alone: name it, too")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "keys.json"
        keys = write_keys(path, args.weights)
        urls = [stack.enter_context(serving(args.model, [f"security.keys_file={path}", *args.set]))]
        if not args.one_router:
            urls.append(stack.enter_context(second_router(urls[0])))
        bearer = {"Authorization": f"Bearer {keys['alone']}"}
        model = httpx.get(f"{urls[0]}/v1/models", headers=bearer).json()["data"][0]["id"]
        results = asyncio.run(measure(Clients(urls, model, keys, args), ways, args))
    print(
        f"{len(urls)} routers; {args.flood} prompts of {args.flood_tokens} tokens in flight beside the quiet tenant's"
    )
    Console(width=120).print(table(results))
    write_report(args, ways=[asdict(one) for one in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
