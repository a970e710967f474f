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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from bench.common.bench_report import figure_table, flag_parser, headline, percentile, write_report
from bench.common.child_server import serving
from bench.common.load_client import TOKENS, LoadClient
from twinpool.cli.replay.openai_client import Endpoint

MODES = ("always", "conditional")
SCENES = ("idle", "busy", "turns")
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


async def run_scene(client: LoadClient, seed: int, name: str, probes: int, streams: int, into: Seen) -> None:
    """Ask one cluster in one scene; figures are added to `into`."""
    rng = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(*TOKENS) for _ in range(tokens)]

    async def long_prompts() -> None:
        while True:
            await client.ask(prompt(LONG), 1)

    before = await client.counter("twinpool_local_prompts_total")
    running = [asyncio.create_task(client.ask(prompt(SHORT), STREAM_TOKENS)) for _ in range(streams)]
    behind = [asyncio.create_task(long_prompts()) for _ in range(2 if name != "idle" else 0)]
    history = prompt(HISTORY)
    if name == "turns":
        await client.ask(history, PROBE_TOKENS)
    times: list[tuple[float, float]] = []
    try:
        for _ in range(probes):
            await asyncio.sleep(rng.expovariate(1 / 0.05))
            history = [*history, *prompt(TURN)] if name == "turns" else prompt(SHORT)
            probe = await client.ask(history, PROBE_TOKENS)
            into.failed += not probe.ok
            if probe.ok:
                times.append((probe.sent_s, probe.end_s))
                into.first.append(1000 * probe.ttft_s)
                into.whole.append(1000 * probe.e2e_s)
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
    into.local += await client.counter("twinpool_local_prompts_total") - before


def table(seen: dict[tuple[str, str], Seen]) -> Table:
    """One row a scene: always / conditional, and the ratio of medians."""
    heads = "scene", "TTFT p50, ms", "p95", "ratio", "answer p50", "ratio", "ITL mean, ms", "p99", "local prompts"
    rows = []
    for scene in (name for name in SCENES if (name, MODES[0]) in seen):
        sides = [seen[scene, mode] for mode in MODES]
        first, whole = ([statistics.median(getattr(s, which)) for s in sides] for which in ("first", "whole"))
        cells = first, [percentile(s.first, 0.95) for s in sides], whole, [percentile(s.gaps, 0.99) for s in sides]
        p50, p95, answer, p99 = (f"{one:.0f} / {other:.0f}" for one, other in cells)
        gaps = " / ".join(f"{statistics.fmean(s.gaps):.1f}" for s in sides)
        ratios = (f"{one / other:.2f}" for one, other in (first, whole))
        rows.append((scene, p50, p95, next(ratios), answer, next(ratios), gaps, p99, str(sides[1].local)))
    return figure_table(None, heads, rows)


def main(argv: list[str] | None = None) -> int:
    parser = flag_parser(__doc__, cluster=True)
    parser.add_argument("--probes", type=int, default=25, help="of a scene, mode and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=3, help="answers that stream all along")
    parser.add_argument("--scenes", nargs="*", default=list(SCENES), choices=SCENES)
    args = parser.parse_args(argv)
    console = Console()
    console.print(headline())
    seen: dict[tuple[str, str], Seen] = {}
    # Without drafts, so that each token of the running answers comes by itself.
    settings = ["engine.threads=1", "decode.speculation=off", *args.set]
    with ExitStack() as stack:
        urls = {
            mode: stack.enter_context(serving(args.model, [*settings, f"disaggregation.mode={mode}"])) for mode in MODES
        }
        model = asyncio.run(Endpoint.parse(urls[MODES[0]]).first_model())
        for number in range(args.rounds):
            for scene in args.scenes:
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    client, seed = LoadClient(urls[mode], model), 1000 * number + SCENES.index(scene)
                    into = seen.setdefault((scene, mode), Seen())
                    asyncio.run(run_scene(client, seed, scene, args.probes, args.streams, into))
    console.print(table(seen))
    failed = sum(one.failed for one in seen.values())
    console.print(f"{failed} requests failed" if failed else "no request failed")
    write_report(args, scenes={f"{scene} {mode}": asdict(one) for (scene, mode), one in seen.items()})
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
