"""What of a prompt's transfer can be seen: the time between the end of its computation and decode's last check.

One prefill and one decode worker over plane `shm`, a model of eight layers with random weights, and a link that is
slowed to a rate. Prompts of several lengths are asked one at a time, in turns of three ways (`WAYS`): chunk by chunk on
the thread that computes, chunk by chunk on threads of their own, and layer by layer on these. Their answers' timelines
say what of the transfer was exposed and what ran beside the computation. The limit is one group's transfer,
`transfer.layer_group_bytes` over the rate, where the link is faster than the computation. Where it is slower a backlog
grows: what is exposed then is at least what all of the transfer takes longer than the computation.

    python -m bench.serving.exposed_transfer --rates 6 60 --json build/bench/exposed.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.common import machine
from bench.common.bench_cluster import serving
from bench.common.random_model import make

SIZE = "4m"
GROUP_BYTES = 256 << 10
TIMEOUT_S = 300.0
WAYS = {
    "chunk by chunk, no threads": ("engine.copy_threads=off",),
    "chunk by chunk, threads": ("engine.copy_threads=on", "transfer.layers=false"),
    "layer by layer, threads": ("engine.copy_threads=on", "transfer.layers=true"),
}
"""Settings by the way in which pages leave."""


@dataclass(frozen=True)
class Exposed:
    """Medians over the rounds of one setting, in milliseconds."""

    rate: int
    """Bytes a second that the link is slowed to."""
    tokens: int
    way: str
    exposed_ms: float
    hidden_ms: float
    first_token_ms: float
    transfer_bytes: int

    @property
    def transfer_ms(self) -> float:
        """What all of the transfer takes at the link's rate."""
        return 1000 * self.transfer_bytes / self.rate

    @property
    def backlog_bytes(self) -> int:
        """What the link can't have carried before the computation was over."""
        return min(self.transfer_bytes, int(self.exposed_ms / 1000 * self.rate))

    @property
    def limit_ms(self) -> float:
        """The least that can be exposed layer by layer: a group, or what the link lacks behind the computation."""
        behind = self.transfer_ms - self.first_token_ms  # Which prefill tells as soon as it is computed.
        return max(1000 * min(GROUP_BYTES, self.transfer_bytes) / self.rate, behind)


def checkpoint(folder: Path, context: int) -> Path:
    """A model of eight layers that takes prompts of `context` tokens."""
    make(folder, SIZE)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder


def ask(url: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    """Ask for two tokens after a prompt that nobody has seen; returns the answer's account of itself."""
    prompt = [rng.randrange(8, 2000) for _ in range(tokens)]
    model = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Twinpool-Timeline": "1"}, timeout=TIMEOUT_S)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()["twinpool"]
    return found


def measure(urls: dict[str, str], rate: int, lengths: list[int], rounds: int) -> list[Exposed]:
    """Ask in turns of all clusters."""
    rng, out = random.Random(7), []
    for url in urls.values():
        ask(url, 600, rng)
    for tokens in lengths:
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in urls}
        for _ in range(rounds):
            for way, url in urls.items():
                found[way].append(ask(url, tokens, rng))
        for way, answers in found.items():
            times = [answer["timeline"] for answer in answers]
            medians = [
                1000 * statistics.median(t[name] for t in times) for name in ("exposed", "hidden", "first_token")
            ]
            exposed, hidden, first = medians
            out.append(Exposed(rate, tokens, way, exposed, hidden, first, answers[0]["transfer_bytes"]))
    return out


def show(results: list[Exposed], file: Any) -> None:
    for one in results:
        print(
            f"{one.rate / 1e6:6.0f} MB/s {one.tokens:6} tokens, {one.way:27} exposed {one.exposed_ms:7.1f} ms "
            f"(at least {one.limit_ms:6.1f}), backlog {one.backlog_bytes / 1e6:5.2f} MB, hidden {one.hidden_ms:7.1f}, "
            f"first token {one.first_token_ms:8.1f}; all of it {one.transfer_ms:8.1f}",
            file=file,
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[6, 60], help="of the link, in MB a second")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    print(machine.headline())
    results: list[Exposed] = []
    context = max(args.tokens) + 1024
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder) / "model", context)
        for rate in (1_000_000 * megabytes for megabytes in args.rates):
            settings = [
                f"faults.link_bytes_per_s={rate}",
                f"transfer.layer_group_bytes={GROUP_BYTES}",
                "transfer.layer_group_s=0.000001",
                f"cache.device_tokens={2 * context}",
                "cache.prefix_reuse=false",
            ]
            with ExitStack() as stack:
                urls = {
                    way: stack.enter_context(serving(str(model), [*settings, *asked])) for way, asked in WAYS.items()
                }
                found = measure(urls, rate, args.tokens, args.rounds)
            show(found, sys.stdout)
            results += found
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
