"""How often the stream watch flags what a model says, and how often what it says from damaged state.

    python -m bench.engine.stream_watch_rate [--model DIR] [--streams 60] [--tokens 256]

Prompts are what the model itself makes up. Ordinary answers come from undisturbed workers. Damaged ones come from
decode pages that are overwritten once the request runs there, behind the tags' back:

    noise, one page     16 positions of all keys and values are noise
    noise, all pages    all of the prompt's are
    a stranger's        every page of the prompt is another request's

The watch first hears ordinary streams until it knows what is usual, then the others. Answers that came out right in
spite of the damage are left out: there is nothing to be seen in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from bench.common import machine, random_model
from bench.engine.verification_cost import Shape, Workers
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.router_config import WatchConfig
from twinpool.contracts.ids import RequestId
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request.request import DecodePhase
from twinpool.decode.worker import DecodeWorker
from twinpool.router.verification.stream_watch import FlagReason, StreamWatch

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "temperature 0.8": SamplingParams(max_tokens=1, temperature=0.8),
    "temperature 1, top-p 0.95": SamplingParams(max_tokens=1, temperature=1.0, top_p=0.95),
}
PROMPT_TOKENS = 96
Damage = Callable[[DecodeWorker, list[list[int]]], None]


def _noise(worker: DecodeWorker, pages: list[list[int]]) -> None:
    """All that these pages hold is noise of the size that keys and values have."""
    pools, generator = worker._manager.pools, torch.Generator().manual_seed(1)
    for pool, buffers in pools.layout.buffers.items():
        for buffer in buffers:
            for layer in range(buffer.spec.layers):
                view = pools.layout.view(pools.region, pool, buffer, layer)
                for mine in pages:
                    here = view[mine]
                    view[mine] = (torch.randn(here.shape, generator=generator) * here.float().std()).to(view.dtype)


def _noise_in_one(worker: DecodeWorker, pages: list[list[int]]) -> None:
    _noise(worker, [mine[len(mine) // 2 :][:1] for mine in pages])


def _strangers(worker: DecodeWorker, pages: list[list[int]]) -> None:
    """Each request gets the next one's pages."""
    pools = worker._manager.pools
    for pool, buffers in pools.layout.buffers.items():
        for buffer in buffers:
            for layer in range(buffer.spec.layers):
                view = pools.layout.view(pools.region, pool, buffer, layer)
                before = [view[mine].clone() for mine in pages]
                for mine, theirs in zip(pages, [*before[1:], before[0]], strict=True):
                    view[mine] = theirs


DAMAGES: dict[str, Damage] = {
    "noise, one page": _noise_in_one,
    "noise, all pages": _noise,
    "a stranger's pages": _strangers,
}


@dataclass
class Seen:
    """What the watch said of some streams."""

    streams: int
    flagged: dict[str, int]
    """By reason, and for either."""
    positions: list[int]
    """Of the first token that was flagged."""


