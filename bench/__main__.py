"""All benches, by the question that each answers; figures go to the screen and, as JSON, to a folder.

    python -m bench                               # the short ones, in their short forms: some minutes
    python -m bench --list                        # every question, and the command that answers it
    python -m bench serve engine                  # some of them; --long for five times the repetitions
    python -m bench drain -- --streams 24         # one of them, with flags of its own
    python -m bench drain -- --help               # which these are

What needs a GPU, other projects' engines or hours has a command of its own: `python -m bench.gpu`, `bench.kernels`,
`bench.rivals`, `bench.demo_model.train`.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.common.bench_report import flag_parser

TRACE = os.path.relpath(Path(__file__).parent / "traces" / "conversation_200.jsonl")
SLO = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "50")


@dataclass(frozen=True)
class Bench:
    """One question."""

    question: str
    module: str
    short: Callable[[int], str] | None = None
    """The flags of its short form, by how many times the repetitions; None: it isn't one of the short ones."""


BENCHES = {
    "engine": Bench(
        "How fast is the engine beside transformers?",
        "bench.engine.engine_speed",
        lambda n: f"--threads 1 --repeats {3 * n}",
    ),
    "formats": Bench("How fast are weights of each format, beside other engines?", "bench.engine.formats"),
    "drafts": Bench("What do drafts gain, where what makes them is trained for its model?", "bench.serving.draft_gain"),
    "copies": Bench("How fast are copies between tiers?", "bench.cache.copy_speed", lambda n: f"--rounds {3 * n}"),
    "handover": Bench("How fast are the data planes?", "bench.serving.handover_speed", lambda n: f"--rounds {3 * n}"),
    "cache": Bench(
        "What does the prefix tree cost, by its size?",
        "bench.cache.tree_speed",
        lambda n: f"--pages 10000 100000 {'1000000' * (n > 1)} --repeats {3 * n}",
    ),
    "replay": Bench(
        "What share of a trace does a cache of some size find?",
        "bench.cache.trace_replay",
        lambda n: shlex.quote(TRACE),
    ),
    "serve": Bench("What do clients of a cluster see under load?", "bench.serving.serve_load", lambda n: ""),
    "failover": Bench(
        "How long does a stream pause when its worker dies?",
        "bench.serving.failover_pause",
        lambda n: f"--rounds {2 * n}",
    ),
    "batches": Bench("What do live streams see of a batch, and is each line answered once?", "bench.serving.batches"),
    "drain": Bench("How long does a stream pause when its worker is drained?", "bench.serving.drain_cost"),
    "router": Bench("What does a router cost, per request and per token?", "bench.serving.router_speed"),
    "hostile": Bench("What harm can hostile clients do?", "bench.serving.hostile_clients"),
    "tenants": Bench("What does a tenant see while another floods?", "bench.serving.tenant_fairness"),
    "colocated": Bench("What do two pools gain over one worker of both roles?", "bench.serving.colocated_load"),
    "scaling": Bench("Do real pools follow their load?", "bench.autoscaling.real_pools"),
    "simulated": Bench(
        "What do routing policies, sizes and autoscaling gain with a thousand simulated workers?", "bench.serving.scale"
    ),
}
OF_THE_MODEL = ("engine", "failover")
"""Those that `--model` is for."""


def loads(times: int) -> dict[str, list[str]]:
    """What the cluster of `serve` is put under, by name; about ten seconds each for the demo."""
    short, long = "--input-tokens 128 --output-tokens 64", "--input-tokens 768 --output-tokens 64 --shared-prefix 640"
    mixed, scaled = "--input-tokens 64:512 --output-tokens 48", "--scale-lengths 0.02 --speed 3 --max-context 1024"
    flags = {
        "alone": f"--concurrency 1 --requests {16 * times} {short}",
        "crowd": f"--concurrency 8 --requests {64 * times} {short}",
        "prefix": f"--concurrency 8 --requests {32 * times} {long}",
        "poisson": f"--rate 6 --requests {48 * times} {mixed}",
        "trace": f"--trace {shlex.quote(TRACE)} --requests {min(200, 40 * times)} {scaled}",
    }
    # Seeds of their own: none finds another's prompts in the cache.
    return {name: [*shlex.split(text), "--seed", str(1000 * n)] for n, (name, text) in enumerate(flags.items(), 1)}


def serve_all(url: str | None, model: str, times: int, settings: list[str], out: Path) -> int:
    """Every load on one cluster."""
    from bench.common.child_server import serving
    from bench.serving import serve_load

    worst = 0
    with ExitStack() as stack:
        target = url or stack.enter_context(serving(model, settings))
        for name, flags in loads(times).items():
            print(f"\n== serve, {name}: {shlex.join(flags)}", flush=True)
            json_file = str(out / f"serve-{name}.json")
            worst = max(worst, serve_load.main(["--url", target, *flags, *SLO, "--json", json_file]))
    return worst


def run(bench: Bench, flags: Sequence[str]) -> int:
    """The exit code of a bench's own program."""
    code: int = importlib.import_module(bench.module).main(list(flags))
    return code


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[words.index("--") + 1 :] if "--" in words else None
    flags = flag_parser(__doc__, json_file=False)
    flags.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)} (default: the short ones)")
    flags.add_argument("--list", action="store_true", help="print every question and its command")
    flags.add_argument("--model", help="checkpoint folder (default: the demo)")
    flags.add_argument("--url", help="of `serve`: measure this cluster rather than one started here")
    flags.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for that cluster")
    flags.add_argument("--long", action="store_true", help="five times the repetitions")
    flags.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for JSON")
    args = flags.parse_args(words[: words.index("--")] if "--" in words else words)
    if args.list:
        for name, bench in BENCHES.items():
            print(f"{bench.question}\n    python -m bench {name}")
        return 0
    chosen = args.benches or [name for name, bench in BENCHES.items() if bench.short is not None]
    if unknown := set(chosen) - set(BENCHES):
        flags.error(f"no bench named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    if own is not None:
        if len(args.benches) != 1:
            flags.error("flags behind -- are those of one bench: name it")
        return run(BENCHES[chosen[0]], own)
    args.out.mkdir(parents=True, exist_ok=True)
    times, worst = (5 if args.long else 1), 0
    for name in chosen:
        bench = BENCHES[name]
        print(f"\n== {name}: {bench.question}", flush=True)
        if name == "serve":
            worst = max(worst, serve_all(args.url, args.model or "demo", times, args.set, args.out))
            continue
        given = shlex.split(bench.short(times)) if bench.short is not None else []
        given += ["--model", args.model] if args.model and name in OF_THE_MODEL else []
        worst = max(worst, run(bench, [*given, "--json", str(args.out / f"{name}.json")]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
