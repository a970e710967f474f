"""What structured output costs: a token, a schema that is new, and other streams while a hard schema compiles.

    python -m bench.serving.grammar_cost
    python -m bench.serving.grammar_cost --model build/published-model/model

Three tables of one cluster, whose drafts are off so that all answers take the same steps:

- `token`: milliseconds a token of answers without a grammar, and of as long ones that follow one, in turns.
- `schema`: milliseconds to the first token of requests without a schema, with one that is new each time, and with one
  that was compiled before.
- `beside`: gaps between the tokens of streams without a grammar, while short requests come one after another: plain
  ones, and ones with a hard schema that is new each time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.common.bench_cluster import serving

TIMEOUT_S = 300.0
_WORD = {"type": "string", "maxLength": 12}
ENDLESS: dict[str, dict[str, Any]] = {
    "none": {},
    "any text": {"guided_regex": r"[\s\S]+"},
    "words": {"guided_regex": "(?:[A-Z]?[a-z]+[,;.]? )+"},
    "schema": {
        "guided_json": {
            "type": "array",
            "minItems": 1000,
            "items": {
                "type": "object",
                "properties": {"name": _WORD, "tags": {"type": "array", "items": _WORD, "maxItems": 3}},
                "required": ["name", "tags"],
                "additionalProperties": False,
            },
        }
    },
}
"""Grammars that no answer of some hundred tokens comes to an end of."""


@dataclass(frozen=True)
class GrammarCost:
    """One row of a table: milliseconds, at the median of the rounds unless `at` says otherwise."""

    table: str
    what: str
    at: str
    ms: float


class Cluster:
    """The cluster that is measured."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._model = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]

    def arrivals(self, number: int, tokens: int, **more: Any) -> list[float]:
        """Seconds from the request to each token of one answer."""
        body = {
            "model": self._model, "prompt": f"Chapter {number}. It was", "max_tokens": tokens, "temperature": 0.8,
            "seed": number, "ignore_eos": True, "stream": True, **more,
        }  # fmt: skip
        began, found = time.perf_counter(), list[float]()
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(response.read().decode())
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if "error" in json.loads(line[6:]):
                        raise RuntimeError(line)
                    found.append(time.perf_counter() - began)
        return found


def hard_schema(number: int, properties: int = 600) -> dict[str, Any]:
    """A schema that takes long to compile, and is new for each number."""
    named = {
        f"p{number}_{one}": {"type": "string", "pattern": f"^[a-z]{{3,{one % 40 + 4}}}$"} for one in range(properties)
    }
    return {"type": "object", "properties": named, "additionalProperties": False}


def token_costs(cluster: Cluster, at_once: int, rounds: int, tokens: int) -> list[GrammarCost]:
    taken: dict[str, list[float]] = {name: [] for name in ENDLESS}
    with ThreadPoolExecutor(at_once) as pool:
        for number in range(rounds + 1):
            for name, asked in ENDLESS.items():
                jobs = [pool.submit(cluster.arrivals, number * 100 + n, tokens, **asked) for n in range(at_once)]
                ends = [(at[-1] - at[0]) / (len(at) - 1) for at in (job.result() for job in jobs)]
                if number:  # The first round warms up.
                    taken[name].append(1e3 * statistics.mean(ends))
    return [GrammarCost("token", name, f"{at_once} at once", statistics.median(ms)) for name, ms in taken.items()]


def schema_costs(cluster: Cluster, rounds: int) -> list[GrammarCost]:
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        small = {"type": "object", "properties": {f"p{number}": _WORD}, "required": [f"p{number}"]}
        asked = {"none": {}, "small, new": {"guided_json": small}, "small, known": {"guided_json": small}}
        hard = hard_schema(1000 + number)
        asked |= {"600 properties, new": {"guided_json": hard}, "600 properties, known": {"guided_json": hard}}
        for name, more in asked.items():
            first = cluster.arrivals(number, 4, **more)[0]
            if number:
                taken.setdefault(name, []).append(1e3 * first)
    return [GrammarCost("schema", name, "first token", statistics.median(ms)) for name, ms in taken.items()]


def beside_costs(cluster: Cluster, streams: int, tokens: int) -> list[GrammarCost]:
    """Gaps of `streams` answers while short requests come, one after another."""
    out = []
    for name, hard in (("plain requests", False), ("hard schemas", True)):
        over = threading.Event()
        asked = 0

        def others(hard: bool = hard, over: threading.Event = over) -> int:
            number = 0
            while not over.is_set():
                number += 1
                more = {"guided_json": hard_schema(5000 + number)} if hard else {}
                cluster.arrivals(900 + number, 4, **more)
            return number

        with ThreadPoolExecutor(streams + 1) as pool:
            beside = pool.submit(others)
            jobs = [pool.submit(cluster.arrivals, 40 + n, tokens) for n in range(streams)]
            gaps = [1e3 * (b - a) for job in jobs for a, b in zip(job.result(), job.result()[1:], strict=False)]
            over.set()
            asked = beside.result()
        what = f"{name} ({asked})"
        cuts = statistics.quantiles(gaps, n=1000)
        out += [
            GrammarCost("beside", what, "p50", statistics.median(gaps)),
            GrammarCost("beside", what, "p99", cuts[989]),
            GrammarCost("beside", what, "max", max(gaps)),
        ]
    return out


def table(results: Sequence[GrammarCost]) -> Table:
    shown = Table("table", "what", "at", "ms", "/ none")
    base: dict[tuple[str, str], float] = {}
    for one in results:
        plain = base.setdefault((one.table, one.at), one.ms)  # The first of a table's column is without a grammar.
        shown.add_row(one.table, one.what, one.at, f"{one.ms:.2f}", f"{one.ms / plain:.2f}")
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    print(machine.headline())
    results: list[GrammarCost] = []
    with serving(args.model, ["decode.speculation=off"]) as url:
        cluster = Cluster(url)
        for at_once in args.at_once:
            results += token_costs(cluster, at_once, args.rounds, args.tokens)
        results += schema_costs(cluster, args.rounds)
        results += beside_costs(cluster, max(args.at_once), 3 * args.tokens)
    Console().print(table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
