"""All benches in their short forms, on this machine: some minutes. Figures go to the screen and, as JSON, to a folder.

    python -m bench                       # all
    python -m bench serve                 # one of them
    python -m bench --model DIR --long    # another checkpoint, five times the repetitions

`engine` measures the engine beside transformers, `steps` what planning a decode step costs the host, `copies` what
moves between tiers beside a memcpy, `cache` the prefix tree by its size and the tiers through a KV cache manager,
`replay` hit rates of a real trace by cache size, `handover` the data planes beside a copy and a socket, `arrival` what
decode loses while state comes, `serve` a cluster that it starts (or the one at `--url`): one request at a time, many at
once, and arrivals of a real trace; `failover` how long streams pause when a worker of a cluster is killed. Each bench
has more flags of its own: `python -m bench.engine.engine_speed --help`, and so on.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from bench.cache import copy_speed as copies
from bench.cache import trace_replay as trace_cache
from bench.cache import tree_speed as cache
from bench.common.bench_cluster import serving
from bench.common.random_model import DEMO
from bench.engine import engine_speed as engine
from bench.engine import step_planning as steps
from bench.serving import arrival_cost as arrival
from bench.serving import failover_pause as failover
from bench.serving import handover_speed as handover
from bench.serving import serve_load as serve

BENCHES = ("engine", "steps", "copies", "cache", "replay", "handover", "arrival", "serve", "failover")
TRACE = os.path.relpath(Path(__file__).parent / "traces" / "conversation_200.jsonl")
SLO = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "50")


def loads(times: int) -> dict[str, list[str]]:
    """What the cluster is put under, by name; about ten seconds each for the demo."""
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
    worst = 0
    with ExitStack() as stack:
        target = url or stack.enter_context(serving(model, settings))
        for name, flags in loads(times).items():
            print(f"\n== serve, {name}: {shlex.join(flags)}", flush=True)
            json_file = str(out / f"serve-{name}.json")
            worst = max(worst, serve.main(["--url", target, *flags, *SLO, "--json", json_file]))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint folder (default: the demo)")
    parser.add_argument("--url", help="measure this cluster rather than one started here")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for that cluster")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads of the engine's bench")
    parser.add_argument("--long", action="store_true", help="five times the repetitions")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for JSON")
    args = parser.parse_args()
    chosen = args.benches or list(BENCHES)
    if unknown := set(chosen) - set(BENCHES):
        parser.error(f"no bench named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    times, worst = (5 if args.long else 1), 0
    if "engine" in chosen:
        print("== engine", flush=True)
        flags = ["--model", str(args.model), "--threads", str(args.threads), "--repeats", str(3 * times)]
        worst = max(worst, engine.main([*flags, "--json", str(args.out / "engine.json")]))
    if "steps" in chosen:
        print("\n== steps", flush=True)
        worst = max(worst, steps.main(["--rounds", str(15 * times), "--json", str(args.out / "steps.json")]))
    if "copies" in chosen:
        print("\n== copies", flush=True)
        worst = max(worst, copies.main(["--rounds", str(3 * times), "--json", str(args.out / "copies.json")]))
    if "handover" in chosen:
        print("\n== handover", flush=True)
        worst = max(worst, handover.main(["--rounds", str(3 * times), "--json", str(args.out / "handover.json")]))
    if "arrival" in chosen:
        print("\n== arrival", flush=True)
        worst = max(worst, arrival.main(["--rounds", str(3 * times), "--json", str(args.out / "arrival.json")]))
    if "cache" in chosen:
        print("\n== cache", flush=True)
        sizes = ["10000", "100000", *(["1000000"] if args.long else [])]
        flags = ["--pages", *sizes, "--repeats", str(3 * times)]
        worst = max(worst, cache.main([*flags, "--json", str(args.out / "cache.json")]))
    if "replay" in chosen:
        print("\n== replay", flush=True)
        worst = max(worst, trace_cache.main([TRACE, "--json", str(args.out / "replay.json")]))
    if "serve" in chosen:
        worst = max(worst, serve_all(args.url, str(args.model), times, args.set, args.out))
    if "failover" in chosen:
        print("\n== failover", flush=True)
        flags = ["--model", str(args.model), "--rounds", str(2 * times), "--json", str(args.out / "failover.json")]
        worst = max(worst, failover.main(flags))
    return worst


if __name__ == "__main__":
    sys.exit(main())
