"""How long a stream pauses when a worker dies: from `kill -9` to its next token, and whether it is the right one.

Streams with seeds of their own are answered once undisturbed. Then they are asked again, a worker is killed while they
run, and each token is timed: a decode worker that holds running answers, or a prefill worker that computes prompts. A
stream was struck if it needed another attempt; its pause ends with the token after the longest silence since the kill.
Sampling is seeded and no grammar is involved, so every answer must be the undisturbed one, token by token, and its
log-probabilities bit for bit those of its replay: its prompt and tokens, computed as one prompt.

    python -m bench.serving.failover_pause --rounds 10 --json build/bench/failover.json
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench.common.bench_report import flag_parser, headline, write_report
from bench.common.child_server import serving
from tests.support.killed_workers import Failover, Load, Result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flag_parser(__doc__, cluster=True)
    parser.add_argument("--url", help="a cluster on this machine with two workers a role, rather than one started here")
    parser.add_argument("--rounds", type=int, default=8, help="workers killed, of each role")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--vocab", type=int, default=2000, help="prompts are of tokens below this")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    load = Load(args.streams, args.prompt_tokens, args.answer_tokens, args.vocab, args.seed)
    settings = ["cluster.restart_limit=100000", *args.set]
    if args.url:
        results = _both(args.url, load, args.rounds)
    else:
        with serving(args.model, settings, ["--prefill", "2", "--decode", "2"]) as url:
            results = _both(url, load, args.rounds)
    print(headline())
    for result in results:
        print(result.in_words())
    write_report(args, results=[asdict(r) for r in results])
    return 0 if all(r.same_tokens and r.replayed == r.logprobs for r in results) else 1


def _both(url: str, load: Load, rounds: int) -> list[Result]:
    failover = Failover(url, load)
    return [asyncio.run(failover.measure(role, rounds)) for role in ("decode", "prefill")]


if __name__ == "__main__":
    sys.exit(main())
