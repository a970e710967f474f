"""What drafts gain: tokens a second of the same answers, with and without prompt lookup.

    python -m bench.serving.draft_gain
    python -m bench.serving.draft_gain --model build/published-model/model --drafts 4 8 --at-once 1 4

Clusters that differ in `decode.speculation` and `decode.draft_tokens` alone are asked the same in turns. Prompts are of
two kinds: `repeated` has a passage twice and begins it a third time, as an answer does that quotes or edits its prompt;
`new` has it once and goes on from there. Answers must be the same tokens everywhere: a difference is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.common.bench_cluster import serving

KINDS = ("repeated", "new")
TIMEOUT_S = 300.0
_PROSE = Path(__file__).parents[1] / "demo_model" / "heldout.txt"


@dataclass(frozen=True)
class DraftGain:
    """One kind of prompts, so many at once, with up to so many drafts."""

    kind: str
    temperature: float
    at_once: int
    drafts: int
    tokens_per_s: float
    """Median of the rounds, of all streams together."""
    accepted: float
    """Part of the drafts that was drawn."""
    per_step: float
    """Tokens that a request drew in a step, on average over all of its steps."""


def prompts(kind: str, count: int, letters: int) -> list[str]:
    """Prompts of passages of about so many letters."""
    lines = [line for line in _PROSE.read_text().splitlines() if len(line) >= letters][:count]
    assert len(lines) == count, "the prose has not so many long paragraphs"
    passages = [line[:letters].rsplit(" ", 1)[0] for line in lines]
    if kind == "new":
        return passages
    return [f"{passage}\n\n{passage}\n\n{passage[: letters // 8].rsplit(' ', 1)[0]}" for passage in passages]


class Cluster:
    """A cluster with up to `drafts` drafts a row."""

    def __init__(self, url: str, drafts: int) -> None:
        self.url, self.drafts = url, drafts
        self._model = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]

    def ask(self, prompt: str, tokens: int, temperature: float) -> list[str]:
        """The pieces of one answer."""
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 7,
            "ignore_eos": True, "logprobs": 0,
        }  # fmt: skip
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        answer.raise_for_status()
        found: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
        return found

    def counted(self) -> tuple[float, float]:
        """Drafts made, and drafts drawn, so far, by all of its workers."""
        workers = httpx.get(f"{self.url}/cluster/status", timeout=TIMEOUT_S).json()["workers"]
        counters = [worker["counters"] for worker in (workers.values() if isinstance(workers, dict) else workers)]
        made, drawn = (sum(c.get(name, 0) for c in counters) for name in ("tokens_drafted", "drafts_accepted"))
        return made, drawn


def settings(drafts: int) -> list[str]:
    return [f"decode.draft_tokens={drafts}"] if drafts else ["decode.speculation=off"]


def measure(clusters: Sequence[Cluster], args: argparse.Namespace, kind: str, at_once: int) -> list[DraftGain]:
    """Ask all clusters the same in turns; raises `RuntimeError` where their answers differ."""
    asked = prompts(kind, at_once, args.letters)
    rates: dict[int, list[float]] = {cluster.drafts: [] for cluster in clusters}
    before = {cluster.drafts: cluster.counted() for cluster in clusters}
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(args.rounds):
            answers = []
            for cluster in clusters:
                began = time.perf_counter()
                jobs = [pool.submit(cluster.ask, prompt, args.tokens, args.temperature) for prompt in asked]
                answers.append([job.result() for job in jobs])
                rates[cluster.drafts].append(at_once * args.tokens / (time.perf_counter() - began))
            if any(answer != answers[0] for answer in answers):
                raise RuntimeError("answers with drafts are not those without")
    time.sleep(1.5)  # The counters of the last heartbeat.
    out = []
    for cluster in clusters:
        made, drawn = (now - then for now, then in zip(cluster.counted(), before[cluster.drafts], strict=True))
        steps = args.rounds * at_once * args.tokens - drawn
        out.append(
            DraftGain(
                kind, args.temperature, at_once, cluster.drafts, statistics.median(rates[cluster.drafts]),
                drawn / made if made else 0.0, args.rounds * at_once * args.tokens / steps,
            )
        )  # fmt: skip
    return out


def table(results: Sequence[DraftGain]) -> Table:
    shown = Table("prompts", "temperature", "at once", "drafts", "tokens/s", "/ none", "drawn", "tokens a step")
    plain = {(one.kind, one.at_once): one.tokens_per_s for one in results if not one.drafts}
    for one in results:
        ratio = one.tokens_per_s / plain[one.kind, one.at_once]
        shown.add_row(
            one.kind, f"{one.temperature:g}", str(one.at_once), str(one.drafts), f"{one.tokens_per_s:.0f}",
            f"{ratio:.2f}", f"{one.accepted:.0%}" if one.drafts else "", f"{one.per_step:.2f}",
        )  # fmt: skip
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--letters", type=int, default=600, help="of a passage")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    print(machine.headline())
    results: list[DraftGain] = []
    with ExitStack() as stack:
        clusters = [
            Cluster(
                stack.enter_context(
                    serving(args.model, [*settings(drafts), f"decode.draft_requests={max(args.at_once)}"])
                ),
                drafts,
            )
            for drafts in (0, *args.drafts)
        ]
        for kind in KINDS:
            for at_once in args.at_once:
                results += measure(clusters, args, kind, at_once)
    Console().print(table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found: list[dict[str, Any]] = [asdict(one) for one in results]
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
