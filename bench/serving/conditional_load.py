"""Decode workers that compute some prompts themselves, beside those that get all of them handed over: the same loads.

    python -m bench.serving.conditional_load
    python -m bench.serving.conditional_load --probes 40 --rounds 3 --set engine.threads=1

Two clusters of one prefill and one decode worker are up at the same time, one with `disaggregation.mode=always` and one
with `conditional`, and are loaded in turns. In each scene a few answers stream all along, and probes come one after the
other, whose time to first token and to the end of a short answer is measured:

- `idle`: short prompts, and nothing else for prefill to do.
- `busy`: short prompts, while other clients keep long prompts in flight at prefill.
- `turns`: later turns of one conversation, whose tokens both pools hold but for the newest, under the same.

What the running answers pay shows in their inter-token latencies meanwhile: their mean, as several tokens may come at
once where this process is late. Figures are always / conditional.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.common.bench_cluster import serving
from bench.common.bench_report import flag_parser, write_report
from bench.common.random_model import DEMO
from bench.common.workload import greedy_completion
from twinpool.cli.replay.openai_client import Endpoint, Outcome, stream

MODES = ("always", "conditional")
SCENES = ("idle", "busy", "turns")
TIMEOUT_S = 120.0
TOKENS = (300, 900)
"""Ids of ordinary tokens, of the demo's vocabulary and of most."""
SHORT, LONG, HISTORY, TURN = 48, 1400, 640, 24
"""Tokens of prompts, of a conversation's first turn, and of each later one."""
STREAM_TOKENS, PROBE_TOKENS = 1200, 4


@dataclass
class Seen:
    """What one mode came to in one scene, of all rounds; milliseconds."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    """To the end of an answer of `PROBE_TOKENS` tokens, for which the hand-over must be over."""
    gaps: list[float] = field(default_factory=list)
    """Between tokens of the running answers."""
    local: int = 0
    """Prompts that decode computed, those of the running answers included."""
    failed: int = 0


class Load:
    """The clients of one cluster."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self.endpoint = Endpoint.parse(url)
        self._model, self._rng = model, random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(*TOKENS) for _ in range(tokens)]

    async def ask(self, prompt: Sequence[int], tokens: int) -> Outcome:
        body = greedy_completion(self._model, prompt, tokens, stream_options={"include_usage": True})
        outcome = Outcome(0.0, 0.0, len(prompt), tokens)
        return await stream(self.endpoint, self.endpoint.encode("/v1/completions", body), outcome, TIMEOUT_S)

    async def scene(self, name: str, probes: int, streams: int, into: Seen) -> None:
        before = await self._local()
        running = [asyncio.create_task(self.ask(self.prompt(SHORT), STREAM_TOKENS)) for _ in range(streams)]
        behind = [asyncio.create_task(self._long_prompts()) for _ in range(2 if name != "idle" else 0)]
        prompt = self.prompt(HISTORY)
        if name == "turns":
            await self.ask(prompt, PROBE_TOKENS)
        times: list[tuple[float, float]] = []
        try:
            for _ in range(probes):
                await asyncio.sleep(self._rng.expovariate(1 / 0.05))
                prompt = [*prompt, *self.prompt(TURN)] if name == "turns" else self.prompt(SHORT)
                told = await self.ask(prompt, PROBE_TOKENS)
                into.failed += not told.ok
                if told.ok:
                    times.append((told.sent_s, told.end_s))
                    into.first.append(1000 * told.ttft_s)
                    into.whole.append(1000 * told.e2e_s)
        finally:
            for task in behind:
                task.cancel()
            await asyncio.gather(*behind, return_exceptions=True)
        for outcome in await asyncio.gather(*running):
            into.failed += not outcome.ok
            # Only what came while a probe was under way: the rest is the same for both.
            for one, other in zip(outcome.arrivals_s, outcome.arrivals_s[1:], strict=False):
                if any(begun <= other and one <= ended for begun, ended in times):
                    into.gaps.append(1000 * (other - one))
        into.local += await self._local() - before

    async def _long_prompts(self) -> None:
        while True:
            await self.ask(self.prompt(LONG), 1)

    async def _local(self) -> int:
        async with httpx.AsyncClient() as client:
            text = (await client.get(self.endpoint.url + "/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("twinpool_local_prompts_total{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def table(seen: dict[tuple[str, str], Seen]) -> Table:
    """One row a scene: always / conditional, and the ratio of medians."""
    shown = Table(
        "scene", "TTFT p50, ms", "p95", "ratio", "answer p50", "ratio", "ITL mean, ms", "p99", "local prompts"
    )
    for scene in SCENES:
        if (scene, MODES[0]) not in seen:
            continue
        one, other = (seen[scene, mode] for mode in MODES)
        first = [statistics.median(s.first) for s in (one, other)]
        whole = [statistics.median(s.whole) for s in (one, other)]
        shown.add_row(
            scene,
            f"{first[0]:.0f} / {first[1]:.0f}",
            f"{percentile(one.first, 0.95):.0f} / {percentile(other.first, 0.95):.0f}",
            f"{first[0] / first[1]:.2f}",
            f"{whole[0]:.0f} / {whole[1]:.0f}",
            f"{whole[0] / whole[1]:.2f}",
            f"{statistics.fmean(one.gaps):.1f} / {statistics.fmean(other.gaps):.1f}",
            f"{percentile(one.gaps, 0.99):.0f} / {percentile(other.gaps, 0.99):.0f}",
            str(other.local),
        )
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = flag_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint folder (default: the demo)")
    parser.add_argument("--probes", type=int, default=25, help="of a scene, mode and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=3, help="answers that stream all along")
    parser.add_argument("--scenes", nargs="*", default=list(SCENES), choices=SCENES)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for both clusters")
    args = parser.parse_args(argv)
    console = Console()
    console.print(machine.headline())
    seen: dict[tuple[str, str], Seen] = {}
    # Without drafts, so that each token of the running answers comes by itself.
    settings = ["engine.threads=1", "decode.speculation=off", *args.set]
    with ExitStack() as stack:
        urls = {
            mode: stack.enter_context(serving(str(args.model), [*settings, f"disaggregation.mode={mode}"]))
            for mode in MODES
        }
        model = asyncio.run(Endpoint.parse(urls[MODES[0]]).first_model())
        for number in range(args.rounds):
            for scene in args.scenes:
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    load = Load(urls[mode], model, seed=1000 * number + SCENES.index(scene))
                    into = seen.setdefault((scene, mode), Seen())
                    asyncio.run(load.scene(scene, args.probes, args.streams, into))
    console.print(table(seen))
    failed = sum(one.failed for one in seen.values())
    console.print(f"{failed} requests failed" if failed else "no request failed")
    write_report(args, scenes={f"{scene} {mode}": asdict(one) for (scene, mode), one in seen.items()})
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
