"""One colocated worker beside two pools, and beside `transformers serve`: the same loads, in turns.

    python -m bench.serving.colocated_load                 # colocated beside one prefill and one decode worker
    python -m bench.serving.colocated_load --transformers  # and beside transformers, where its server can run

All are up at the same time and are loaded one after the other, several rounds. Every process computes with the same
number of threads: two pools have two that compute, the others one.
"""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from bench.common.bench_report import flag_parser
from bench.common.child_server import SERVE_LOAD_FLAGS, missing, serving, transformers_serving
from bench.common.random_model import DEMO
from bench.serving import serve_load

LOADS = {
    "alone": "--concurrency 1 --requests {n} --input-tokens 128 --output-tokens 64",
    "crowd": "--concurrency 8 --requests {4n} --input-tokens 128 --output-tokens 64",
    "long": "--concurrency 8 --requests {2n} --input-tokens 64:1024 --output-tokens 48",
    "poisson": "--rate 6 --requests {3n} --input-tokens 64:512 --output-tokens 48",
}


def flags_of(load: str, requests: int) -> list[str]:
    text = load.replace("{n}", str(requests))
    for times in (2, 3, 4):
        text = text.replace(f"{{{times}n}}", str(times * requests))
    return shlex.split(text)


def main(argv: list[str] | None = None) -> int:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("--model", type=Path, default=DEMO, help="checkpoint folder (default: the demo)")
    parser.add_argument("--requests", type=int, default=16, help="of the load `alone`; the others have 2 to 4 times it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--transformers", action="store_true", help="also beside `transformers serve`")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker, and of the rival's server")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for both clusters")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for JSON")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.transformers and missing():
        parser.error(f"`transformers serve` needs {', '.join(missing())}: pip install them first")
    worst = 0
    with ExitStack() as stack:
        settings = [f"engine.threads={args.threads}", *args.set]
        colocated = stack.enter_context(serving(str(args.model), settings, ("--colocate", "1")))
        rivals: dict[str, tuple[str, tuple[str, ...]]] = {
            "two pools": (stack.enter_context(serving(str(args.model), settings)), ())
        }
        if args.transformers:
            server = stack.enter_context(transformers_serving(args.model, args.threads))
            named = ("--baseline-model", str(args.model.absolute()))
            rivals["transformers"] = (server, (*SERVE_LOAD_FLAGS, *named))
        for number, name in enumerate(args.loads, 1):
            for rival, (url, flags) in rivals.items():
                print(f"\n== {name}: colocated beside {rival}", flush=True)
                load = [*flags_of(LOADS[name], args.requests), "--seed", str(1000 * number), *flags]
                out = args.out / f"colocated-{name}-{rival.replace(' ', '-')}.json"
                where = ["--url", colocated, "--baseline-url", url, "--rounds", str(args.rounds)]
                worst = max(worst, serve_load.main([*where, *load, "--json", str(out)]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