class Speaker:
    """Answers of one model, from state that is right or isn't."""

    def __init__(self, folder: Path, streams: int, tokens: int) -> None:
        self.spec = read_model_spec(folder)
        self.tokens = tokens
        self.workers = Workers(folder, Shape(streams, PROMPT_TOKENS, tokens), 1, host=False)

    def say(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seed: int, damage: Damage | None = None
    ) -> list[list[int]]:
        """Every prompt's answer."""
        each = [replace(sampling, max_tokens=self.tokens, seed=seed + n) for n in range(len(prompts))]
        said = self.workers.answer(prompts, each, lambda: None if damage is None else self._hurt(damage, len(prompts)))
        self.workers.forget()
        return said

    def _hurt(self, damage: Damage, count: int) -> bool:
        """Damage the prompts' pages once all requests run on decode; whether that was so."""
        decode = self.workers.decode
        running = [r for r in decode._request_table if r.phase is DecodePhase.RUNNING and r.allocation is not None]
        if len(running) < count:
            return False
        full = decode._manager.full
        damage(
            decode,
            [list(r.allocation.tables[full].pages[: PROMPT_TOKENS // 16]) for r in running if r.allocation is not None],
        )
        return True


def feed(watch: StreamWatch, name: str, streams: Sequence[Sequence[int]]) -> Seen:
    seen = Seen(len(streams), dict.fromkeys((*FlagReason, "either"), 0), [])
    for number, tokens in enumerate(streams):
        rid = RequestId(f"{name} {number}")
        flags = watch.feed(rid, tokens)
        watch.end(rid)
        for flag in flags:
            seen.flagged[flag.why] += 1
        if flags:
            seen.flagged["either"] += 1
            seen.positions.append(min(flag.position for flag in flags))
    return seen


def nanoseconds_a_token(config: WatchConfig, vocab: int, tokens: Sequence[int]) -> float:
    """What the watch takes of the router's time."""
    watch, times = StreamWatch(config, vocab), 10
    began = time.process_time()
    for n in range(times):
        rid = RequestId(str(n))
        for token in tokens:
            watch.feed(rid, (token,))
        watch.end(rid)
    return 1e9 * (time.process_time() - began) / (times * len(tokens))


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--model", type=Path, default=random_model.DEMO, help="checkpoint folder (default: the demo)")
    flags.add_argument("--streams", type=int, default=60, help="streams of each kind")
    flags.add_argument("--tokens", type=int, default=256, help="of each stream")
    flags.add_argument("--warm-up", type=int, default=4, help="times so many streams that the watch learns from")
    flags.add_argument("--repetition-tokens", type=int, default=64)
    flags.add_argument("--rare-factor", type=float, default=4.0)
    flags.add_argument("--json", type=Path, help="write all figures to this file")
    args = flags.parse_args(argv)
    torch.set_num_threads(1)
    speaker = Speaker(args.model, args.streams, args.tokens)
    try:
        return run(args, speaker)
    finally:
        speaker.workers.close()


def run(args: argparse.Namespace, speaker: Speaker) -> int:
    """Measure, print, write."""
    free, vocab = SamplingParams(max_tokens=1, temperature=1.0), speaker.spec.vocab_size
    first = speaker.spec.bos_token_id or 0
    starts = [[first]] * args.streams

    def prompts(seed: int) -> list[list[int]]:
        return [[first, *said][:PROMPT_TOKENS] for said in speaker.say(starts, free, seed)]

    console, out = Console(width=max(110, Console().width)), {}
    console.print(machine.headline())
    for name, sampling in SAMPLINGS.items():
        usual = [t for n in range(args.warm_up) for t in speaker.say(prompts(1000 * n), sampling, 2000 * n)]
        warm_up = max(1, sum(map(len, usual)) // 2)
        config = WatchConfig(args.repetition_tokens, rare_factor=args.rare_factor, warm_up_tokens=warm_up)
        watch = StreamWatch(config, vocab)
        feed(watch, "warm-up", usual)
        asked = prompts(77_000)
        right = speaker.say(asked, sampling, 88_000)
        seen = {"ordinary": feed(watch, "ordinary", right)}
        for kind, damage in DAMAGES.items():
            said = speaker.say(asked, sampling, 88_000, damage)
            wrong = [a for a, b in zip(said, right, strict=True) if a != b]
            seen[kind] = feed(watch, kind, wrong)
        console.print(table(f"{name}; usual rare rate {watch.rare_rate:.1%}", seen))
        out[name] = {kind: vars(one) for kind, one in seen.items()}
        cost = nanoseconds_a_token(config, vocab, usual[0])
        console.print(f"{cost:.0f} ns a token")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine.describe(), "streams": out}, indent=1) + "\n")
    return 0


def table(title: str, seen: dict[str, Seen]) -> Table:
    out = Table(title=title, title_justify="left")
    for name in ("answers", "streams", *FlagReason, "either", "at token"):
        out.add_column(name, justify="right" if name != "answers" else "left")
    for kind, one in seen.items():
        shares = [f"{count / max(1, one.streams):.1%}" for count in one.flagged.values()]
        at = f"{statistics.median(one.positions):.0f}" if one.positions else ""
        out.add_row(kind, str(one.streams), *shares, at)
    return out


if __name__ == "__main__":
    sys.exit(main())
